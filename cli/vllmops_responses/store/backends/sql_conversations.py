"""Conversations in SQL: a change is a few statements in one transaction."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from ..backend import Backend, CursorUnknown, LastUseBuffer, Limits, Response, plan_evictions
from ..conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
    ItemAddition,
    ItemPage,
)

# Conversations that one statement deletes: each may have many items.
BATCH = 100
Rows = Sequence[Sequence[Any]]


class TransactionStep(NamedTuple):
    """One statement of a transaction.

    Args:
        name: the statement's.
        values: what it takes; or rows of that, where there are `execute_batch`.
        is_batch: whether it is run for each row.
    """

    name: str
    values: Sequence[Any]
    is_batch: bool = False


# Yields each step, gets its rows, and returns what came of all.
Steps = Generator[TransactionStep, Rows, ConversationResult]


class Rollback(Exception):  # noqa: N818 - an outcome
    """Ends a transaction, and nothing of it is done.

    Args:
        outcome: what came of it.
    """

    def __init__(self, outcome: ConversationResult) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class SqlConversations(Backend):
    """The part of `sql.SqlBackend` that keeps conversations."""

    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits)
        self.conversation_uses = LastUseBuffer(self.write_conversation_uses)
        self.conversations_created = 0

    @abstractmethod
    async def execute_named(self, name: str, *values: Any) -> Rows:
        """Run the statement of that name, and have what it gives."""

    @abstractmethod
    async def execute_batch(self, name: str, values: list[tuple[Any, ...]]) -> None:
        """Run a statement of that name for each set of values."""

    @abstractmethod
    async def run_transaction(self, steps: Callable[[], Steps]) -> ConversationResult:
        """Run steps as one transaction.

        Args:
            steps: begins them; called again where a busy database makes it begin anew.
        """

    @abstractmethod
    async def take_hold(self, *given: Any) -> Rows | None:
        """The items of a conversation that is held now; None where it can't be.

        Args:
            given: what ``hold`` takes.
        """

    @abstractmethod
    def make_store_step(self, response: Response, *, is_new: bool) -> TransactionStep:
        """The step that stores a response, and gives a row if it does."""

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        def create_steps() -> Steps:
            values = (
                conversation.id,
                conversation.owner,
                conversation.created_at,
                time.time(),
                conversation.metadata,
                len(entries),
            )
            if not (yield TransactionStep("create conversation", values)):
                raise Rollback(ConversationResult.TAKEN)
            yield from append_item_steps(conversation.id, 0, entries)
            return ConversationResult.DONE

        outcome = await self.run_transaction(create_steps)
        if outcome is ConversationResult.DONE:
            self.conversations_created += 1
            fewest = min(self.limits.max_size, self.limits.owner_limit)
            if self.conversations_created >= max(1, fewest // 100):
                self.conversations_created = 0
                await self.evict_conversations(conversation.id)
        return outcome

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        rows = await self.execute_named("get conversation", conversation_id, owner)
        if rows:
            await self.conversation_uses.mark_used([conversation_id])
        return conversation_from_row(rows[0]) if rows else None

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        given = conversation_id, owner, metadata, time.time()
        rows = await self.execute_named("set metadata", *given)
        return conversation_from_row(rows[0]) if rows else None

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        return bool(await self.execute_named("delete conversation", conversation_id, owner))

    async def list_conversations(
        self, owner: str, after_id: str | None, limit: int
    ) -> list[Conversation]:
        newest: tuple[float | None, str] = (None, "")
        if after_id is not None:
            rows = await self.execute_named("get conversation", after_id, owner)
            if not rows:
                raise CursorUnknown(after_id, "conversation")
            newest = conversation_from_row(rows[0]).created_at, after_id
        rows = await self.execute_named("list conversations", owner, *newest, limit)
        return list(map(conversation_from_row, rows))

    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        rows = await self.take_hold(conversation_id, owner, holder, self.limits.lease_s)
        if rows is None:
            there = await self.execute_named("get conversation", conversation_id, owner)
            return (ConversationResult.LOCKED if there else ConversationResult.GONE), []
        await self.conversation_uses.mark_used([conversation_id])
        return ConversationResult.DONE, list(map(item_from_row, rows))

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        lease_s = self.limits.lease_s
        await self.execute_batch(
            "renew hold", [(*held, lease_s) for held in sorted(holders.items())]
        )

    async def release_conversation(self, conversation_id: str, holder: str) -> None:
        await self.execute_named("release", conversation_id, holder)

    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after_id: str | None,
        limit: int,
        descending: bool,
    ) -> ItemPage | None:
        if await self.get_conversation(owner, conversation_id) is None:
            return None
        at = None
        if after_id is not None:
            rows = await self.execute_named("entry", conversation_id, owner, after_id)
            if not rows:
                raise CursorUnknown(after_id, "item")
            at = rows[0][3]
        name = "entries downwards" if descending else "entries upwards"
        rows = await self.execute_named(name, conversation_id, at, limit + 1)
        if not rows and await self.get_conversation(owner, conversation_id) is None:
            return None  # it was deleted meanwhile
        return ItemPage(list(map(item_from_row, rows[:limit])), len(rows) > limit)

    async def get_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationItem | None:
        rows = await self.execute_named("entry", conversation_id, owner, entry_id)
        return item_from_row(rows[0]) if rows else None

    async def remove_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationResult:
        def remove_steps() -> Steps:
            yield from self.begin_item_change(conversation_id, owner, "", -1)
            if not (yield TransactionStep("delete entry", (conversation_id, entry_id))):
                raise Rollback(ConversationResult.GONE)
            return ConversationResult.DONE

        return await self.run_transaction(remove_steps)

    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        outcome = await self.insert_items(addition, response, is_new=is_new)
        if not addition.holder:  # who holds it has used it
            await self.conversation_uses.mark_used([addition.conversation_id])
        return outcome

    async def insert_items(
        self, addition: ItemAddition, response: Response | None, *, is_new: bool
    ) -> ConversationResult:
        """As `add_items`, and no use of the conversation."""

        def insert_steps() -> Steps:
            count = len(addition.entries)
            place, size = yield from self.begin_item_change(
                addition.conversation_id, addition.owner, addition.holder, count
            )
            if not addition.holder and size > self.limits.max_items:
                raise Rollback(ConversationResult.FULL)
            yield from append_item_steps(addition.conversation_id, place - count, addition.entries)
            if response and not (yield self.make_store_step(response, is_new=is_new)):
                raise Rollback(ConversationResult.REFUSED)
            return ConversationResult.DONE

        return await self.run_transaction(insert_steps)

    def begin_item_change(
        self, conversation_id: str, owner: str, holder: str, count: int
    ) -> Generator[TransactionStep, Rows, tuple[int, int]]:
        """Let go of a conversation for a change of its items.

        Args:
            conversation_id: of the conversation.
            owner: whose it is.
            holder: who holds it; empty for one that nobody may hold.
            count: items that are added; negative for those that are taken out.

        Returns:
            The position behind its last item, and how many it has.
        """
        given = conversation_id, owner, holder, count
        if rows := (yield TransactionStep("change entries", given)):
            return rows[0][0], rows[0][1]
        there = yield TransactionStep("get conversation", (conversation_id, owner))
        raise Rollback(ConversationResult.LOCKED if there else ConversationResult.GONE)

    async def sweep_conversations(self) -> None:
        """Expire, and evict; called now and then."""
        await self.conversation_uses.flush()
        oldest = time.time() - self.limits.ttl_s
        while len(await self.execute_named("expire conversations", oldest, BATCH)) == BATCH:
            pass
        await self.evict_conversations("")

    async def evict_conversations(self, spared_id: str) -> None:
        """Drop what was used longest ago until nobody, and all together, have more than may be."""
        await self.conversation_uses.flush()
        counts = Counter(
            {row[0]: row[1] for row in await self.execute_named("conversation shares")}
        )
        for owner, target in plan_evictions(counts, self.limits).items():
            await self.execute_named("evict conversations", owner, target, spared_id)

    async def write_conversation_uses(self, uses: list[tuple[str, float]]) -> None:
        """Write down when conversations were used."""
        await self.execute_batch("touch conversation", list(uses))


def append_item_steps(
    conversation_id: str, first_position: int, entries: Sequence[ConversationItem]
) -> Steps:
    """Put items at the end of a conversation, from a position on."""
    rows = [
        (conversation_id, at, one.id, one.answer, one.body)
        for at, one in enumerate(entries, first_position)
    ]
    if rows and len((yield TransactionStep("add entries", rows, is_batch=True))) < len(rows):
        raise Rollback(ConversationResult.TAKEN)
    return ConversationResult.DONE


def item_from_row(row: Sequence[Any]) -> ConversationItem:
    """An item from its columns."""
    return ConversationItem(row[0], row[1], bool(row[2]))


def conversation_from_row(row: Sequence[Any]) -> Conversation:
    """A conversation from its columns."""
    return Conversation(
        id=row[0], owner=row[1], created_at=row[2], metadata=row[3], size=max(row[4], 0)
    )
