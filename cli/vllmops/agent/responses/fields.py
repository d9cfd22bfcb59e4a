"""The fields of responses and events that vLLM leaves out, or leaves null.

They are set on vLLM's objects before these become JSON, so that the bytes are made once, and what
is stored, streamed and replayed is the same.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from openai.types.responses import ResponseTextConfig
from openai.types.shared import ResponseFormatText

from ...store.fields import DEFAULTS
from .parameters import obfuscates
from .wire import ENCODE, Frame

DELTA = msgspec.json.Decoder(dict[str, Any])
# Events are padded to a multiple of it, in bytes.
STEP = 32
# Of vLLM's response these say what the request was run with, not what it asked for.
_RUN = frozenset({"completed_at", "error", "incomplete_details", "usage"})
# What a response says only where its request does.
ECHOED = frozenset({"prompt_cache_retention"})


def fill(response: Any, request: Any) -> Any:
    """A response with every field that OpenAI's types require.

    Args:
        response: vLLM's; what is missing or null in it is set to what the request says, or to the
            documented default.
        request: vLLM's ResponsesRequest.
    """
    for name in ECHOED & request.model_fields_set:
        setattr(response, name, getattr(request, name))
    for name, default in DEFAULTS.items():
        if getattr(response, name, None) is None:
            asked = None if name in _RUN else getattr(request, name, None)
            if asked is not None or default is not None or not hasattr(response, name):
                setattr(response, name, default if asked is None else asked)
    response.store = bool(request.store)
    response.service_tier = "default"  # vLLM has no other
    response.text = formatted(request.text)
    if response.status == "completed":
        response.completed_at = int(time.time())
    if response.usage and not hasattr(response.usage.input_tokens_details, "cache_write_tokens"):
        response.usage.input_tokens_details.cache_write_tokens = 0  # up to 0.31
    return response


def formatted(text: Any) -> Any:
    """The format of the answer's text, as the request says it."""
    if text is None or text.format is None:
        plain = ResponseFormatText(type="text")
        verbosity = None if text is None else text.verbosity
        return ResponseTextConfig(format=plain, verbosity=verbosity)
    if text.format.type == "json_schema" and text.format.strict is None:
        strict = text.format.model_copy(update={"strict": False})
        return text.model_copy(update={"format": strict})
    return text


def fill_event(event: Any, request: Any) -> Any:
    """An event of a stream with every field that OpenAI's types require.

    Args:
        event: vLLM's; it is changed.
        request: vLLM's ResponsesRequest.
    """
    if (response := getattr(event, "response", None)) is not None:
        fill(response, request)
    for logprob in getattr(event, "logprobs", None) or ():
        for token in (logprob, *(logprob.top_logprobs or ())):
            if getattr(token, "bytes", None) is None:
                token.bytes = list((token.token or "").encode())
    if obfuscates(request) and event.type.endswith(".delta"):
        event.obfuscation = padding(event.delta)
    return event


def silence(response: Any) -> None:
    """Make a response one that has no output, because its request only filled the prefix cache."""
    response.output.clear()
    response.status, response.incomplete_details = "completed", None
    usage = response.usage
    if usage:
        usage.total_tokens, usage.output_tokens = usage.input_tokens, 0
        usage.output_tokens_details.reasoning_tokens = 0


def padding(delta: str) -> str:
    """Random characters, so that the size of an event tells little of the text in it."""
    return secrets.token_hex(STEP)[: STEP - len(delta.encode()) % STEP]


async def obfuscated(events: AsyncIterator[Frame], *, wanted: bool) -> AsyncIterator[Frame]:
    """Stored events with padding, or without."""
    async for frame in events:
        if not frame.type.endswith(".delta"):
            yield frame
            continue
        event = DELTA.decode(frame.data)
        event.pop("obfuscation", None)
        if wanted:
            event["obfuscation"] = padding(event["delta"])
        yield Frame(frame.type, ENCODE(event))
