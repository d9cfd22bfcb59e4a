"""``vllmops conversations list``: stored conversations, the newest first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from vllmops.commands.options import Target, make_count_parser
from vllmops.support import output
from vllmops.support.output import Json, Result, print_result

from ...store.backend import CursorUnknown
from ..responses.response_rows import OWNER_LETTERS, format_age
from ..responses.show import sanitize_json
from ..responses.source_options import PAGE, make_unknown_cursor_error
from .store_options import (
    Store,
    complete_conversation_id,
    iterate_conversations,
    open_conversations,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ...store.conversation_backend import Conversation


@print_result
def list_conversations(
    *,
    target: Target = None,
    store: Store = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            parser=make_count_parser(),
            help="Maximum number of conversations to list.",
        ),
    ] = 20,
    list_all: Annotated[bool, typer.Option("--all", help="List all conversations.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            autocompletion=complete_conversation_id,
            help="List the conversations that follow this one in the list.",
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """List conversations of all API keys, the newest first.

    It reads the store itself: that of a server of this machine, or --store.
    """
    found, more = asyncio.run(load_conversations(target, store, None if list_all else limit, after))
    data = {
        "conversations": list(map(build_conversation_data, found)),
        "next": found[-1].id if more else None,
    }
    return Result(
        data,
        lambda: (
            render_conversations(found, has_more=more) if found else ["no conversations are stored"]
        ),
    )


async def load_conversations(
    target: str | None, store: str | None, limit: int | None, after_id: str | None
) -> tuple[list[Conversation], bool]:
    """The newest conversations, and whether more follow."""
    found: list[Conversation] = []
    async with open_conversations(target, store) as (name, kept):
        try:
            async for one in iterate_conversations(kept, after_id, min(PAGE, (limit or PAGE) + 1)):
                if len(found) == limit:
                    return found, True
                found.append(one)
        except CursorUnknown as error:
            raise make_unknown_cursor_error(name, "conversation", after_id) from error
    return found, False


def build_conversation_data(conversation: Conversation) -> dict[str, Any]:
    """A conversation in JSON."""
    return {
        "id": conversation.id,
        "owner": conversation.owner,
        "created_at": conversation.created_at,
        "items": conversation.size,
        "metadata": msgspec.Raw(sanitize_json(conversation.metadata)),
    }


def render_conversations(
    conversations: Sequence[Conversation], *, has_more: bool
) -> list[RenderableType]:
    """One line per conversation."""
    from rich.text import Text  # noqa: PLC0415

    table = output.make_table(
        "id", "items", "age", "API key", "metadata", right_columns=["items", "age"]
    )
    table.columns[0].no_wrap = True
    for one in conversations:
        metadata = one.metadata.decode(errors="replace")
        table.add_row(
            one.id,
            f"{one.size:,}",
            format_age(one.created_at),
            one.owner[:OWNER_LETTERS] or "-",
            Text("" if metadata == "{}" else metadata, overflow="ellipsis", no_wrap=True),
        )
    rest = output.style_text(f"more follow: --all, or --after {conversations[-1].id}", "dim")
    return [table, rest] if has_more else [table]
