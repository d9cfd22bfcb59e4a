"""Conversations in the memory of this process."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ..backend import EVERYBODY, Backend, CursorUnknown, Response, plan_evictions
from ..conversation_backend import (
    Conversation,
    ConversationItem,
    ConversationResult,
    ItemAddition,
    ItemPage,
)


class StoredConversation:
    """A conversation, its items in order, and who holds it."""

    __slots__ = ("conversation", "entries", "held_until", "holder", "last_used_at")

    def __init__(self, conversation: Conversation, entries: Sequence[ConversationItem]) -> None:
        self.conversation = conversation
        self.entries = {entry.id: entry for entry in entries}
        self.holder = ""
        self.held_until = 0.0
        self.last_used_at = time.time()

    @property
    def is_held(self) -> bool:
        return bool(self.holder) and self.held_until > time.monotonic()

    def can_be_changed_by(self, holder: str) -> bool:
        """Whether a holder, or ``""`` for anybody else, may change the items."""
        return self.holder == holder if holder else not self.is_held

    def to_conversation(self) -> Conversation:
        return replace(self.conversation, size=len(self.entries))


class MemoryConversations(Backend):
    """The part of `memory.Memory` that keeps conversations, the least recently used first."""

    stored_conversations: OrderedDict[str, StoredConversation]

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        made = StoredConversation(conversation, entries)
        if conversation.id in self.stored_conversations or len(made.entries) < len(entries):
            return ConversationResult.TAKEN
        self.stored_conversations[conversation.id] = made
        self.evict_conversations(conversation.id)
        return ConversationResult.DONE

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        found = self.find_conversation(owner, conversation_id)
        return found.to_conversation() if found else None

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        found = self.find_conversation(owner, conversation_id)
        if found is None:
            return None
        found.conversation = replace(found.conversation, metadata=metadata)
        return found.to_conversation()

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        found = self.find_conversation(owner, conversation_id)
        return found is not None and self.stored_conversations.pop(conversation_id) is found

    async def list_conversations(
        self, owner: str, after_id: str | None, limit: int
    ) -> list[Conversation]:
        found = sorted(
            (
                one.to_conversation()
                for one in self.stored_conversations.values()
                if owner in {EVERYBODY, one.conversation.owner}
            ),
            key=lambda one: (one.created_at, one.id),
            reverse=True,
        )
        first = find_page_start(after_id, [one.id for one in found], "conversation")
        return found[first : first + limit]

    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        found = self.find_conversation(owner, conversation_id)
        if found is None:
            return ConversationResult.GONE, []
        if found.is_held and found.holder != holder:
            return ConversationResult.LOCKED, []
        found.holder, found.held_until = holder, time.monotonic() + self.limits.lease_s
        return ConversationResult.DONE, list(found.entries.values())

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        for conversation_id, holder in holders.items():
            if (found := self.stored_conversations.get(conversation_id)) and found.holder == holder:
                found.held_until = time.monotonic() + self.limits.lease_s

    async def release_conversation(self, conversation_id: str, holder: str) -> None:
        if (found := self.stored_conversations.get(conversation_id)) and found.holder == holder:
            found.holder = ""

    async def list_items(
        self,
        owner: str,
        conversation_id: str,
        *,
        after_id: str | None,
        limit: int,
        descending: bool,
    ) -> ItemPage | None:
        found = self.find_conversation(owner, conversation_id)
        if found is None:
            return None
        entries = list(found.entries.values())
        if descending:
            entries.reverse()
        first = find_page_start(after_id, [entry.id for entry in entries], "item")
        return ItemPage(entries[first : first + limit], len(entries) > first + limit)

    async def get_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationItem | None:
        found = self.find_conversation(owner, conversation_id)
        return found.entries.get(entry_id) if found else None

    async def remove_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationResult:
        found = self.find_conversation(owner, conversation_id)
        if found is None or entry_id not in found.entries:
            return ConversationResult.GONE
        if not found.can_be_changed_by(""):
            return ConversationResult.LOCKED
        del found.entries[entry_id]
        found.holder = ""
        return ConversationResult.DONE

    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        found = self.find_conversation(addition.owner, addition.conversation_id)
        if found is None:
            return ConversationResult.GONE
        if not found.can_be_changed_by(addition.holder):
            return ConversationResult.LOCKED
        added = {entry.id: entry for entry in addition.entries}
        if len(added) < len(addition.entries) or added.keys() & found.entries.keys():
            return ConversationResult.TAKEN
        if not addition.holder and len(found.entries) + len(added) > self.limits.max_items:
            return ConversationResult.FULL
        if response and not await (self.create(response) if is_new else self.put(response)):
            return ConversationResult.REFUSED
        found.entries |= added
        found.holder = ""
        return ConversationResult.DONE

    def find_conversation(self, owner: str, conversation_id: str) -> StoredConversation | None:
        """What the owner sees; counts as use."""
        found = self.stored_conversations.get(conversation_id)
        if found is None or owner not in {EVERYBODY, found.conversation.owner}:
            return None
        found.last_used_at = time.time()
        self.stored_conversations.move_to_end(conversation_id)
        return found

    def expire_conversations(self) -> None:
        """Drop what was used too long ago."""
        oldest = time.time() - self.limits.ttl_s
        for conversation_id, one in list(self.stored_conversations.items()):
            if one.last_used_at >= oldest:
                break
            if not one.is_held:
                del self.stored_conversations[conversation_id]

    def evict_conversations(self, spared_id: str) -> None:
        """Drop what was used longest ago until nobody, and all together, have more than may be."""
        if len(self.stored_conversations) <= min(self.limits.max_size, self.limits.owner_limit):
            return
        counts = Counter(one.conversation.owner for one in self.stored_conversations.values())
        for owner, target in plan_evictions(counts, self.limits).items():
            theirs = [
                (one.is_held, at, conversation_id)
                for at, (conversation_id, one) in enumerate(self.stored_conversations.items())
                if one.conversation.owner == owner and conversation_id != spared_id
            ]
            for _, _, conversation_id in sorted(theirs)[: counts[owner] - target]:
                del self.stored_conversations[conversation_id]


def find_page_start(after_id: str | None, ids: list[str], subject: str) -> int:
    """Where a page of a list begins.

    Raises:
        CursorUnknown: ``after_id`` is not in the list.
    """
    if after_id is None:
        return 0
    if after_id not in ids:
        raise CursorUnknown(after_id, subject)
    return ids.index(after_id) + 1
