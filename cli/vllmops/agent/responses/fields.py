"""The fields of responses and events that vLLM leaves out, or leaves null.

They are set on vLLM's objects before these become JSON, so that the bytes are made once, and what
is stored, streamed and replayed is the same.
"""

from __future__ import annotations

import time
from typing import Any

from openai.types.responses import ResponseTextConfig
from openai.types.shared import ResponseFormatText

from ...store.fields import DEFAULTS

# Of vLLM's response these say what the request was run with, not what it asked for.
_RUN = frozenset({"completed_at", "error", "incomplete_details", "usage"})


def fill(response: Any, request: Any) -> Any:
    """A response with every field that OpenAI's types require.

    Args:
        response: vLLM's; what is missing or null in it is set to what the request says, or to the
            documented default.
        request: vLLM's ResponsesRequest.
    """
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
    return event
