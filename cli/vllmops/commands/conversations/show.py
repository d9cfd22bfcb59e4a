"""``vllmops conversations show``: one conversation with its items."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ... import output
from ...keys.ring import when
from ...output import Folded, Json, Result, Verbatim, command
from ...store import shape
from ...store.backend import EVERYBODY
from ..options import Target
from ..responses.entries import age
from ..responses.show import item_lines, json_of
from .list_ import listed_form
from .place import Store, every_id, items, opened, unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from ...store.conversations import Conversation, Entry


@command
def show(
    conversation_id: Annotated[
        str, typer.Argument(metavar="ID", help="The conversation.", autocompletion=every_id)
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Show a conversation: its metadata and all its items, in order."""
    found, entries = asyncio.run(fetch(target, store, conversation_id))
    data = {
        **listed_form(found),
        "items": [
            {"id": one.id, "answer": one.answer, "item": msgspec.Raw(json_of(one.body))}
            for one in entries
        ],
    }
    return Result(data, lambda: list(render(found, entries)))


async def fetch(
    target: str | None, store: str | None, conversation_id: str
) -> tuple[Conversation, list[Entry]]:
    """A conversation and its items.

    Raises:
        VllmopsError: ``conversations.unknown``, or as `opened`.
    """
    async with opened(target, store) as (name, kept):
        found = await kept.get(EVERYBODY, conversation_id)
        entries = await items(kept, conversation_id) if found else None
        if found is None or entries is None:
            raise unknown(name, conversation_id)
        return found, entries


def render(found: Conversation, entries: Sequence[Entry]) -> Iterator[RenderableType]:
    """Human-readable output."""
    yield output.styled(found.id, "bold")
    rows = [
        ("created", f"{when(found.created_at)}, {age(found.created_at)} ago"),
        ("API key", found.owner and f"{found.owner} (SHA-256)"),
        ("metadata", found.metadata.decode(errors="replace") if found.metadata != b"{}" else ""),
        ("items", f"{len(entries):,}"),
    ]
    yield output.facts((name, value) for name, value in rows if value)
    for one in entries:
        yield Verbatim(f"\n{one.id}")
        yield Folded(tuple(item_lines(partial(decoded, one))))


def decoded(entry: Entry) -> list[shape.Item]:
    """As much of an item as is shown."""
    return [msgspec.json.decode(entry.body, type=shape.Item)]
