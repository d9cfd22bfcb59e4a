"""The request that came by a WebSocket, and the responses that its connection remembers."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, ClassVar
from weakref import WeakSet

from ...store.backend import Response
from .. import response_fields

# Conversations that a connection remembers without the store, and their bytes.
REMEMBERED = 16
REMEMBERED_BYTES = 16 * 1024 * 1024
# Bytes that all connections of a process remember together.
ALL_REMEMBERED_BYTES = 1024 * 1024 * 1024


class UnstoredResponses:
    """The latest responses of a connection that are not in the store, each with its history."""

    # The memories of all connections of the process, and their bytes together.
    everyone: ClassVar[WeakSet[UnstoredResponses]] = WeakSet()
    bytes_of_all = 0

    def __init__(self) -> None:
        self.histories: dict[str, list[Response]] = {}
        self.bytes = 0
        UnstoredResponses.everyone.add(self)

    def remember_history(self, history: list[Response]) -> None:
        """Remember a response and the turns before it, unless they are too large.

        Where all connections remember too much, the one with most forgets its oldest.

        Args:
            history: oldest first, packed as the store packs them; the last one is the response.
        """
        self.histories[history[-1].id] = history
        while len(self.histories) > REMEMBERED or self.history_bytes > REMEMBERED_BYTES:
            del self.histories[next(iter(self.histories))]
        self.update_byte_count()
        while UnstoredResponses.bytes_of_all > ALL_REMEMBERED_BYTES:
            fullest = max(UnstoredResponses.everyone, key=lambda memory: memory.bytes)
            fullest.forget_response(next(iter(fullest.histories)))

    def forget_response(self, response_id: str | None) -> None:
        """Forget a response, if it is remembered."""
        if self.histories.pop(response_id or "", None):
            self.update_byte_count()

    def clear(self) -> None:
        """Forget all."""
        self.histories.clear()
        self.update_byte_count()

    def update_byte_count(self) -> None:
        """Note how many bytes are remembered now."""
        before, self.bytes = self.bytes, self.history_bytes
        UnstoredResponses.bytes_of_all += self.bytes - before

    @property
    def history_bytes(self) -> int:
        """Bytes; a turn in several histories counts once."""
        # Not by their ids: a client may choose one, and choose it again.
        turns = {id(turn): turn for history in self.histories.values() for turn in history}
        return sum(
            len(turn.id) + len(turn.previous_id or "") + len(turn.body) + len(turn.input)
            for turn in turns.values()
        )


class SocketRequest:
    """A request on a connection.

    Args:
        stream_id: the client's name for the stream of its events; None without one.
        memory: of the connection.
        is_new: whether it makes a response.
        generate: whether the model's output is wanted.
        limit: the tokens of output that it asks for at most; None if it does not say.
        size: bytes of its message while it waits for its turn; 0 from then on.
    """

    def __init__(
        self,
        stream_id: str | None,
        memory: UnstoredResponses,
        *,
        is_new: bool = True,
        generate: bool = True,
        limit: int | None = None,
        size: int = 0,
    ) -> None:
        self.stream_id = stream_id
        self.memory = memory
        self.is_new = is_new
        self.generate = generate
        self.limit = limit
        self.size = size
        self.task: asyncio.Task[None] | None = None
        self.background = False
        self.cancelled = False
        # The remembered response that it continues, and whether its answer is complete.
        self.continues: str | None = None
        self.answered = False
        # The number of the last event, and the response as the first one had it, or as it is named.
        self.number = -1
        self.response: dict[str, Any] | None = None

    @property
    def response_id(self) -> str | None:
        """The response's id; None before it has one."""
        return self.response["id"] if self.response else None


# The run whose request is being answered; None for a request by HTTP.
current: ContextVar[SocketRequest | None] = ContextVar(
    "vllmops_responses.server.conversations.socket_request", default=None
)


def is_websocket_request() -> bool:
    """Whether the current request came by a WebSocket, which remembers its answer."""
    return current.get() is not None


def find_remembered_history(response_id: str) -> list[Response] | None:
    """The history that ends with a response, as the request's connection remembers it."""
    run = current.get()
    if run is None:
        return None
    run.continues = response_id
    return run.memory.histories.get(response_id)


def remember_history(history: list[Response]) -> None:
    """Have the request's connection remember a response that is not stored."""
    if run := current.get():
        run.memory.remember_history(history)


def clear_unwanted_output(response: Any) -> None:
    """Take the output out of a response whose request wants none; vLLM generates one token."""
    run = current.get()
    if run is None or run.generate:
        return
    response_fields.clear_output(response)
    if run.limit is not None:
        response.max_output_tokens = run.limit
