"""Stored conversations as lines of JSON, to be taken from one store to another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import response_schema
from .conversation_backend import Conversation, ConversationItem
from .response_archive import parse_line, remove_line_breaks, validate_owner

FORMAT = 1


class ConversationHeader(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    owner: str
    created_at: response_schema.Moment
    metadata: dict[str, str] = {}


class ArchivedItem(msgspec.Struct, kw_only=True):
    """An item, as it was added; `answer` says whether the model made it."""

    id: str
    answer: bool = False
    item: msgspec.Raw


class ConversationLine(msgspec.Struct, kw_only=True):
    """What a line says.

    Args:
        vllmops: the version of this format.
        conversation: without its items.
        items: in their order.
    """

    vllmops: int = FORMAT
    conversation: ConversationHeader
    items: list[ArchivedItem]


LINE = msgspec.json.Decoder(ConversationLine)
METADATA = msgspec.json.Decoder(dict[str, str])


def encode_line(conversation: Conversation, entries: Sequence[ConversationItem]) -> bytes:
    """A conversation as one line, without its end.

    Raises:
        ValueError: its metadata are damaged.
    """
    return msgspec.json.encode(
        ConversationLine(
            conversation=ConversationHeader(
                id=conversation.id,
                owner=conversation.owner,
                created_at=conversation.created_at,
                metadata=METADATA.decode(conversation.metadata),
            ),
            items=[
                ArchivedItem(id=one.id, answer=one.answer, item=remove_line_breaks(one.body))
                for one in entries
            ],
        )
    )


def decode_line(line: bytes) -> tuple[Conversation, list[ConversationItem]]:
    """A conversation and its items from a line.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    found = parse_line(LINE, line, FORMAT)
    head = found.conversation
    ids = [head.id, *(one.id for one in found.items)]
    for name in ids:
        if not response_schema.is_safe_id(name):
            raise ValueError(f"{name[:300]!r} is not an id")
    if len(set(ids)) < len(ids):
        raise ValueError(f"two items of {head.id} have the same id")
    validate_owner(head.owner)
    for one in found.items:
        response_schema.decode_json(bytes(one.item), response_schema.ResponseItem)
    conversation = Conversation(
        id=head.id,
        owner=head.owner,
        created_at=head.created_at,
        metadata=msgspec.json.encode(head.metadata),
        size=len(found.items),
    )
    return conversation, [
        ConversationItem(one.id, bytes(one.item), one.answer) for one in found.items
    ]
