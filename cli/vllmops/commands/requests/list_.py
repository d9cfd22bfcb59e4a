"""``vllmops requests list``: the requests that a server works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ... import output
from ...diagnose.findings import Severity
from ...errors import VllmopsError
from ...instances.servers import Server, resolve
from ...output import Json, Result, span
from ...protocol.place import who
from ...requests.listing import Row
from ...vllm_api import http
from ..findings import FailOn, exit_code, lines
from ..options import Target, count, seconds
from ..several import per_target
from .selection import STUCK_S, StuckAfter, gathered

if TYPE_CHECKING:
    from rich.console import RenderableType

OWNER_LETTERS = 8
WIDE = 110  # columns: with fewer there is no room for owners and routes
OUTPUT = "Output"


@per_target
def list_(
    *,
    target: Target = None,
    stuck: Annotated[bool, typer.Option("--stuck", help="Only requests that are stuck.")] = False,
    stuck_after: StuckAfter = STUCK_S,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            "-n",
            parser=count(),
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
            parser=seconds(0.1),
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
    server = cache(partial(resolve, target))  # found once
    quiet = json_ or watch
    return output.repeat(
        lambda: look(server(), stuck_after, fail_on, limit, only_stuck=stuck, quiet=quiet),
        interval,
        watch=watch,
        as_json=json_,
    )


def look(
    server: Server, stuck_s: float, fail_on: Severity, limit: int, *, only_stuck: bool, quiet: bool
) -> Result:
    """One look at a server's requests; the arguments are those of the command."""
    try:
        known = gathered(server, stuck_s, quiet=quiet)
    except VllmopsError as error:
        if error.code != "requests.no-agent" or not server.url:
            raise
        return counted(server, error)
    rows = [row for row in known.rows if row.stuck] if only_stuck else known.rows
    data = {
        "server": server.label,
        "requests": rows,
        "findings": known.findings,
        "silent": known.silent,
        "problems": known.problems,
    }
    return Result(data, lambda: list(text(data, limit)), exit_code(known.findings, fail_on))


def counted(server: Server, error: VllmopsError) -> Result:
    """What a server without an agent tells by its metrics.

    Raises:
        VllmopsError: the one given, if the server has none.
    """
    metrics = http.metrics(server.url or "")
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


def text(data: dict[str, Any], limit: int) -> Iterator[RenderableType]:
    """The data of `look` for a person."""
    rows: Sequence[Row] = data["requests"]
    if rows:
        yield table(rows[:limit])
    if len(rows) > limit:
        yield f"{len(rows) - limit:,} more; --limit {len(rows)} shows all"
    if not rows:
        yield output.styled("No requests.", "green")
    for silent in data["silent"]:
        yield output.styled(f"{who(silent)} did not answer: {silent.why}", "yellow")
    for problem in data["problems"]:
        yield output.styled(problem, "yellow")
    yield from lines(data["findings"])


def table(rows: Sequence[Row]) -> RenderableType:
    """A line for each request; a narrow terminal has the ids whole, and fewer columns."""
    wide = output.console().width >= WIDE
    made = output.table(
        *("request", "state", "age", "still", "prompt", "output", "KV blocks"),
        *(("owner", "route") if wide else ()),
        right=["age", "still", "prompt", "output", "KV blocks"],
        whole=["request"],
    )
    for row in rows:
        state = " ".join(filter(None, (row.state, row.ranks)))
        owner = (row.owner or "-")[:OWNER_LETTERS]
        route = " ".join(filter(None, (row.route, row.lora))) or "-"
        made.add_row(
            row.http_id or row.id or "-",
            output.styled(f"{state}, stuck" if row.stuck else state, "red" if row.stuck else ""),
            span(row.age_s),
            span(row.still_s),
            number(row.prompt_tokens),
            number(row.output_tokens),
            number(row.kv_blocks),
            *((owner, route) if wide else ()),
        )
    return made


def number(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
