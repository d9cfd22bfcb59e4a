"""Counts the tokens of a request's input as vLLM counts them for an answer.

vLLM prepares the request as it does for an answer, and stops where the engine would get it. So
tools, images, earlier turns and gpt-oss's format are in the count, to the token.

vLLM notes each image in a cache whose other side is the engine. An image that was only counted must
not be noted: the engine would be told later that it has an image that it never got, and fail. So
these requests use the cache that vLLM has for rendering without an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from ..vllm_interface import ResponsesRequest
from ..wire_format import ENCODE

Render = Callable[..., Awaitable[Any]]
# What `input` may be in a request for an answer.
GIVEN = ResponsesRequest.model_fields["input"].annotation


class CountRequest(ResponsesRequest):  # type: ignore[misc]
    """A request whose input is counted; OpenAI's API does not require one."""

    input: GIVEN | None = None  # type: ignore[valid-type]


class CompactRequest(CountRequest):
    """A request for a compaction."""


class TokenCount(NamedTuple):
    """Takes the place of an answer.

    Args:
        tokens: of the input.
    """

    tokens: int


_counting: ContextVar[bool] = ContextVar(
    "vllmops_responses.server.conversations.token_count", default=False
)


@contextmanager
def count_only() -> Iterator[None]:
    """Requests that begin within this are counted, and get no answer."""
    token = _counting.set(True)
    try:
        yield
    finally:
        _counting.reset(token)


def is_count_only() -> bool:
    """Whether the current request is counted only."""
    return _counting.get()


def skip_cache_while_counting(render: Render) -> Render:
    """The method of vLLM's renderer that leaves the engine's cache alone while it counts."""

    @functools.wraps(render)
    async def render_without_cache(*args: Any, **options: Any) -> Any:
        if is_count_only():
            options["skip_mm_cache"] = True
        return await render(*args, **options)

    return render_without_cache


def reduce_to_input(request: Any) -> None:
    """Change a request to one that stores nothing and has no answer."""
    request.input = [] if request.input is None else request.input
    request.store = request.stream = request.background = False
    request.kv_transfer_params = None


def encode_token_count(token_count: TokenCount) -> bytes:
    """The answer to a client."""
    return ENCODE({"object": "response.input_tokens", "input_tokens": token_count.tokens})
