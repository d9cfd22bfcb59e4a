"""Credentials in tool definitions, taken out before anything is stored."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

REDACTED = "[redacted]"
# Names of fields whose values are secret, whatever they hold.
SECRET = re.compile(
    r"headers|cookies?|authorization|credentials?|secrets?|passw(or)?d|bearer|"
    r"(.*_)?(token|api_?key|apikey|secret|password|secrets|credentials)",
    re.IGNORECASE,
)
# JSON schemas, where such a name is a parameter's and no value stands beside it.
SCHEMAS = frozenset({"parameters", "input_schema", "output_schema", "schema", "format"})


class ToolsField(msgspec.Struct):
    """The one part of a response that credentials come in."""

    tools: msgspec.Raw = msgspec.Raw(b"")


class EventWithTools(msgspec.Struct):
    """Events that tell the whole response hold its tools, too."""

    response: ToolsField | None = None


BODIES, EVENTS = msgspec.json.Decoder(ToolsField), msgspec.json.Decoder(EventWithTools)


def redact_body(document: bytes) -> bytes:
    """A response object as JSON, without credentials.

    Raises:
        msgspec.DecodeError: it is no JSON object.
    """
    if has_no_tools(BODIES.decode(document)):
        return document
    found = msgspec.json.decode(document)
    found["tools"] = redact_value(found["tools"])
    return msgspec.json.encode(found)


def redact_event(document: bytes) -> bytes:
    """A stream's event as JSON, without credentials.

    Raises:
        msgspec.DecodeError: it is no JSON object.
    """
    response = EVENTS.decode(document).response
    if response is None or has_no_tools(response):
        return document
    found = msgspec.json.decode(document)
    found["response"]["tools"] = redact_value(found["response"]["tools"])
    return msgspec.json.encode(found)


def has_no_tools(tools_field: ToolsField) -> bool:
    return bytes(tools_field.tools) in {b"", b"[]", b"null"}


def redact_value(value: Any, name: str = "", *, secret: bool = False) -> Any:
    """A tool definition whose secrets read ``[redacted]``; types stay as they are.

    Args:
        value: the definition, or a part of it.
        name: of the field that it was found in.
        secret: whether it is part of a secret.
    """
    if isinstance(value, dict):
        return {
            key: item
            if key in SCHEMAS
            else redact_value(item, key, secret=secret or bool(SECRET.fullmatch(key)))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact_value(item, name, secret=secret) for item in value]
    if isinstance(value, str) and value:
        if secret:
            return REDACTED
        if name.endswith(("url", "uri")):
            return strip_url_secrets(value)
    return value


def strip_url_secrets(url: str) -> str:
    """A URL without user, password, query and fragment, where a token may stand."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return REDACTED
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
