"""``vllmops conversations show``: one conversation with its items."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllmops.commands.options import Target
from vllmops.support import output
from vllmops.support.durations import format_utc_time
from vllmops.support.output import FoldedLines, Json, Result, VerbatimText, print_result

from ...store import response_schema
from ...store.backend import EVERYBODY
from ..responses.response_rows import format_age
from ..responses.show import render_items, sanitize_json
from .list_ import build_conversation_data
from .store_options import (
    Store,
    complete_conversation_id,
    load_items,
    make_unknown_conversation_error,
    open_conversations,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from ...store.conversation_backend import Conversation, ConversationItem


@print_result
def show(
    conversation_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The conversation.", autocompletion=complete_conversation_id
        ),
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Show a conversation: its metadata and all its items, in order."""
    found, entries = asyncio.run(load_conversation(target, store, conversation_id))
    data = {
        **build_conversation_data(found),
        "items": [
            {"id": one.id, "answer": one.answer, "item": msgspec.Raw(sanitize_json(one.body))}
            for one in entries
        ],
    }
    return Result(data, lambda: list(render_conversation(found, entries)))


async def load_conversation(
    target: str | None, store: str | None, conversation_id: str
) -> tuple[Conversation, list[ConversationItem]]:
    """A conversation and its items.

    Raises:
        VllmopsError: ``conversations.unknown``, or as `open_conversations`.
    """
    async with open_conversations(target, store) as (name, kept):
        found = await kept.get(EVERYBODY, conversation_id)
        entries = await load_items(kept, conversation_id) if found else None
        if found is None or entries is None:
            raise make_unknown_conversation_error(name, conversation_id)
        return found, entries


def render_conversation(
    conversation: Conversation, entries: Sequence[ConversationItem]
) -> Iterator[RenderableType]:
    """Human-readable output."""
    yield output.style_text(conversation.id, "bold")
    rows = [
        (
            "created",
            f"{format_utc_time(conversation.created_at)}, {format_age(conversation.created_at)} "
            "ago",
        ),
        ("API key", conversation.owner and f"{conversation.owner} (SHA-256)"),
        (
            "metadata",
            conversation.metadata.decode(errors="replace")
            if conversation.metadata != b"{}"
            else "",
        ),
        ("items", f"{len(entries):,}"),
    ]
    yield output.make_facts_table((name, value) for name, value in rows if value)
    for one in entries:
        yield VerbatimText(f"\n{one.id}")
        yield FoldedLines(tuple(render_items(partial(decode_item, one))))


def decode_item(entry: ConversationItem) -> list[response_schema.ResponseItem]:
    """As much of an item as is shown."""
    return [msgspec.json.decode(entry.body, type=response_schema.ResponseItem)]
