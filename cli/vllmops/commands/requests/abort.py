"""``vllmops requests abort``: end requests that a server works on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...actions.request_abort import AbortOutcome, abort_requests
from ...collect.http import vllm_client
from ...observe.requests.listing import InFlightRequest, RequestListing
from ...servers.discovery import Server, resolve_server
from ...support import output
from ...support.errors import ExitCode, VllmopsError, make_usage_error
from ...support.numbers import format_count
from ...support.output import Json, Progress, Result
from ..multi_target import allow_remote_target
from ..options import Target, Yes, parse_duration, validate_duration
from .list_ import make_requests_table
from .request_options import (
    STUCK_S,
    StuckAfter,
    collect_requests,
    complete_request_id,
    require_requests,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

CHOICE = "Which requests, in place of ids"


@allow_remote_target
def abort(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="As requests list shows them, or vLLM's own.",
            autocompletion=complete_request_id,
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
            parser=validate_duration,
            metavar="TIME",
            help="All that arrived longer ago: 90s, 10m, 2h.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    abort_all: Annotated[
        bool, typer.Option("--all", help="All requests, after confirmation.")
    ] = False,
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
    chosen_by = [bool(ids), stuck, older_than is not None, abort_all]
    if sum(chosen_by) != 1:
        raise make_usage_error(
            "give ids, or one of --stuck, --older-than and --all",
            "vllmops requests list shows the ids",
        )
    server = resolve_server(target)
    try:
        known = collect_requests(server, stuck_after, quiet=json_)
    except VllmopsError as error:
        if error.code != "requests.no-agent" or dry_run or not (ids or abort_all):
            raise
        return abort_through_vllm(server, ids or [], error, yes=yes)
    rows = select_requests(known, server, ids or [], stuck=stuck, older_than=older_than)
    if dry_run or not rows:
        data = {"server": server.label, "requests": rows, "dry_run": dry_run}
        return Result(data, lambda: list(render_plan(rows)))
    if abort_all and not yes:
        output.require_confirmation(
            f"End {format_count(len(rows), 'request')} of {server.label}?",
            "repeat the command with --yes",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: ending {format_count(len(rows), 'request')}")
        ended = abort_requests(server, rows, reason)
    return make_abort_result(server, ended)


def abort_through_vllm(
    server: Server, ids: Sequence[str], error: VllmopsError, *, yes: bool
) -> Result:
    """End requests of a server without an agent by vLLM's own routes.

    Args:
        server: that has them.
        ids: as clients see them; all where empty.
        error: why the agents can't do it; raised where vLLM can't, either.
        yes: whether not to ask.
    """
    if not ids and not yes:
        output.require_confirmation(
            f"End all requests of {server.label}?", "repeat the command with --yes"
        )
    count = vllm_client.abort_requests_or_all(server.url, ids) if server.url else None
    if count is None:
        raise error
    data = {"server": server.label, "requests": [], "asked": count, "missing": error.message}
    return Result(
        data,
        lambda: [
            f"asked vLLM to end {format_count(count, 'request')}.",
            f"Whether they are gone is not known: {error.message}",
            f"  hint: vllmops attach -t {server.label}",
        ],
    )


def select_requests(
    known_requests: RequestListing,
    server: Server,
    ids: Sequence[str],
    *,
    stuck: bool,
    older_than: str | None,
) -> list[InFlightRequest]:
    """The requests that the options mean, each once.

    Raises:
        VllmopsError: ``requests.unknown``.
    """
    if ids:
        rows = [row for word in ids for row in require_requests(known_requests, server, word)]
        return list({row.id: row for row in rows}.values())
    least = parse_duration(older_than) if older_than else 0.0
    return [
        row
        for row in known_requests.rows
        if (row.id or not stuck) and (bool(row.stuck) or not stuck) and (row.age_s or 0) >= least
    ]


def render_plan(rows: Sequence[InFlightRequest]) -> Iterator[RenderableType]:
    """What would be ended, for a person."""
    yield f"would end {format_count(len(rows), 'request')}" if rows else "no matching requests"
    if rows:
        yield make_requests_table(rows)


def make_abort_result(server: Server, outcomes: Sequence[AbortOutcome]) -> Result:
    """The result, for requests that are gone and those that are not."""
    left = [one for one in outcomes if not one.done]
    data = {"server": server.label, "requests": outcomes}

    def render_ended() -> list[RenderableType]:
        shown: list[RenderableType] = []
        if gone := len(outcomes) - len(left):
            shown.append(output.style_text(f"ended {format_count(gone, 'request')}", "green"))
        shown += [
            output.style_text(f"{one.http_id or one.id or '-'}: {one.reason}", "yellow")
            for one in left
        ]
        return shown

    return Result(data, render_ended, ExitCode.FAILED if left else ExitCode.OK)
