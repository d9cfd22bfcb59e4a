"""A row for each vLLM server: its state, its memory, and which processes have an agent."""

from __future__ import annotations

import time

import msgspec

from ..collect.agents import agent_client
from ..collect.http import vllm_client
from ..collect.machine.processes import is_orphaned
from ..model.process_identity import compute_age_s
from ..model.ranks import Placement, make_process_key
from ..model.roles import Role
from ..servers.discovery import Server, is_pending
from ..servers.drain import explain_unreadiness
from ..servers.readiness import are_engines_up

AGENT_TIMEOUT_S = 1.0
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


def build_instance_row(server: Server) -> InstanceRow:
    """The row of one server; asks its agents and, if vllmops did not start it, its health."""
    answers, silent = agent_client.collect_answers(
        [p for p in server.processes if p.role in WITH_AGENT],
        lambda process: agent_client.open_agent(process, timeout_s=AGENT_TIMEOUT_S),
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
