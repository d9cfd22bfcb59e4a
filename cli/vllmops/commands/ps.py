"""``vllmops ps``: every vLLM server on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text

from ..collect.machine.server_address import format_url
from ..model.ranks import format_role_and_ranks
from ..model.roles import Role
from ..servers.discovery import (
    Server,
    is_pending,
    list_servers,
    resolve_server,
    restart_dead_supervisors,
)
from ..servers.record import InstanceState, list_instance_folders
from ..support.errors import VllmopsError
from ..support.output import (
    Json,
    Result,
    format_bytes,
    format_duration,
    make_table,
    make_typer_app,
    print_to_stderr,
)
from ..support.streams import make_printable
from .multi_target import run_per_target
from .options import AnyTarget

if TYPE_CHECKING:
    from ..observe.instances import InstanceRow

app = make_typer_app()

MOST_AT_ONCE = 32
BAD = {"failed", "orphaned", "died", "not answering"}


@app.command(epilog="Example: vllmops ps --json")
@run_per_target
def ps(
    target: AnyTarget = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Also show instances that stopped or failed.")
    ] = False,
    json_: Json = False,
) -> Result:
    """List every vLLM server on this machine.

    Servers that vllmops did not start are listed, too. With -t and
    --admin-token, servers on other machines are.
    """
    servers = [resolve_server(target)] if target else list_servers()
    rows = [mark_hand_over(one, servers) for one in build_rows(servers)] if servers else []
    shown = [
        one
        for one, server in zip(rows, servers, strict=True)
        if every or server.processes or is_pending(server)
    ]
    faults = find_registry_errors()
    for name in restart_dead_supervisors(servers):
        print_to_stderr(f"{name} had no supervisor; a new one has started")
    for fault in faults:
        print_to_stderr(f"warning: {fault.message}; hint: {fault.hint}")
    failed = [one.name for one in rows if one.state == InstanceState.FAILED and one not in shown]
    if failed:
        print_to_stderr(f"failed: {', '.join(filter(None, failed))}; vllmops ps --all shows why")
    data = {
        "instances": shown,
        "faults": [{"code": f.code, "message": f.message, "hint": f.hint} for f in faults],
    }
    return Result(data, lambda: render_servers(shown) if shown else ["no vLLM server runs here"])


def build_rows(servers: Sequence[Server]) -> Iterator[InstanceRow]:
    """A row for each server; they are asked at the same time, so that none holds up another."""
    from ..observe.instances import build_instance_row  # noqa: PLC0415 - slow

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        yield from pool.map(build_instance_row, servers)


def mark_hand_over(row: InstanceRow, servers: Sequence[Server]) -> InstanceRow:
    """A row, which may be of the other server of a hand-over: at its URL the first one answers."""
    for server in servers:
        if server.record and row.pid in {
            process.pid for process in server.record.hand_over_processes
        }:
            note = f"the other server in the hand-over of {server.label}"
            return replace(row, state="handing over", started_by_vllmops=True, note=note)
    return row


def find_registry_errors() -> list[VllmopsError]:
    """Records that can't be read; their servers are still listed, as not started by vllmops."""
    faults = []
    for folder in list_instance_folders():
        try:
            folder.load_record()
        except VllmopsError as error:
            faults.append(error)
    return faults


def format_origin(row: InstanceRow) -> str:
    """Where a server comes from, unless vllmops started it on this machine."""
    if row.remote:
        return "on another machine"
    return "" if row.started_by_vllmops else "not started by vllmops"


def format_address(row: InstanceRow) -> str:
    """Where it is reached, for a person."""
    if row.url:
        return format_url(row.url)
    return "headless" if row.headless else "no port"


def render_servers(rows: Sequence[InstanceRow]) -> list[RenderableType]:
    """A few lines for each server, and below them one for each of its processes."""
    shown: list[RenderableType] = []
    for one in rows:
        lone = "unsupervised" if one.supervised is False else ""
        state = ", ".join(filter(None, (one.state, one.unready, lone)))
        head = Text()
        head.append(
            one.name or (format_address(one) if one.remote else f"pid {one.pid}"), style="bold"
        )
        head.append(f"  {state}", style="red" if one.state in BAD else "green")
        head.append(f"  up {format_duration(one.uptime_s)}" if one.processes else "")
        head.append(f"  {format_bytes(one.rss_bytes)}" if one.processes else "")
        head.append(f"  {format_origin(one)}" if format_origin(one) else "", style="dim")
        if shown:
            shown.append("")
        shown.append(head)
        # Text from a foreign process: a line break in it would look like a line of vllmops.
        words = make_printable(f"{format_address(one)}  {one.model or ''}", lines=False)
        shown.append(Text(f"  {words}", overflow="fold"))
        if one.failure:
            shown.append(Text(f"  {one.failure}", style="red", overflow="fold"))
        if one.note:
            shown.append(Text(f"  {one.note}", style="yellow", overflow="fold"))
        processes = make_table("  process", "pid", "rss", "agent", right_columns=["pid", "rss"])
        for process in one.processes:
            if process.role != Role.OTHER:
                processes.add_row(
                    f"  {format_role_and_ranks(process.role, process)}",
                    str(process.pid),
                    format_bytes(process.rss_bytes),
                    process.agent or "-",
                )
        if processes.row_count:
            shown.append(processes)
    return shown
