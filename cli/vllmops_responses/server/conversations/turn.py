"""A request in flight: what is known of it until its answer is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...store.backend import Response
from ...store.conversation_store import ConversationHold
from ..carriers import carrier_merge
from ..carriers.carrier_merge import Item, RequestCarrier


class Turn:
    """A request in flight.

    Args:
        request: vLLM's ResponsesRequest.
        owner: whose it is.
        items: what it adds to the conversation, a JSON array.
        history: the turns before it, as the store keeps them, oldest first; None if the
            request names no previous response. A carrier replaces them.
        has_encrypted_input: whether some of the items have encrypted content.
        request_carrier: the carrier in the request.
        needs_carrier: whether the answer gets a carrier.
        compacts: whether its conversation may be compacted.
    """

    def __init__(
        self,
        request: Any,
        owner: str,
        items: bytes,
        *,
        history: list[Response] | None = None,
        has_encrypted_input: bool = False,
        request_carrier: RequestCarrier | None = None,
        needs_carrier: bool = False,
        compacts: bool = False,
    ) -> None:
        self.request = request
        self.owner = owner
        self.items = items
        self.history = [] if request_carrier and history else history
        self.has_encrypted_input = has_encrypted_input
        self.request_carrier = request_carrier
        self.needs_carrier = needs_carrier
        self.compacts = compacts
        # From how many tokens on the conversation is compacted, None if it never is.
        self.threshold: int | None = None
        # Whether a compaction is all of the answer.
        self.is_compaction = False
        # The item that the answer begins with where it was.
        self.compaction: Any = None
        # All items so far, and their size in bytes, for the answer's carrier and for a compaction.
        self.conversation: list[Item] = []
        self.size = 0
        self.began = time.time()
        # The response that vLLM wrote into its dict last.
        self.latest_response: Any = None
        # The hold of the conversation that it is made with.
        self.hold: ConversationHold | None = None
        # Whether what answers goes on after the request: a stream, or a run in the background.
        self.goes_on = False
        # What the number of a background stream's first event is.
        self.first_event_number = 0
        # Set once a background run is in the store.
        self.accepted_run: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    @property
    def needs_rehydration(self) -> bool:
        """Whether the request's input is more than, or other than, its own items."""
        history = self.history or self.hold
        return bool(
            history
            or self.has_encrypted_input
            or self.request_carrier
            or self.needs_carrier
            or self.compacts
        )

    def make_stored_response(self, response: Any, body: bytes) -> Response:
        """A response as the store keeps it.

        Args:
            response: vLLM's.
            body: the same as JSON.
        """
        return Response(
            id=response.id,
            owner=self.owner,
            model=response.model,
            status=response.status,
            created_at=self.began,
            # The stored items have the carrier's turns: a link would give them to the model twice.
            previous_id=None if self.request_carrier else response.previous_response_id,
            body=body,
            input=self.items,
        )


# The turn that a task of vLLM's works on; tasks that it starts inherit it.
current: ContextVar[Turn | None] = ContextVar(
    "vllmops_responses.server.conversations.turn", default=None
)


@contextmanager
def set_current_turn(turn: Turn | None) -> Iterator[None]:
    """VLLM works on a turn."""
    token = current.set(turn)
    try:
        yield
    finally:
        current.reset(token)


def has_encrypted_items(request: Any) -> bool:
    """Whether an item of a request's input has encrypted content, or should have."""
    return not isinstance(request.input, str) and any(map(has_encrypted_content, request.input))


def has_encrypted_content(item: Any) -> bool:
    """Whether an item, as vLLM reads it, has encrypted content, or should have."""
    if isinstance(item, dict):
        return item.get("type") == carrier_merge.COMPACTION or bool(
            carrier_merge.get_encrypted_content(item)
        )
    return bool(getattr(item, "encrypted_content", None))
