"""``vllmops requests abort``: end requests that a server works on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ... import output
from ...errors import Exit, VllmopsError, usage
from ...instances.servers import Server, resolve
from ...numbers import many
from ...output import Json, Progress, Result
from ...requests.ending import Ended, end
from ...requests.listing import Listing, Row
from ...vllm_api import http
from ..options import Target, Yes, duration, time_
from ..several import remote
from .list_ import table
from .selection import STUCK_S, StuckAfter, gathered, named, request_ids

if TYPE_CHECKING:
    from rich.console import RenderableType

CHOICE = "Which requests, in place of ids"


@remote
def abort(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="As requests list shows them, or vLLM's own.",
            autocompletion=request_ids,
        ),
    ] = None,
    *,
    target: Target = None,
    stuck: Annotated[
        bool,
        typer.Option(
            "--stuck",
            help="All that are stuck, or that only one side knows.",
            rich_help_panel=CHOICE,
        ),
    ] = False,
    stuck_after: StuckAfter = STUCK_S,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            parser=time_,
            metavar="TIME",
            help="All that arrived longer ago: 90s, 10m, 2h.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All requests, after confirmation.")] = False,
    reason: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Error message for the clients.",
            show_default="an operator ended it",
        ),
    ] = "",
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be ended, and end nothing.")
    ] = False,
    json_: Json = False,
) -> Result:
    """End requests: each client gets an error, and what they hold is freed.

    Give ids, or choose with --stuck, --older-than or --all. The API server
    and the engine both end the request. It also works where the engine
    schedules nothing, and where the API server's event loop is blocked:
    the client then gets the error when the loop runs again. The exit code is 1 if
    a request is still there afterwards.
    """
    chosen_by = [bool(ids), stuck, older_than is not None, every]
    if sum(chosen_by) != 1:
        raise usage(
            "give ids, or one of --stuck, --older-than and --all",
            "vllmops requests list shows the ids",
        )
    server = resolve(target)
    try:
        known = gathered(server, stuck_after, quiet=json_)
    except VllmopsError as error:
        if error.code != "requests.no-agent" or dry_run or not (ids or every):
            raise
        return by_vllm(server, ids or [], error, yes=yes)
    rows = chosen(known, server, ids or [], stuck=stuck, older_than=older_than)
    if dry_run or not rows:
        data = {"server": server.label, "requests": rows, "dry_run": dry_run}
        return Result(data, lambda: list(planned(rows)))
    if every and not yes:
        output.confirm(
            f"End {many(len(rows), 'request')} of {server.label}?",
            "repeat the command with --yes",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: ending {many(len(rows), 'request')}")
        ended = end(server, rows, reason)
    return report(server, ended)


def by_vllm(server: Server, ids: Sequence[str], error: VllmopsError, *, yes: bool) -> Result:
    """End requests of a server without an agent by vLLM's own routes.

    Args:
        server: that has them.
        ids: as clients see them; all where empty.
        error: why the agents can't do it; raised where vLLM can't, either.
        yes: whether not to ask.
    """
    if not ids and not yes:
        output.confirm(f"End all requests of {server.label}?", "repeat the command with --yes")
    count = http.abort(server.url, ids) if server.url else None
    if count is None:
        raise error
    data = {"server": server.label, "requests": [], "asked": count, "missing": error.message}
    return Result(
        data,
        lambda: [
            f"asked vLLM to end {many(count, 'request')}.",
            f"Whether they are gone is not known: {error.message}",
            f"  hint: vllmops attach -t {server.label}",
        ],
    )


def chosen(
    known: Listing, server: Server, ids: Sequence[str], *, stuck: bool, older_than: str | None
) -> list[Row]:
    """The requests that the options mean, each once.

    Raises:
        VllmopsError: ``requests.unknown``.
    """
    if ids:
        rows = [row for word in ids for row in named(known, server, word)]
        return list({row.id: row for row in rows}.values())
    least = duration(older_than) if older_than else 0.0
    return [
        row
        for row in known.rows
        if (row.id or not stuck) and (bool(row.stuck) or not stuck) and (row.age_s or 0) >= least
    ]


def planned(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """What would be ended, for a person."""
    yield f"would end {many(len(rows), 'request')}" if rows else "no matching requests"
    if rows:
        yield table(rows)


def report(server: Server, ended: Sequence[Ended]) -> Result:
    """The result, for requests that are gone and those that are not."""
    left = [one for one in ended if not one.done]
    data = {"server": server.label, "requests": ended}

    def text() -> list[RenderableType]:
        shown: list[RenderableType] = []
        if gone := len(ended) - len(left):
            shown.append(output.styled(f"ended {many(gone, 'request')}", "green"))
        shown += [
            output.styled(f"{one.http_id or one.id or '-'}: {one.left}", "yellow") for one in left
        ]
        return shown

    return Result(data, text, Exit.FAILED if left else Exit.OK)
