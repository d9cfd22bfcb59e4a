"""Conversations in SQL: a change is a few statements in one transaction."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from .backend import Backend, CursorUnknown, Limits, Response, Uses, targets
from .conversations import Addition, Conversation, Entries, Entry, Outcome

# Conversations that one statement deletes: each may have many items.
BATCH = 100
Rows = Sequence[Sequence[Any]]


class Step(NamedTuple):
    """One statement of a transaction.

    Args:
        name: the statement's.
        values: what it takes; or rows of that, where there are `many`.
        many: whether it is run for each row.
    """

    name: str
    values: Sequence[Any]
    many: bool = False


# Yields each step, gets its rows, and returns what came of all.
Steps = Generator[Step, Rows, Outcome]


class Undo(Exception):  # noqa: N818 - an outcome
    """Ends a transaction, and nothing of it is done.

    Args:
        outcome: what came of it.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class SqlConversations(Backend):
    """The part of `sql.Sql` that keeps conversations."""

    def __init__(self, url: str, limits: Limits) -> None:
        super().__init__(url, limits)
        self.conversation_uses = Uses(self.conversations_used)
        self.conversations_created = 0

    @abstractmethod
    async def fetch(self, name: str, *values: Any) -> Rows:
        """Run the statement of that name, and have what it gives."""

    @abstractmethod
    async def many(self, name: str, values: list[tuple[Any, ...]]) -> None:
        """Run a statement of that name for each set of values."""

    @abstractmethod
    async def transact(self, steps: Callable[[], Steps]) -> Outcome:
        """Run steps as one transaction.

        Args:
            steps: begins them; called again where a busy database makes it begin anew.
        """

    @abstractmethod
    async def held(self, *given: Any) -> Rows | None:
        """The items of a conversation that is held now; None where it can't be.

        Args:
            given: what ``hold`` takes.
        """

    @abstractmethod
    def storing(self, response: Response, *, new: bool) -> Step:
        """The step that stores a response, and gives a row if it does."""

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[Entry]
    ) -> Outcome:
        def steps() -> Steps:
            values = (
                conversation.id,
                conversation.owner,
                conversation.created_at,
                time.time(),
                conversation.metadata,
                len(entries),
            )
            if not (yield Step("create conversation", values)):
                raise Undo(Outcome.TAKEN)
            yield from adding(conversation.id, 0, entries)
            return Outcome.DONE

        outcome = await self.transact(steps)
        if outcome is Outcome.DONE:
            self.conversations_created += 1
            fewest = min(self.limits.max_size, self.limits.share)
            if self.conversations_created >= max(1, fewest // 100):
                self.conversations_created = 0
                await self.evict_conversations(conversation.id)
        return outcome

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        rows = await self.fetch("get conversation", conversation_id, owner)
        if rows:
            await self.conversation_uses.note([conversation_id])
        return shown(rows[0]) if rows else None

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        given = conversation_id, owner, metadata, time.time()
        rows = await self.fetch("set metadata", *given)
        return shown(rows[0]) if rows else None

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        return bool(await self.fetch("delete conversation", conversation_id, owner))

    async def list_conversations(
        self, owner: str, after: str | None, limit: int
    ) -> list[Conversation]:
        newest: tuple[float | None, str] = (None, "")
        if after is not None:
            rows = await self.fetch("get conversation", after, owner)
            if not rows:
                raise CursorUnknown(after, "conversation")
            newest = shown(rows[0]).created_at, after
        rows = await self.fetch("list conversations", owner, *newest, limit)
        return list(map(shown, rows))

    async def hold(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[Outcome, list[Entry]]:
        rows = await self.held(conversation_id, owner, holder, self.limits.lease_s)
        if rows is None:
            there = await self.fetch("get conversation", conversation_id, owner)
            return (Outcome.LOCKED if there else Outcome.GONE), []
        await self.conversation_uses.note([conversation_id])
        return Outcome.DONE, list(map(entry, rows))

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        lease_s = self.limits.lease_s
        await self.many("renew hold", [(*held, lease_s) for held in sorted(holders.items())])

    async def release(self, conversation_id: str, holder: str) -> None:
        await self.fetch("release", conversation_id, holder)

    async def page_entries(
        self, owner: str, conversation_id: str, *, after: str | None, limit: int, descending: bool
    ) -> Entries | None:
        if await self.get_conversation(owner, conversation_id) is None:
            return None
        at = None
        if after is not None:
            rows = await self.fetch("entry", conversation_id, owner, after)
            if not rows:
                raise CursorUnknown(after, "item")
            at = rows[0][3]
        name = "entries downwards" if descending else "entries upwards"
        rows = await self.fetch(name, conversation_id, at, limit + 1)
        if not rows and await self.get_conversation(owner, conversation_id) is None:
            return None  # it was deleted meanwhile
        return Entries(list(map(entry, rows[:limit])), len(rows) > limit)

    async def get_entry(self, owner: str, conversation_id: str, entry_id: str) -> Entry | None:
        rows = await self.fetch("entry", conversation_id, owner, entry_id)
        return entry(rows[0]) if rows else None

    async def delete_entry(self, owner: str, conversation_id: str, entry_id: str) -> Outcome:
        def steps() -> Steps:
            yield from self.taking(conversation_id, owner, "", -1)
            if not (yield Step("delete entry", (conversation_id, entry_id))):
                raise Undo(Outcome.GONE)
            return Outcome.DONE

        return await self.transact(steps)

    async def add_entries(
        self, addition: Addition, response: Response | None = None, *, new: bool = False
    ) -> Outcome:
        outcome = await self.added(addition, response, new=new)
        if not addition.holder:  # who holds it has used it
            await self.conversation_uses.note([addition.conversation_id])
        return outcome

    async def added(self, addition: Addition, response: Response | None, *, new: bool) -> Outcome:
        """As `add_entries`, and no use of the conversation."""

        def steps() -> Steps:
            count = len(addition.entries)
            place, size = yield from self.taking(
                addition.conversation_id, addition.owner, addition.holder, count
            )
            if not addition.holder and size > self.limits.max_items:
                raise Undo(Outcome.FULL)
            yield from adding(addition.conversation_id, place - count, addition.entries)
            if response and not (yield self.storing(response, new=new)):
                raise Undo(Outcome.REFUSED)
            return Outcome.DONE

        return await self.transact(steps)

    def taking(
        self, conversation_id: str, owner: str, holder: str, count: int
    ) -> Generator[Step, Rows, tuple[int, int]]:
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
        if rows := (yield Step("change entries", given)):
            return rows[0][0], rows[0][1]
        there = yield Step("get conversation", (conversation_id, owner))
        raise Undo(Outcome.LOCKED if there else Outcome.GONE)

    async def sweep_conversations(self) -> None:
        """Expire, and evict; called now and then."""
        await self.conversation_uses.flush()
        oldest = time.time() - self.limits.ttl_s
        while len(await self.fetch("expire conversations", oldest, BATCH)) == BATCH:
            pass
        await self.evict_conversations("")

    async def evict_conversations(self, spared: str) -> None:
        """Drop what was used longest ago until nobody, and all together, have more than may be."""
        await self.conversation_uses.flush()
        counts = Counter({row[0]: row[1] for row in await self.fetch("conversation shares")})
        for owner, target in targets(counts, self.limits).items():
            await self.fetch("evict conversations", owner, target, spared)

    async def conversations_used(self, uses: list[tuple[str, float]]) -> None:
        """Write down when conversations were used."""
        await self.many("touch conversation", list(uses))


def adding(conversation_id: str, place: int, entries: Sequence[Entry]) -> Steps:
    """Put items at the end of a conversation, from a position on."""
    rows = [
        (conversation_id, at, one.id, one.answer, one.body) for at, one in enumerate(entries, place)
    ]
    if rows and len((yield Step("add entries", rows, many=True))) < len(rows):
        raise Undo(Outcome.TAKEN)
    return Outcome.DONE


def entry(row: Sequence[Any]) -> Entry:
    """An item from its columns."""
    return Entry(row[0], row[1], bool(row[2]))


def shown(row: Sequence[Any]) -> Conversation:
    """A conversation from its columns."""
    return Conversation(
        id=row[0], owner=row[1], created_at=row[2], metadata=row[3], size=max(row[4], 0)
    )
