"""``vllmops responses list``: stored responses, the newest first."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ... import output
from ...output import Json, Progress, Result, command, size
from ...store.backend import CursorUnknown
from ..options import Target, count
from .entries import OWNER_LETTERS, STYLES, Entry, age, entry_of, state, tokens
from .progress import Counting
from .selection import Model, Selection, Since, Statuses, Store, every_id, selected
from .sources import PAGE, source, unknown_cursor, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

# Columns of a terminal that shows all fields.
WIDE = 100
AT_A_TIME = 500
PAGES = "Pages"


@command
def list_(
    *,
    target: Target = None,
    store: Store = None,
    status: Statuses = None,
    model: Model = None,
    since: Since = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            parser=count(),
            help="Maximum number of responses to list.",
            rich_help_panel=PAGES,
        ),
    ] = 20,
    every: Annotated[
        bool, typer.Option("--all", help="List all responses.", rich_help_panel=PAGES)
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="List the responses that follow this one in the list.",
            rich_help_panel=PAGES,
            autocompletion=every_id,
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """List responses, the newest first, with input + output tokens.

    A server shows the responses of one API key, taken from VLLM_API_KEY. With
    --store, the responses of all keys are listed. On this machine, the key is
    sent only to a process that you or root own.
    """
    selection = selected(status, model, since)
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "read")
        entries, more, whole = asyncio.run(
            listed(target, store, selection, None if every else limit, after, counting)
        )
    data = {"responses": entries, "next": entries[-1].id if more else None}
    nothing = "no responses are stored" if selection.any and not after else "no matching responses"
    if not whole and keyed():
        nothing += ", of this API key"
    return Result(data, lambda: listing(entries, more=more) if entries else [nothing])


def keyed() -> bool:
    return bool(os.environ.get("VLLM_API_KEY"))


async def listed(
    target: str | None,
    store: str | None,
    selection: Selection,
    limit: int | None,
    after: str | None,
    counting: Counting,
) -> tuple[list[Entry], bool, bool]:
    """The newest selected responses, whether more follow, and whether all API keys are included.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    entries: list[Entry] = []
    query = selection.query(descending=True, limit=min(PAGE, (limit or PAGE) + 1))
    query = msgspec.structs.replace(query, after=after)
    async with source(target, store) as responses:
        try:
            async for page in walk(responses, query):
                for response in page:
                    if response.created_at < selection.newer:
                        return entries, False, responses.whole
                    if not selection.fits(response):
                        continue
                    if len(entries) == limit:
                        return entries, True, responses.whole
                    entries.append(entry_of(response, whole=responses.whole))
                counting.add(len(page))
        except CursorUnknown as error:
            raise unknown_cursor(responses.name, "response", after) from error
        return entries, False, responses.whole


def listing(entries: Sequence[Entry], *, more: bool) -> list[RenderableType]:
    """One line per response: 80 columns wide with vLLM's ids."""
    owners = {entry.owner for entry in entries if entry.owner is not None}
    columns = ["id", "status", "model", "age", "tokens", "size"]
    if len(owners) > 1:
        columns.insert(4, "owner")
    if output.console().width < WIDE:
        del columns[5:]
    # A table is laid out as a whole, which is slow: many rows become several tables.
    shown: list[RenderableType] = [
        rows(entries[start : start + AT_A_TIME], columns)
        for start in range(0, len(entries), AT_A_TIME)
    ]
    if len(owners) == 1 and (owner := owners.pop()):
        shown.append(
            output.styled(f"all belong to API key {owner[:OWNER_LETTERS]}… (SHA-256)", "dim")
        )
    if more:
        shown.append(
            output.styled(f"more responses follow: --all, or --after {entries[-1].id}", "dim")
        )
    return shown


def rows(entries: Sequence[Entry], columns: list[str]) -> Table:
    """A table of some responses."""
    table = output.table(*columns, right=["age", "tokens", "size"])
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for entry in entries:
        cells: dict[str, RenderableType] = {
            "id": entry.id,
            "status": output.styled(state(entry), STYLES.get(state(entry), "")),
            "model": entry.model,
            "age": age(entry.created_at) if entry.created_at else "-",
            "owner": (entry.owner or "-")[:OWNER_LETTERS],
            "tokens": tokens(entry),
            "size": size(entry.bytes),
        }
        table.add_row(*(cells[name] for name in columns))
    return table
