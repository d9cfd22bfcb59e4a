"""``vllmops requests list``: the requests that a server works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...collect.http import vllm_client
from ...model.findings import Severity
from ...model.ranks import format_process
from ...observe.requests.listing import InFlightRequest
from ...servers.discovery import Server, resolve_server
from ...support import output
from ...support.errors import VllmopsError
from ...support.output import Json, Result, format_duration
from ..findings_view import FailOn, choose_exit_code, render_findings
from ..multi_target import run_per_target
from ..options import Target, make_count_parser, make_seconds_parser
from .request_options import STUCK_S, StuckAfter, collect_requests

if TYPE_CHECKING:
    from rich.console import RenderableType

OWNER_LETTERS = 8
WIDE = 110  # columns: with fewer there is no room for owners and routes
OUTPUT = "Output"


@run_per_target
def list_requests(
    *,
    target: Target = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only requests that are stuck.")] = False,
    stuck_after: StuckAfter = STUCK_S,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            parser=make_count_parser(),
            help="Maximum number of rows; not in JSON.",
            rich_help_panel=OUTPUT,
        ),
    ] = 40,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C.", rich_help_panel=OUTPUT)
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1),
            help="With --watch: seconds between updates.",
            rich_help_panel=OUTPUT,
        ),
    ] = 2.0,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """List the requests that a server works on, the oldest first.

    API servers, engines and workers are compared. A request that only one
    of them knows is a finding: its client waits for an answer that does not
    come, or the request holds KV blocks although it has no client. So is one
    that waits in vain for KV blocks from another server. Prompts are not
    shown. For a server without the agent, only the number of requests is known.
    """
    server = cache(partial(resolve_server, target))  # found once
    quiet = json_ or watch
    return output.run_or_watch(
        lambda: make_requests_result(
            server(), stuck_after, fail_on, limit, only_stuck=stuck, quiet=quiet
        ),
        interval,
        watch=watch,
        as_json=json_,
    )


def make_requests_result(
    server: Server, stuck_s: float, fail_on: Severity, limit: int, *, only_stuck: bool, quiet: bool
) -> Result:
    """One look at a server's requests; the arguments are those of the command."""
    try:
        known = collect_requests(server, stuck_s, quiet=quiet)
    except VllmopsError as error:
        if error.code != "requests.no-agent" or not server.url:
            raise
        return make_counts_result(server, error)
    rows = [row for row in known.rows if row.stuck] if only_stuck else known.rows
    data = {
        "server": server.label,
        "requests": rows,
        "findings": known.findings,
        "silent": known.gaps,
        "problems": known.problems,
    }
    return Result(
        data, lambda: list(render_requests(data, limit)), choose_exit_code(known.findings, fail_on)
    )


def make_counts_result(server: Server, error: VllmopsError) -> Result:
    """What a server without an agent tells by its metrics.

    Raises:
        VllmopsError: the one given, if the server has none.
    """
    metrics = vllm_client.fetch_metrics(server.url or "")
    if metrics is None or metrics.running is None:
        raise error
    running, waiting = round(metrics.running), round(metrics.waiting or 0)
    data = {
        "server": server.label,
        "requests": [],
        "running": running,
        "waiting": waiting,
        "missing": error.message,
    }
    return Result(
        data,
        lambda: [
            f"{running} running, {waiting} waiting, by the server's metrics.",
            f"Which ones is not known: {error.message}",
            f"  hint: vllmops attach -t {server.label}",
        ],
    )


def render_requests(data: dict[str, Any], limit: int) -> Iterator[RenderableType]:
    """The data of `make_requests_result` for a person."""
    rows: Sequence[InFlightRequest] = data["requests"]
    if rows:
        yield make_requests_table(rows[:limit])
    if len(rows) > limit:
        yield f"{len(rows) - limit:,} more; --limit {len(rows)} shows all"
    if not rows:
        yield output.style_text("No requests.", "green")
    for silent in data["silent"]:
        yield output.style_text(
            f"{format_process(silent)} did not answer: {silent.reason}", "yellow"
        )
    for problem in data["problems"]:
        yield output.style_text(problem, "yellow")
    yield from render_findings(data["findings"])


def make_requests_table(rows: Sequence[InFlightRequest]) -> RenderableType:
    """A line for each request; a narrow terminal has the ids whole, and fewer columns."""
    wide = output.make_console().width >= WIDE
    made = output.make_table(
        *("request", "state", "age", "still", "prompt", "output", "KV blocks"),
        *(("owner", "route") if wide else ()),
        right_columns=["age", "still", "prompt", "output", "KV blocks"],
        unfolded_columns=["request"],
    )
    for row in rows:
        state = " ".join(filter(None, (row.state, row.ranks)))
        owner = (row.owner or "-")[:OWNER_LETTERS]
        route = " ".join(filter(None, (row.route, row.lora))) or "-"
        made.add_row(
            row.http_id or row.id or "-",
            output.style_text(
                f"{state}, stuck" if row.stuck else state, "red" if row.stuck else ""
            ),
            format_duration(row.age_s),
            format_duration(row.still_s),
            format_number(row.prompt_tokens),
            format_number(row.output_tokens),
            format_number(row.kv_blocks),
            *((owner, route) if wide else ()),
        )
    return made


def format_number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
