"""``vllmops conversations delete``: delete conversations by id."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import typer

from vllmops.commands.options import Target
from vllmops.support.output import Json, Result, VerbatimText, print_result

from ...store.backend import EVERYBODY
from ..responses.progress import return_or_show_and_raise
from ..responses.source_options import retry_while_unavailable
from .store_options import (
    Store,
    complete_conversation_id,
    make_unknown_conversation_error,
    open_conversations,
)


@print_result
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...",
            help="Conversations to delete.",
            autocompletion=complete_conversation_id,
        ),
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Delete conversations with their items. Their responses stay."""
    name, done = asyncio.run(delete_conversations(target, store, list(dict.fromkeys(ids))))
    data = {"conversations": [{"id": one, "deleted": there} for one, there in done.items()]}
    lines = [VerbatimText(f"{one}  deleted") for one, there in done.items() if there]
    missing = [one for one, there in done.items() if not there]
    failure = make_unknown_conversation_error(name, *missing) if missing else None
    return return_or_show_and_raise(Result(data, lambda: list(lines)), failure, as_json=json_)


async def delete_conversations(
    target: str | None, store: str | None, ids: list[str]
) -> tuple[str, dict[str, bool]]:
    """The name of the store, and of each conversation whether it was there."""
    async with open_conversations(target, store) as (name, kept):
        return name, {
            one: await retry_while_unavailable(partial(kept.delete, EVERYBODY, one)) for one in ids
        }
