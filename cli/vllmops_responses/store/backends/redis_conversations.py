"""Conversations in Redis: each operation is one of the script's."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ..backend import (
    FINISHED,
    Backend,
    CursorUnknown,
    LastUseBuffer,
    Limits,
    Response,
    join_statuses,
)
from ..conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
    ItemAddition,
    ItemPage,
)

# Conversations that one call drops: each may have many items.
BATCH = 100


class RedisConversations(Backend):
    """The part of `redis.Redis` that keeps conversations."""

    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits)
        self.conversation_uses = LastUseBuffer(self.write_conversation_uses)

    @abstractmethod
    async def run_operation(self, operation: str, *values: Any) -> Any:
        """Run an operation of the script."""

    @abstractmethod
    async def run_slow_operation(self, operation: str, *values: Any) -> Any:
        """As `run_operation`, for what may take long."""

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        given = conversation.id, conversation.owner, repr(conversation.created_at)
        await self.conversation_uses.flush()
        bounds = self.limits.max_size, self.limits.owner_limit
        found = await self.run_operation(
            "create_conversation", *given, conversation.metadata, *bounds, *flatten_items(entries)
        )
        return ConversationResult(found.decode())

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        found = await self.run_operation("get_conversation", conversation_id, owner)
        if found:
            await self.conversation_uses.mark_used([conversation_id])
        return conversation_from_fields(found) if found else None

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        found = await self.run_operation("set_metadata", conversation_id, owner, metadata)
        return conversation_from_fields(found) if found else None

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        return bool(await self.run_operation("delete_conversation", conversation_id, owner))

    async def list_conversations(
        self, owner: str, after_id: str | None, limit: int
    ) -> list[Conversation]:
        found = await self.run_operation("list_conversations", owner, after_id or "", limit)
        if found is None:
            raise CursorUnknown(after_id or "", "conversation")
        return list(map(conversation_from_fields, found))

    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        given = conversation_id, owner, holder, self.limits.lease_s
        outcome, *fields = await self.run_operation("hold", *given)
        return ConversationResult(outcome.decode()), items_from_fields(fields)

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        pairs = [word for held in holders.items() for word in held]
        await self.run_operation("renew_holds", self.limits.lease_s, *pairs)

    async def release_conversation(self, conversation_id: str, holder: str) -> None:
        await self.run_operation("release", conversation_id, holder)

    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after_id: str | None,
        limit: int,
        descending: bool,
    ) -> ItemPage | None:
        given = conversation_id, owner, after_id or "", limit + 1, int(descending)
        outcome, *fields = await self.run_operation("page_entries", *given)
        if outcome == b"gone":
            return None
        if outcome == b"unknown":
            raise CursorUnknown(after_id or "", "item")
        await self.conversation_uses.mark_used([conversation_id])
        found = items_from_fields(fields)
        return ItemPage(found[:limit], len(found) > limit)

    async def get_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationItem | None:
        found = await self.run_operation("get_entry", conversation_id, owner, entry_id)
        return items_from_fields(found)[0] if found else None

    async def remove_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationResult:
        found = await self.run_operation("delete_entry", conversation_id, owner, entry_id)
        return ConversationResult(found.decode())

    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        storing: tuple[Any, ...] = ()
        if response is not None:
            storing = (
                self.build_create_args(response)
                if is_new
                else self.build_put_args(response, join_statuses(FINISHED))
            )
        found = await self.run_operation(
            "add_entries",
            addition.conversation_id,
            addition.owner,
            addition.holder,
            self.limits.max_items,
            "" if response is None else "create" if is_new else "put",
            len(storing),
            *storing,
            *flatten_items(addition.entries),
        )
        return ConversationResult(found.decode())

    @abstractmethod
    def build_create_args(self, response: Response) -> tuple[Any, ...]:
        """What the script's ``create`` takes for a response."""

    @abstractmethod
    def build_put_args(self, response: Response, unless_status: str) -> tuple[Any, ...]:
        """What the script's ``put`` takes for a response."""

    async def sweep_conversations(self) -> None:
        """Expire, and evict; called now and then."""
        await self.conversation_uses.flush()
        oldest, done = repr(time.time() - self.limits.ttl_s), BATCH
        while done == BATCH:
            done = await self.run_slow_operation("expire_conversations", oldest, BATCH)
        await self.run_slow_operation(
            "evict_conversations", self.limits.max_size, self.limits.owner_limit
        )

    async def write_conversation_uses(self, uses: list[tuple[str, float]]) -> None:
        """Write down when conversations were used."""
        for start in range(0, len(uses), BATCH):
            given = [word for name, at in uses[start : start + BATCH] for word in (name, repr(at))]
            await self.run_slow_operation("use_conversations", *given)


def flatten_items(entries: Sequence[ConversationItem]) -> list[Any]:
    """Items as the script takes them: id, 1 for an answer, and body, of each."""
    return [word for one in entries for word in (one.id, int(one.answer), one.body)]


def items_from_fields(fields: Sequence[bytes]) -> list[ConversationItem]:
    """Items from ids and values, whose first byte tells who made them."""
    return [
        ConversationItem(name.decode(), value[1:], value[:1] == b"1")
        for name, value in zip(fields[::2], fields[1::2], strict=True)
    ]


def conversation_from_fields(fields: Sequence[bytes]) -> Conversation:
    """A conversation from its fields."""
    return Conversation(
        id=fields[0].decode(),
        owner=fields[1].decode(),
        created_at=float(fields[2]),
        metadata=fields[3],
        size=int(fields[4]),
    )
