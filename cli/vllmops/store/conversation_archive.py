"""Stored conversations as lines of JSON, to be taken from one store to another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from . import shape
from .archive import check_owner, one_line, read
from .conversations import Conversation, Entry

FORMAT = 1


class Heading(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    owner: str
    created_at: shape.Moment
    metadata: dict[str, str] = {}


class Item(msgspec.Struct, kw_only=True):
    """An item, as it was added; `answer` says whether the model made it."""

    id: str
    answer: bool = False
    item: msgspec.Raw


class Line(msgspec.Struct, kw_only=True):
    """What a line says.

    Args:
        vllmops: the version of this format.
        conversation: without its items.
        items: in their order.
    """

    vllmops: int = FORMAT
    conversation: Heading
    items: list[Item]


LINE = msgspec.json.Decoder(Line)
METADATA = msgspec.json.Decoder(dict[str, str])


def encode(conversation: Conversation, entries: Sequence[Entry]) -> bytes:
    """A conversation as one line, without its end.

    Raises:
        ValueError: its metadata are damaged.
    """
    return msgspec.json.encode(
        Line(
            conversation=Heading(
                id=conversation.id,
                owner=conversation.owner,
                created_at=conversation.created_at,
                metadata=METADATA.decode(conversation.metadata),
            ),
            items=[Item(id=one.id, answer=one.answer, item=one_line(one.body)) for one in entries],
        )
    )


def decode(line: bytes) -> tuple[Conversation, list[Entry]]:
    """A conversation and its items from a line.

    Raises:
        ValueError: what is wrong with the line, in words.
    """
    found = read(LINE, line, FORMAT)
    head = found.conversation
    ids = [head.id, *(one.id for one in found.items)]
    for name in ids:
        if not shape.named(name):
            raise ValueError(f"{name[:300]!r} is not an id")
    if len(set(ids)) < len(ids):
        raise ValueError(f"two items of {head.id} have the same id")
    check_owner(head.owner)
    for one in found.items:
        shape.whole(bytes(one.item), shape.Item)
    conversation = Conversation(
        id=head.id,
        owner=head.owner,
        created_at=head.created_at,
        metadata=msgspec.json.encode(head.metadata),
        size=len(found.items),
    )
    return conversation, [Entry(one.id, bytes(one.item), one.answer) for one in found.items]
