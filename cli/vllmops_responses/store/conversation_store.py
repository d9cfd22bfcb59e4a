"""Stored conversations, for whoever serves them: a backend with all that it needs around it.

A response that is made with a conversation holds it from its start: `hold` reads the items, and
until `finish_turn` or `release_hold` anybody else who wants to change it gets `LOCKED`. A hold is
renewed as long as its `ConversationHold` is referred to, so one that is forgotten lapses as that of
a dead server does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from weakref import WeakSet

from msgspec.structs import replace

from vllmops.support.background import start_task

from . import credential_redaction
from .backend import SILENT_S, Backend, CursorUnknown, Response, StoreUnavailable
from .compression import deflate, deflate_async, inflate, inflate_async
from .conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
    ItemAddition,
    ItemPage,
    require_conversations,
)
from .ids import is_storable, is_valid_id

ALL = 1 << 30  # items: more than a conversation has


class ResponseStoreLike(Protocol):
    """What is needed of a `response_store.ResponseStore`."""

    backend: Backend

    def backend_call(self, *, reads: bool = False) -> AbstractAsyncContextManager[Backend]: ...
    async def pack_response(self, response: Response) -> Response: ...
    def wake_followers(self, response_id: str) -> None: ...


class ConversationHold:
    """A hold of a conversation.

    Args:
        conversation_id: of the conversation.
        owner: whose it is.
        holder: who holds it; unique to one run of one response. Empty where nobody does.
        entries: its items then, as the store keeps them.
    """

    def __init__(
        self, conversation_id: str, owner: str, holder: str, entries: Sequence[ConversationItem]
    ) -> None:
        self.conversation_id = conversation_id
        self.owner = owner
        self.holder = holder
        self.entries = entries


class ConversationStore:
    """The conversations of a store.

    Args:
        store: whose backend keeps them.
    """

    def __init__(self, store: ResponseStoreLike) -> None:
        self.store = store
        self.holds: WeakSet[ConversationHold] = WeakSet()
        self.releases: set[asyncio.Task[None]] = set()
        # Those that the store's end ends.
        self.retries: set[asyncio.Task[None]] = set()

    def backend_call(self, *, reads: bool = False) -> AbstractAsyncContextManager[Backend]:
        """What a call to the backend stands in.

        Raises:
            VllmopsError: ``store.no-conversations``.
        """
        require_conversations(self.store.backend)
        return self.store.backend_call(reads=reads)

    async def create(
        self, conversation: Conversation, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        """Store a conversation that was not there; `TAKEN` where an id is."""
        packed = replace(conversation, metadata=deflate(conversation.metadata))
        added = await pack_items(entries)
        async with self.backend_call() as backend:
            return await backend.create_conversation(packed, added)

    async def get(self, owner: str, conversation_id: str) -> Conversation | None:
        """A conversation, or None; counts as use."""
        if not is_valid_id(conversation_id):
            return None
        async with self.backend_call(reads=True) as backend:
            found = await backend.get_conversation(owner, conversation_id)
        return found and try_unpack_conversation(found)

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        """Replace the metadata of a conversation; None where there is none."""
        if not is_valid_id(conversation_id):
            return None
        async with self.backend_call() as backend:
            found = await backend.set_metadata(owner, conversation_id, deflate(metadata))
        return found and try_unpack_conversation(found)

    async def delete(self, owner: str, conversation_id: str) -> bool:
        """Delete a conversation with its items; False where there is none."""
        if not is_valid_id(conversation_id):
            return False
        async with self.backend_call() as backend:
            return await backend.delete_conversation(owner, conversation_id)

    async def list_conversations(
        self, owner: str, after_id: str | None, limit: int
    ) -> list[Conversation]:
        """The owner's conversations, the newest first.

        Raises:
            CursorUnknown: ``after_id`` is no conversation of this owner's.
        """
        if after_id is not None and not is_valid_id(after_id):
            raise CursorUnknown(after_id, "conversation")
        async with self.backend_call(reads=True) as backend:
            found = await backend.list_conversations(owner, after_id, limit)
        return [try_unpack_conversation(one) for one in found]

    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after_id: str | None,
        limit: int,
        descending: bool,
    ) -> ItemPage | None:
        """Part of a conversation's items; None where there is no such conversation.

        Raises:
            CursorUnknown: ``after_id`` is no item of it.
        """
        if not is_valid_id(conversation_id):
            return None
        if not is_storable(after_id or ""):
            raise CursorUnknown(after_id or "", "item")
        async with self.backend_call(reads=True) as backend:
            page = await backend.list_items(
                owner, conversation_id, after_id=after_id, limit=limit, descending=descending
            )
        return page and ItemPage(
            [await try_unpack_item(one) for one in page.entries], page.has_more
        )

    async def get_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationItem | None:
        """An item of a conversation, or None."""
        if not (is_valid_id(conversation_id) and is_valid_id(entry_id)):
            return None
        async with self.backend_call(reads=True) as backend:
            found = await backend.get_item(owner, conversation_id, entry_id)
        return found and await try_unpack_item(found)

    async def remove_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationResult:
        """Take an item out of a conversation."""
        if not (is_valid_id(conversation_id) and is_valid_id(entry_id)):
            return ConversationResult.GONE
        async with self.backend_call() as backend:
            return await backend.remove_item(owner, conversation_id, entry_id)

    async def add_items(
        self, owner: str, conversation_id: str, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        """Add items to a conversation that nobody holds."""
        if not is_valid_id(conversation_id):
            return ConversationResult.GONE
        added = await pack_items(entries)
        addition = ItemAddition(conversation_id=conversation_id, owner=owner, entries=added)
        async with self.backend_call() as backend:
            return await backend.add_items(addition)

    async def hold(
        self, owner: str, conversation_id: str, holder: str
    ) -> ConversationHold | ConversationResult:
        """Hold a conversation, and read its items; or why that can't be.

        Args:
            owner: who asks.
            conversation_id: of the conversation.
            holder: unique to one run of one response, which may hold it already.
        """
        if not is_valid_id(conversation_id):
            return ConversationResult.GONE
        async with self.backend_call() as backend:
            # In a task, which goes on where the caller leaves: a database would still run the
            # statement, and might do so after the one that lets go.
            holding = asyncio.ensure_future(
                backend.hold_conversation(owner, conversation_id, holder)
            )
            try:
                outcome, entries = await asyncio.shield(holding)
            except BaseException:  # it may be held nevertheless
                start_task(self.release_after_hold(holding, conversation_id, holder), self.releases)
                raise
        if outcome is not ConversationResult.DONE:
            return outcome
        held = ConversationHold(conversation_id, owner, holder, entries)
        for other in list(self.holds):  # one that has lapsed would be renewed instead
            if other.conversation_id == conversation_id and other.holder != holder:
                self.holds.discard(other)
        self.holds.add(held)
        return held

    async def read_without_hold(
        self, owner: str, conversation_id: str
    ) -> ConversationHold | ConversationResult:
        """As `hold`, of a conversation that anybody may hold: nobody does by this.

        Args:
            owner: who asks.
            conversation_id: of the conversation.
        """
        if not is_valid_id(conversation_id):
            return ConversationResult.GONE
        async with self.backend_call(reads=True) as backend:
            page = await backend.list_items(
                owner, conversation_id, after_id=None, limit=ALL, descending=False
            )
        return (
            ConversationHold(conversation_id, owner, "", page.entries)
            if page
            else ConversationResult.GONE
        )

    async def finish_turn(
        self,
        hold: ConversationHold,
        entries: Sequence[ConversationItem],
        response: Response | None,
        *,
        is_new: bool,
    ) -> ConversationResult:
        """Add the items of a turn to its conversation, store its response, and let go of it.

        Args:
            hold: the hold.
            entries: what the turn added.
            response: how it ended; None where it is not stored.
            is_new: whether it is stored first; else it runs.
        """
        packed = response and await self.store.pack_response(response)
        addition = ItemAddition(
            conversation_id=hold.conversation_id,
            owner=hold.owner,
            entries=await pack_items(entries),
            holder=hold.holder,
        )
        async with self.backend_call() as backend:
            outcome = await backend.add_items(addition, packed, is_new=is_new)
        if outcome is ConversationResult.DONE:
            self.holds.discard(hold)
            if response is not None:
                self.store.wake_followers(response.id)
        return outcome

    async def release_after_hold(
        self, holding: asyncio.Future[Any], conversation_id: str, holder: str
    ) -> None:
        """Let go of a conversation once the call to hold it is over."""
        await asyncio.wait({holding}, timeout=SILENT_S)
        holding.cancel()
        await self.release_conversation(conversation_id, holder)

    async def release_hold(self, hold: ConversationHold) -> None:
        """Let go of a conversation, unless that was done; a store that is down is no error.

        Also for a caller that is cancelled: each of its awaits may be, as one of anyio's is.
        """
        if hold not in self.holds:
            return
        self.holds.discard(hold)
        await asyncio.shield(self.release_in_background(hold.conversation_id, hold.holder))

    def release_in_background(self, conversation_id: str, holder: str) -> asyncio.Task[None]:
        """Let go of a conversation in a task, which outlives a caller that is cancelled."""
        return start_task(self.release_conversation(conversation_id, holder), self.releases)

    async def release_conversation(self, conversation_id: str, holder: str) -> None:
        """Let go of a conversation that may be held in another process.

        Where the store is down, that is done once it is back, and nobody waits for it.
        """
        try:
            async with self.backend_call() as backend:
                await backend.release_conversation(conversation_id, holder)
        except StoreUnavailable as error:
            start_task(
                self.retry_release(conversation_id, holder, error.retry_after_s), self.retries
            )

    async def retry_release(self, conversation_id: str, holder: str, pause_s: float) -> None:
        """Let go of a conversation once the store is back, or its hold has lapsed."""
        lapses = time.monotonic() + self.store.backend.limits.lease_s
        while time.monotonic() + pause_s < lapses:
            await asyncio.sleep(pause_s)
            try:
                async with self.backend_call() as backend:
                    await backend.release_conversation(conversation_id, holder)
                    return
            except StoreUnavailable as error:
                pause_s = error.retry_after_s

    async def renew_holds(self) -> None:
        """Renew what is held."""
        if holders := {held.conversation_id: held.holder for held in self.holds}:
            async with self.backend_call() as backend:
                await backend.renew_holds(holders)


async def pack_items(entries: Sequence[ConversationItem]) -> list[ConversationItem]:
    """Items as a backend keeps them: packed, and without credentials."""
    return [
        replace(one, body=await deflate_async(credential_redaction.redact_body(one.body)))
        for one in entries
    ]


async def try_unpack_item(entry: ConversationItem) -> ConversationItem:
    """An item as JSON; the body of one that is damaged is empty, so that it hides no other."""
    try:
        return replace(entry, body=await inflate_async(entry.body))
    except ValueError:
        return replace(entry, body=b"")


def try_unpack_conversation(conversation: Conversation) -> Conversation:
    """A conversation with its metadata as JSON; empty where that is damaged."""
    try:
        return replace(conversation, metadata=inflate(conversation.metadata))
    except ValueError:
        return replace(conversation, metadata=b"{}")
