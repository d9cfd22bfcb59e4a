"""The fields of responses and events that vLLM leaves out, or leaves null.

They are set on vLLM's objects before these become JSON, so that the bytes are made once, and what
is stored, streamed and replayed is the same.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from openai.types.responses import ResponseTextConfig
from openai.types.shared import ResponseFormatText
from pydantic import BaseModel

from ..store.response_defaults import DEFAULTS
from .request_parameters import get_parameter, get_sent_fields, should_obfuscate
from .wire_format import ENCODE, EncodedEvent

DELTA = msgspec.json.Decoder(dict[str, Any])
# Events are padded to a multiple of it, in bytes.
STEP = 32
# Of vLLM's response these say what the request was run with, not what it asked for.
_RUN = frozenset({"completed_at", "error", "incomplete_details", "usage"})
MEDIUM: Any = "medium"  # the default
PLAIN = ResponseTextConfig(format=ResponseFormatText(type="text"), verbosity=MEDIUM)
# The fields of an item that have parts.
PARTS = frozenset({"content", "summary"})
# Lists of vLLM's among numbers, at which clients that check them throw; and a field of OpenAI's
# type that nothing here fills.
UNCOUNTED = {
    "input_tokens_details": {
        *("input_tokens_per_turn", "cached_tokens_per_turn", "cache_write_tokens_details"),
    },
    "output_tokens_details": {"output_tokens_per_turn", "tool_output_tokens_per_turn"},
}
# What a response says only where its request does.
ECHOED = frozenset({"prompt_cache_retention"})


def fill_response(response: Any, request: Any) -> Any:
    """A response with every field that OpenAI's types require.

    Writes into what pydantic's models are made of, because their attributes cost 20 times as much.

    Args:
        response: vLLM's; what is missing or null in it is set to what the request says, or to the
            documented default.
        request: vLLM's ResponsesRequest.
    """
    declared = vars(response)
    extra = response.__pydantic_extra__

    def set_field(name: str, value: Any) -> None:
        (declared if name in declared else extra)[name] = value

    for name in ECHOED & request.model_fields_set:
        set_field(name, get_parameter(request, name))
    for name, default in DEFAULTS.items():
        if declared.get(name) is None and extra.get(name) is None:
            asked = None if name in _RUN else get_parameter(request, name)
            set_field(name, default if asked is None else asked)
    set_field("store", bool(request.store))
    set_field("service_tier", "default")  # vLLM has no other
    set_field("text", fill_text_config(request.text))
    for name, value in get_sent_fields(request).items():
        set_field(name, value)
    if response.status == "completed":
        set_field("completed_at", int(time.time()))
    if response.usage:
        details = response.usage.input_tokens_details
        if "cache_write_tokens" not in vars(details):
            details.__pydantic_extra__["cache_write_tokens"] = 0  # older versions count none
    return response


def fill_text_config(text: Any) -> Any:
    """The format of the answer's text, as the request says it."""
    if text is None:
        return PLAIN
    form: Any = text.format or PLAIN.format
    if form.type == "json_schema" and form.strict is None:
        form = form.model_copy(update={"strict": False})
    return text.model_copy(update={"format": form, "verbosity": text.verbosity or MEDIUM})


def fill_event(event: Any, request: Any) -> Any:
    """An event of a stream with every field that OpenAI's types require.

    Args:
        event: vLLM's; it is changed.
        request: vLLM's ResponsesRequest.
    """
    values = vars(event)
    if response := values.get("response"):
        fill_response(response, request)
    for logprob in values.get("logprobs") or ():
        for token in (logprob, *(logprob.top_logprobs or ())):
            if getattr(token, "bytes", None) is None:
                token.bytes = list((token.token or "").encode())
    if event.type.endswith(".delta") and should_obfuscate(request):
        event.obfuscation = make_padding(event.delta)
    return event


def encode_model(model: Any) -> bytes:
    """A response or an event as JSON.

    As in OpenAI's API, a field of an item or of a part of it is left out where it is null, and a
    response's own fields say that they are null.

    Args:
        model: vLLM's, or OpenAI's.
    """
    text: str = model.model_dump_json(by_alias=True, exclude=find_excluded_fields(model))
    return text.encode()


def find_excluded_fields(model: Any) -> dict[Any, Any] | None:
    """The fields of a model that are left out, as pydantic's `exclude`; None if none is."""
    values = vars(model)
    if "output" in values:
        without: dict[Any, Any] = {"usage": UNCOUNTED} if values.get("usage") else {}
        if found := find_null_fields_by_index(values["output"]):
            without["output"] = found
        return without or None
    for name, inside in (
        ("response", find_excluded_fields),
        ("item", find_null_fields),
        ("part", find_null_fields),
    ):
        if isinstance(inner := values.get(name), BaseModel):
            nested = inside(inner)
            return {name: nested} if nested else None
    return None


def find_null_fields(item: BaseModel) -> dict[Any, Any]:
    """As `find_excluded_fields`, of an item or a part of one."""
    values = vars(item)
    found: dict[Any, Any] = {name: True for name, value in values.items() if value is None}
    for name in PARTS & values.keys():
        if parts := find_null_fields_by_index(values[name]):
            found[name] = parts
    return found


def find_null_fields_by_index(items: Any) -> dict[Any, Any]:
    """As `find_excluded_fields`, of each item of a list, by its index."""
    if not isinstance(items, list):
        return {}
    return {
        at: found
        for at, item in enumerate(items)
        if isinstance(item, BaseModel) and (found := find_null_fields(item))
    }


def clear_output(response: Any) -> None:
    """Make a response one that has no output, because its request only filled the prefix cache."""
    response.output.clear()
    response.status, response.incomplete_details = "completed", None
    usage = response.usage
    if usage:
        usage.total_tokens, usage.output_tokens = usage.input_tokens, 0
        usage.output_tokens_details.reasoning_tokens = 0


def make_padding(delta: str) -> str:
    """Random characters, so that the size of an event tells little of the text in it."""
    return secrets.token_hex(STEP)[: STEP - len(delta.encode()) % STEP]


async def obfuscate_events(
    events: AsyncIterator[EncodedEvent], *, should_pad: bool
) -> AsyncGenerator[EncodedEvent, None]:
    """Stored events with padding, or without."""
    async for frame in events:
        if not frame.type.endswith(".delta"):
            yield frame
            continue
        event = DELTA.decode(frame.data)
        event.pop("obfuscation", None)
        if should_pad:
            event["obfuscation"] = make_padding(event["delta"])
        yield EncodedEvent(frame.type, ENCODE(event))
