"""Conversations in Redis: each operation is one of the script's."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .backend import FINISHED, Backend, CursorUnknown, Limits, Response, Uses, words
from .conversations import Addition, Conversation, Entries, Entry, Outcome

# Conversations that one call drops: each may have many items.
BATCH = 100


class RedisConversations(Backend):
    """The part of `redis.Redis` that keeps conversations."""

    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits)
        self.conversation_uses = Uses(self.conversations_used)

    @abstractmethod
    async def call(self, operation: str, *values: Any) -> Any:
        """Run an operation of the script."""

    @abstractmethod
    async def apart(self, operation: str, *values: Any) -> Any:
        """As `call`, for what may take long."""

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[Entry]
    ) -> Outcome:
        given = conversation.id, conversation.owner, repr(conversation.created_at)
        await self.conversation_uses.flush()
        bounds = self.limits.max_size, self.limits.share
        found = await self.call(
            "create_conversation", *given, conversation.metadata, *bounds, *flat(entries)
        )
        return Outcome(found.decode())

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        found = await self.call("get_conversation", conversation_id, owner)
        if found:
            await self.conversation_uses.note([conversation_id])
        return shown(found) if found else None

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        found = await self.call("set_metadata", conversation_id, owner, metadata)
        return shown(found) if found else None

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        return bool(await self.call("delete_conversation", conversation_id, owner))

    async def list_conversations(
        self, owner: str, after: str | None, limit: int
    ) -> list[Conversation]:
        found = await self.call("list_conversations", owner, after or "", limit)
        if found is None:
            raise CursorUnknown(after or "", "conversation")
        return list(map(shown, found))

    async def hold(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[Outcome, list[Entry]]:
        given = conversation_id, owner, holder, self.limits.lease_s
        outcome, *fields = await self.call("hold", *given)
        return Outcome(outcome.decode()), entries_of(fields)

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        pairs = [word for held in holders.items() for word in held]
        await self.call("renew_holds", self.limits.lease_s, *pairs)

    async def release(self, conversation_id: str, holder: str) -> None:
        await self.call("release", conversation_id, holder)

    async def page_entries(
        self, owner: str, conversation_id: str, *, after: str | None, limit: int, descending: bool
    ) -> Entries | None:
        given = conversation_id, owner, after or "", limit + 1, int(descending)
        outcome, *fields = await self.call("page_entries", *given)
        if outcome == b"gone":
            return None
        if outcome == b"unknown":
            raise CursorUnknown(after or "", "item")
        await self.conversation_uses.note([conversation_id])
        found = entries_of(fields)
        return Entries(found[:limit], len(found) > limit)

    async def get_entry(self, owner: str, conversation_id: str, entry_id: str) -> Entry | None:
        found = await self.call("get_entry", conversation_id, owner, entry_id)
        return entries_of(found)[0] if found else None

    async def delete_entry(self, owner: str, conversation_id: str, entry_id: str) -> Outcome:
        found = await self.call("delete_entry", conversation_id, owner, entry_id)
        return Outcome(found.decode())

    async def add_entries(
        self, addition: Addition, response: Response | None = None, *, new: bool = False
    ) -> Outcome:
        storing: tuple[Any, ...] = ()
        if response is not None:
            storing = self.creating(response) if new else self.putting(response, words(FINISHED))
        found = await self.call(
            "add_entries",
            addition.conversation_id,
            addition.owner,
            addition.holder,
            self.limits.max_items,
            "" if response is None else "create" if new else "put",
            len(storing),
            *storing,
            *flat(addition.entries),
        )
        return Outcome(found.decode())

    @abstractmethod
    def creating(self, response: Response) -> tuple[Any, ...]:
        """What the script's ``create`` takes for a response."""

    @abstractmethod
    def putting(self, response: Response, unless_status: str) -> tuple[Any, ...]:
        """What the script's ``put`` takes for a response."""

    async def sweep_conversations(self) -> None:
        """Expire, and evict; called now and then."""
        await self.conversation_uses.flush()
        oldest, done = repr(time.time() - self.limits.ttl_s), BATCH
        while done == BATCH:
            done = await self.apart("expire_conversations", oldest, BATCH)
        await self.apart("evict_conversations", self.limits.max_size, self.limits.share)

    async def conversations_used(self, uses: list[tuple[str, float]]) -> None:
        """Write down when conversations were used."""
        for start in range(0, len(uses), BATCH):
            given = [word for name, at in uses[start : start + BATCH] for word in (name, repr(at))]
            await self.apart("use_conversations", *given)


def flat(entries: Sequence[Entry]) -> list[Any]:
    """Items as the script takes them: id, 1 for an answer, and body, of each."""
    return [word for one in entries for word in (one.id, int(one.answer), one.body)]


def entries_of(fields: Sequence[bytes]) -> list[Entry]:
    """Items from ids and values, whose first byte tells who made them."""
    return [
        Entry(name.decode(), value[1:], value[:1] == b"1")
        for name, value in zip(fields[::2], fields[1::2], strict=True)
    ]


def shown(fields: Sequence[bytes]) -> Conversation:
    """A conversation from its fields."""
    return Conversation(
        id=fields[0].decode(),
        owner=fields[1].decode(),
        created_at=float(fields[2]),
        metadata=fields[3],
        size=int(fields[4]),
    )
