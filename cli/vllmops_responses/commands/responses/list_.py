"""``vllmops responses list``: stored responses, the newest first."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllmops.commands.options import Target, make_count_parser
from vllmops.support import output
from vllmops.support.output import Json, Progress, Result, format_bytes, print_result

from ...store.backend import CursorUnknown
from .progress import ProgressCounter
from .response_options import (
    Model,
    Selection,
    Since,
    Statuses,
    Store,
    complete_response_id,
    parse_selection,
)
from .response_rows import (
    OWNER_LETTERS,
    STYLES,
    ResponseEntry,
    format_age,
    format_status,
    format_tokens,
    make_entry,
)
from .source_options import PAGE, iterate_pages, make_unknown_cursor_error, open_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

# Columns of a terminal that shows all fields.
WIDE = 100
AT_A_TIME = 500
PAGES = "Pages"


@print_result
def list_responses(
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
            parser=make_count_parser(),
            help="Maximum number of responses to list.",
            rich_help_panel=PAGES,
        ),
    ] = 20,
    list_all: Annotated[
        bool, typer.Option("--all", help="List all responses.", rich_help_panel=PAGES)
    ] = False,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="List the responses that follow this one in the list.",
            rich_help_panel=PAGES,
            autocompletion=complete_response_id,
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """List responses, the newest first, with input + output tokens.

    A server shows the responses of one API key, taken from VLLM_API_KEY. With
    --store, the responses of all keys are listed. On this machine, the key is
    sent only to a process that you or root own.
    """
    selection = parse_selection(status, model, since)
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "read")
        entries, more, whole = asyncio.run(
            load_entries(target, store, selection, None if list_all else limit, after, counting)
        )
    data = {"responses": entries, "next": entries[-1].id if more else None}
    nothing = (
        "no responses are stored"
        if selection.is_unfiltered and not after
        else "no matching responses"
    )
    if not whole and has_api_key():
        nothing += ", of this API key"
    return Result(data, lambda: render_entries(entries, has_more=more) if entries else [nothing])


def has_api_key() -> bool:
    return bool(os.environ.get("VLLM_API_KEY"))


async def load_entries(
    target: str | None,
    store: str | None,
    selection: Selection,
    limit: int | None,
    after_id: str | None,
    counting: ProgressCounter,
) -> tuple[list[ResponseEntry], bool, bool]:
    """The newest selected responses, whether more follow, and whether all API keys are included.

    Raises:
        VllmopsError: as `open_source` and its methods.
    """
    entries: list[ResponseEntry] = []
    query = selection.build_query(descending=True, limit=min(PAGE, (limit or PAGE) + 1))
    query = msgspec.structs.replace(query, after_id=after_id)
    async with open_source(target, store) as responses:
        try:
            async for page in iterate_pages(responses, query):
                for response in page:
                    if response.created_at < selection.created_after:
                        return entries, False, responses.has_all_owners
                    if not selection.matches(response):
                        continue
                    if len(entries) == limit:
                        return entries, True, responses.has_all_owners
                    entries.append(make_entry(response, has_owners=responses.has_all_owners))
                counting.add(len(page))
        except CursorUnknown as error:
            raise make_unknown_cursor_error(responses.name, "response", after_id) from error
        return entries, False, responses.has_all_owners


def render_entries(entries: Sequence[ResponseEntry], *, has_more: bool) -> list[RenderableType]:
    """One line per response: 80 columns wide with vLLM's ids."""
    owners = {entry.owner for entry in entries if entry.owner is not None}
    columns = ["id", "status", "model", "age", "tokens", "size"]
    if len(owners) > 1:
        columns.insert(4, "owner")
    if output.make_console().width < WIDE:
        del columns[5:]
    # A table is laid out as a whole, which is slow: many rows become several tables.
    shown: list[RenderableType] = [
        make_entries_table(entries[start : start + AT_A_TIME], columns)
        for start in range(0, len(entries), AT_A_TIME)
    ]
    if len(owners) == 1 and (owner := owners.pop()):
        shown.append(
            output.style_text(f"all belong to API key {owner[:OWNER_LETTERS]}… (SHA-256)", "dim")
        )
    if has_more:
        shown.append(
            output.style_text(f"more responses follow: --all, or --after {entries[-1].id}", "dim")
        )
    return shown


def make_entries_table(entries: Sequence[ResponseEntry], columns: list[str]) -> Table:
    """A table of some responses."""
    table = output.make_table(*columns, right_columns=["age", "tokens", "size"])
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for entry in entries:
        cells: dict[str, RenderableType] = {
            "id": entry.id,
            "status": output.style_text(format_status(entry), STYLES.get(format_status(entry), "")),
            "model": entry.model,
            "age": format_age(entry.created_at) if entry.created_at else "-",
            "owner": (entry.owner or "-")[:OWNER_LETTERS],
            "tokens": format_tokens(entry),
            "size": format_bytes(entry.bytes),
        }
        table.add_row(*(cells[name] for name in columns))
    return table
