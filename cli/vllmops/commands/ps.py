"""``vllmops ps``: every vLLM server on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text

from ..collect.agents import agent_client as agent
from ..collect.http import vllm_client
from ..collect.machine.processes import is_orphaned
from ..collect.machine.server_address import format_url
from ..model.process_identity import compute_age_s
from ..model.ranks import Placement, format_role_and_ranks, make_process_key
from ..model.roles import Role
from ..servers.discovery import (
    Server,
    is_pending,
    list_servers,
    resolve_server,
    restart_dead_supervisors,
)
from ..servers.drain import explain_unreadiness
from ..servers.readiness import are_engines_up
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

app = make_typer_app()

AGENT_TIMEOUT_S = 1.0
MOST_AT_ONCE = 32
BAD = {"failed", "orphaned", "died", "not answering"}
WITH_AGENT = {Role.API, Role.LAUNCHER, Role.ENGINE, Role.WORKER}


class ProcessRow(Placement, frozen=True, kw_only=True):
    """One process. ``agent``: ``answers``, or why not: ``absent``, ``timeout``, ``stale`` …"""

    role: str
    pid: int
    rss_bytes: int | None
    agent: str | None


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One server.

    ``supervised``: None for one that vllmops did not start. ``note``: what its supervisor says,
    and which nodes do not answer. ``unready``: why it is no place for new requests, such as
    ``draining``.
    """

    name: str | None
    state: str
    pid: int | None
    url: str | None
    port: int | None
    model: str | None
    started_by_vllmops: bool
    detached: bool | None
    supervised: bool | None
    uptime_s: float | None
    rss_bytes: int
    processes: list[ProcessRow]
    failure: str | None = None
    note: str = ""
    unready: str = ""
    uds: str | None = None
    headless: bool = False
    remote: bool = False


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
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # one that hangs holds up no other
        rows = [mark_hand_over(one, servers) for one in pool.map(build_instance_row, servers)]
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


def build_instance_row(server: Server) -> InstanceRow:
    """The row of one server; asks its agents and, if vllmops did not start it, its health."""
    answers, silent = agent.collect_answers(
        [p for p in server.processes if p.role in WITH_AGENT],
        lambda process: agent.open_agent(process, timeout_s=AGENT_TIMEOUT_S),
    )
    agents = {make_process_key(answer.process): "answers" for answer in answers}
    agents |= {make_process_key(failure): failure.code.removeprefix("agent.") for failure in silent}
    record = server.record
    return InstanceRow(
        name=server.name,
        state=find_state(server),
        pid=server.pid,
        url=server.url,
        port=server.port,
        model=server.model,
        started_by_vllmops=record is not None,
        detached=record.detached if record else None,
        supervised=server.supervised if record and not record.state.is_over else None,
        uptime_s=compute_uptime_s(server),
        rss_bytes=sum(process.rss_bytes or 0 for process in server.processes),
        processes=[
            ProcessRow(
                role=p.role,
                pid=p.pid,
                rss_bytes=p.rss_bytes,
                agent=agents.get(make_process_key(p)),
                **msgspec.structs.asdict(p.place),
            )
            for p in server.processes
        ],
        failure=record.failure.cause if record and record.failure else None,
        note=server.describe_silent_nodes(),
        unready=explain_unreadiness(server),
        uds=server.uds,
        headless=server.headless,
        remote=server.fleet is not None,
    )


def compute_uptime_s(server: Server) -> float | None:
    """Seconds since its first process began; None without one."""
    if not server.processes:
        return None
    if server.fleet:  # by the clocks of two machines
        return max(time.time() - server.processes[0].create_time, 0.0)
    return compute_age_s(server.processes[0].start_ticks)


def find_state(server: Server) -> str:
    """The state from the supervisor, or from ``/health`` if vllmops did not start the server."""
    if server.record:
        alive = server.processes or is_pending(server)
        return server.record.state if server.record.state.is_over or alive else "died"
    if not server.select_processes(Role.API, Role.LAUNCHER):
        lost = server.fleet is None and is_orphaned(server.processes[0].pid)
        return "orphaned" if lost else "no API server"
    if server.headless:
        return "ready" if are_engines_up(server.processes) else "starting, or without an agent"
    health = vllm_client.fetch_health_status(server.url) if server.url else None
    if health == 200:
        return "ready"
    return f"unhealthy ({health})" if health else "not answering"


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
