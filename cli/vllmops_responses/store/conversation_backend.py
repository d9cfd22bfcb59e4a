"""Conversations as a backend keeps them: their types, and the methods that a backend has for them.

A conversation is a list of items that outlives the responses that added to it. While a response is
made with one, that response holds it: nobody else adds to it or takes from it, so no two turns mix.
A hold lapses after ``limits.lease_s``, as the lease of a run does, once its server no longer renews
it. Whoever changes the conversation then ends that hold, and its response can't be added any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

from vllmops.support.errors import VllmopsError

from .stored_response import Response


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as the store keeps it, without its items.

    Args:
        id: as clients know it.
        owner: a hash of the API key that made it, empty where the server has none.
        created_at: seconds since the epoch.
        metadata: a JSON object.
        size: how many items it has.
    """

    id: str
    owner: str
    created_at: float = msgspec.field(default_factory=time.time)
    metadata: bytes = b"{}"
    size: int = 0


class ConversationItem(msgspec.Struct, frozen=True):
    """An item of a conversation.

    Args:
        id: as clients know it; unique in its conversation.
        body: the item as JSON, as a client sent it or the model made it.
        answer: whether the model made it.
    """

    id: str
    body: bytes
    answer: bool = False


class ItemPage(msgspec.Struct, frozen=True):
    """Part of a conversation's items.

    Args:
        entries: in the order that was asked for.
        has_more: whether there are others in that direction.
    """

    entries: list[ConversationItem]
    has_more: bool = msgspec.field(name="more")


class ItemAddition(msgspec.Struct, frozen=True, kw_only=True):
    """Items to add to the end of a conversation.

    Args:
        conversation_id: which one.
        owner: whose it is.
        entries: in order.
        holder: who holds it, and lets go of it thereby; empty for one that nobody may hold.
    """

    conversation_id: str
    owner: str
    entries: Sequence[ConversationItem]
    holder: str = ""


class ConversationResult(Enum):
    """What became of a change of a conversation; nothing was changed unless it is `DONE`."""

    DONE = "done"
    GONE = "gone"  # there is no such conversation, or no such item
    LOCKED = "locked"  # somebody else holds it, or has changed it since it was held
    TAKEN = "taken"  # an item of that id is in it
    FULL = "full"  # it would have more items than `Limits.max_items`
    REFUSED = "refused"  # the response was not stored, for what `create` or `put` say False


class ConversationBackend:
    """What a backend does with conversations; one that does not override these keeps none.

    Each method is atomic. ``owner`` scopes it, as it does responses.
    """

    async def create_conversation(
        self, conversation: Conversation, entries: Sequence[ConversationItem]
    ) -> ConversationResult:
        """Store a conversation that was not there; `TAKEN` where an id is.

        Evicts others where that makes too many, of all or of its owner, as `Limits` has it for
        responses; those that are held go last.
        """
        raise NotImplementedError

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        """A conversation, or None; counts as use."""
        raise NotImplementedError

    async def set_metadata(
        self, owner: str, conversation_id: str, metadata: bytes
    ) -> Conversation | None:
        """Replace the metadata of a conversation; None where there is none."""
        raise NotImplementedError

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        """Delete a conversation with its items, held or not; False where there is none."""
        raise NotImplementedError

    async def list_conversations(
        self, owner: str, after_id: str | None, limit: int
    ) -> list[Conversation]:
        """The owner's conversations, the newest first, behind one of them.

        Raises:
            CursorUnknown: ``after_id`` is no conversation of this owner's.
        """
        raise NotImplementedError

    async def hold_conversation(
        self, owner: str, conversation_id: str, holder: str
    ) -> tuple[ConversationResult, list[ConversationItem]]:
        """Hold a conversation, and read its items in order; counts as use.

        `LOCKED` where another one holds it, and that hold has not lapsed.
        """
        raise NotImplementedError

    async def renew_holds(self, holders: Mapping[str, str]) -> None:
        """Extend holds to ``limits.lease_s`` from now, where they are still those.

        Args:
            holders: by the id of the conversation.
        """
        raise NotImplementedError

    async def release_conversation(self, conversation_id: str, holder: str) -> None:
        """Let go of a conversation, where it is held by that one."""
        raise NotImplementedError

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
        raise NotImplementedError

    async def get_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationItem | None:
        """An item of a conversation, or None."""
        raise NotImplementedError

    async def remove_item(
        self, owner: str, conversation_id: str, entry_id: str
    ) -> ConversationResult:
        """Take an item out of a conversation that nobody holds."""
        raise NotImplementedError

    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        """Add items to a conversation; and store a response, both or neither.

        Args:
            addition: the items.
            response: which is to be stored.
            is_new: store it as ``create`` does; else as ``put`` does.
        """
        raise NotImplementedError


def require_conversations(backend: ConversationBackend) -> None:
    """Check that a backend keeps conversations: a user's own class may not.

    Raises:
        VllmopsError: ``store.no-conversations``.
    """
    if type(backend).hold_conversation is ConversationBackend.hold_conversation:
        raise VllmopsError(
            "store.no-conversations",
            f"the store {type(backend).__name__} keeps no conversations",
            "implement the methods of "
            "vllmops_responses.store.conversation_backend.ConversationBackend in it, "
            "or use another --store",
        )
