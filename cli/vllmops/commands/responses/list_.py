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
from .entries import OWNER_LETTERS, STYLES, Entry, age, entry, state, tokens
from .progress import Counting
from .selection import Model, Selection, Since, Statuses, Store, every_id, selected
from .sources import PAGE, source, usage, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

# From here on a line has room for all there is to tell.
WIDE = 100
AT_A_TIME = 500


@command
def list_(
    *,
    target: Target = None,
    store: Store = None,
    status: Statuses = None,
    model: Model = None,
    since: Since = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", parser=count(), help="At most so many.")
    ] = 20,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Those behind this one.", autocompletion=every_id, show_default=False
        ),
    ] = None,
    json_: Json = False,
) -> Result:
    """List responses, the newest first, with tokens in + out.

    A server shows those of one API key, which is taken from VLLM_API_KEY; the
    store itself has everybody's. On this machine the key is sent to a process of
    yours or of root's alone.
    """
    wanted = selected(status, model, since)
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "looked at")
        found, more, whole = asyncio.run(
            listed(target, store, wanted, None if every else limit, after, counting)
        )
    data = {"responses": found, "next": found[-1].id if more else None}
    nothing = "nothing is stored" if wanted.any and not after else "no response is meant by that"
    if not whole:
        nothing += " that this API key may see" if keyed() else ""
    return Result(data, lambda: listing(found, more=more) if found else [nothing])


def keyed() -> bool:
    return bool(os.environ.get("VLLM_API_KEY"))


async def listed(
    target: str | None,
    store: str | None,
    wanted: Selection,
    limit: int | None,
    after: str | None,
    counting: Counting,
) -> tuple[list[Entry], bool, bool]:
    """The newest that are meant, whether there are others, and whether they are everybody's.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    found: list[Entry] = []
    query = wanted.query(descending=True, limit=min(PAGE, (limit or PAGE) + 1))
    query = msgspec.structs.replace(query, after=after)
    async with source(target, store) as responses:
        try:
            async for page in walk(responses, query):
                for each in page:
                    if each.created_at < wanted.newer:
                        return found, False, responses.whole
                    if not wanted.fits(each):
                        continue
                    if len(found) == limit:
                        return found, True, responses.whole
                    found.append(entry(each, whole=responses.whole))
                counting.add(len(page))
        except CursorUnknown as error:
            raise usage(f"--after: {responses.name} has no response {after!r}", "--all") from error
        return found, False, responses.whole


def listing(found: Sequence[Entry], *, more: bool) -> list[RenderableType]:
    """A line for each, of 80 columns where their ids are vLLM's."""
    from rich.text import Text  # noqa: PLC0415

    owners = {each.owner for each in found if each.owner is not None}
    columns = ["id", "status", "model", "age", "tokens", "size"]
    if len(owners) > 1:
        columns.insert(4, "owner")
    if output.console().width < WIDE:
        del columns[5:]
    # A table is laid out as a whole, which takes its time: of very many the first are shown sooner.
    shown: list[RenderableType] = [
        rows(found[start : start + AT_A_TIME], columns) for start in range(0, len(found), AT_A_TIME)
    ]
    if len(owners) == 1 and (owner := owners.pop()):
        shown.append(Text(f"all of API key {owner[:OWNER_LETTERS]}…, by its SHA-256", style="dim"))
    if more:
        shown.append(Text(f"there are more: --all, or --after {found[-1].id}", style="dim"))
    return shown


def rows(found: Sequence[Entry], columns: list[str]) -> Table:
    """Some of the lines, with a head of their own."""
    from rich.text import Text  # noqa: PLC0415

    table = output.table(*columns, right=["age", "tokens", "size"])
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for each in found:
        cells = {
            "id": Text(each.id),
            "status": Text(state(each), STYLES.get(state(each), "")),
            "model": Text(each.model),
            "age": Text(age(each.created_at) if each.created_at else "-"),
            "owner": Text((each.owner or "-")[:OWNER_LETTERS]),
            "tokens": Text(tokens(each)),
            "size": Text(size(each.bytes)),
        }
        table.add_row(*(cells[name] for name in columns))
    return table
