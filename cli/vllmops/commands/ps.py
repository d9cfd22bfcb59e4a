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

from ..errors import VllmopsError
from ..host.processes import orphaned
from ..host.roles import Role
from ..host.shape import shown
from ..instances.draining import unready
from ..instances.readiness import engines_up
from ..instances.record import State, folders
from ..instances.servers import Server, find, pending, reclaim, resolve
from ..output import Json, Result, say, size, span, table, typer_app
from ..protocol.identity import age_s
from ..protocol.place import Place, key, named
from ..rpc import agent
from ..streams import printable
from ..vllm_api import http as client_http
from .options import AnyTarget
from .several import per_target

app = typer_app()

AGENT_TIMEOUT_S = 1.0
MOST_AT_ONCE = 32
BAD = {"failed", "orphaned", "died", "not answering"}
WITH_AGENT = {Role.API, Role.LAUNCHER, Role.ENGINE, Role.WORKER}


class ProcessRow(Place, frozen=True, kw_only=True):
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
@per_target
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
    servers = [resolve(target)] if target else find()
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # one that hangs holds up no other
        rows = [handing_over(one, servers) for one in pool.map(row, servers)]
    shown = [
        one
        for one, server in zip(rows, servers, strict=True)
        if every or server.processes or pending(server)
    ]
    faults = registry_faults()
    for name in reclaim(servers):
        say(f"{name} had no supervisor; a new one has started")
    for fault in faults:
        say(f"warning: {fault.message}; hint: {fault.hint}")
    failed = [one.name for one in rows if one.state == State.FAILED and one not in shown]
    if failed:
        say(f"failed: {', '.join(filter(None, failed))}; vllmops ps --all shows why")
    data = {
        "instances": shown,
        "faults": [{"code": f.code, "message": f.message, "hint": f.hint} for f in faults],
    }
    return Result(data, lambda: listing(shown) if shown else ["no vLLM server runs here"])


def handing_over(one: InstanceRow, servers: Sequence[Server]) -> InstanceRow:
    """A row, which may be of the other server of a hand-over: at its URL the first one answers."""
    for server in servers:
        if server.record and one.pid in {process.pid for process in server.record.beside}:
            note = f"the other server in the hand-over of {server.label}"
            return replace(one, state="handing over", started_by_vllmops=True, note=note)
    return one


def registry_faults() -> list[VllmopsError]:
    """Records that can't be read; their servers are still listed, as not started by vllmops."""
    faults = []
    for folder in folders():
        try:
            folder.read()
        except VllmopsError as error:
            faults.append(error)
    return faults


def row(server: Server) -> InstanceRow:
    """The row of one server; asks its agents and, if vllmops did not start it, its health."""
    answers, silent = agent.side_by_side(
        [p for p in server.processes if p.role in WITH_AGENT],
        lambda process: agent.reach(process, timeout_s=AGENT_TIMEOUT_S),
    )
    agents = {key(answer.process): "answers" for answer in answers}
    agents |= {key(failure): failure.code.removeprefix("agent.") for failure in silent}
    record = server.record
    return InstanceRow(
        name=server.name,
        state=state(server),
        pid=server.pid,
        url=server.url,
        port=server.port,
        model=server.model,
        started_by_vllmops=record is not None,
        detached=record.detached if record else None,
        supervised=server.supervised if record and not record.state.over else None,
        uptime_s=uptime_s(server),
        rss_bytes=sum(process.rss_bytes or 0 for process in server.processes),
        processes=[
            ProcessRow(
                role=p.role,
                pid=p.pid,
                rss_bytes=p.rss_bytes,
                agent=agents.get(key(p)),
                **msgspec.structs.asdict(p.place),
            )
            for p in server.processes
        ],
        failure=record.failure.cause if record and record.failure else None,
        note=server.note(),
        unready=unready(server),
        uds=server.uds,
        headless=server.headless,
        remote=server.fleet is not None,
    )


def uptime_s(server: Server) -> float | None:
    """Seconds since its first process began; None without one."""
    if not server.processes:
        return None
    if server.fleet:  # by the clocks of two machines
        return max(time.time() - server.processes[0].create_time, 0.0)
    return age_s(server.processes[0].start_ticks)


def state(server: Server) -> str:
    """The state from the supervisor, or from ``/health`` if vllmops did not start the server."""
    if server.record:
        alive = server.processes or pending(server)
        return server.record.state if server.record.state.over or alive else "died"
    if not server.of(Role.API, Role.LAUNCHER):
        lost = server.fleet is None and orphaned(server.processes[0].pid)
        return "orphaned" if lost else "no API server"
    if server.headless:
        return "ready" if engines_up(server.processes) else "starting, or without an agent"
    health = client_http.status(server.url) if server.url else None
    if health == 200:
        return "ready"
    return f"unhealthy ({health})" if health else "not answering"


def origin(one: InstanceRow) -> str:
    """Where a server comes from, unless vllmops started it on this machine."""
    if one.remote:
        return "on another machine"
    return "" if one.started_by_vllmops else "not started by vllmops"


def address(one: InstanceRow) -> str:
    """Where it is reached, for a person."""
    if one.url:
        return shown(one.url)
    return "headless" if one.headless else "no port"


def listing(rows: Sequence[InstanceRow]) -> list[RenderableType]:
    """A few lines for each server, and below them one for each of its processes."""
    shown: list[RenderableType] = []
    for one in rows:
        lone = "unsupervised" if one.supervised is False else ""
        state = ", ".join(filter(None, (one.state, one.unready, lone)))
        head = Text()
        head.append(one.name or (address(one) if one.remote else f"pid {one.pid}"), style="bold")
        head.append(f"  {state}", style="red" if one.state in BAD else "green")
        head.append(f"  up {span(one.uptime_s)}" if one.processes else "")
        head.append(f"  {size(one.rss_bytes)}" if one.processes else "")
        head.append(f"  {origin(one)}" if origin(one) else "", style="dim")
        if shown:
            shown.append("")
        shown.append(head)
        # Text from a foreign process: a line break in it would look like a line of vllmops.
        words = printable(f"{address(one)}  {one.model or ''}", lines=False)
        shown.append(Text(f"  {words}", overflow="fold"))
        if one.failure:
            shown.append(Text(f"  {one.failure}", style="red", overflow="fold"))
        if one.note:
            shown.append(Text(f"  {one.note}", style="yellow", overflow="fold"))
        processes = table("  process", "pid", "rss", "agent", right=["pid", "rss"])
        for process in one.processes:
            if process.role != Role.OTHER:
                processes.add_row(
                    f"  {named(process.role, process)}",
                    str(process.pid),
                    size(process.rss_bytes),
                    process.agent or "-",
                )
        if processes.row_count:
            shown.append(processes)
    return shown
