"""Whether a server is ready: by its port or socket, or, if it is headless, by its engines."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ..collect.agents import agent_files
from ..collect.http import vllm_client
from ..collect.machine import processes
from ..collect.machine.processes import Process
from ..model.roles import Role
from ..support.errors import VllmopsError
from . import logs

# What an engine logs once its model and its KV cache are there; a worker, once its model is.
ENGINE_UP = re.compile(r"init engine \(")
WORKER_UP = re.compile(r"Loading weights took|Model loading took|Warming up|Graph capturing")


def is_serving(
    tree: Sequence[Process], url: str | None, *, port: int | None = None, uds: str | None = None
) -> bool:
    """Whether a server answers, and not another one that took its address first.

    Args:
        tree: its processes.
        url: its address.
        port: the TCP port in that.
        uds: the Unix socket in that.
    """
    return (
        url is not None
        and any(
            processes.has_unix_socket(process.pid, uds)
            if uds
            else port in processes.list_listening_ports(process.pid)
            for process in tree
            if process.role in {Role.API, Role.LAUNCHER}
        )
        and vllm_client.is_healthy(url)
    )


def are_engines_up(tree: Sequence[Process], ready_pids: Collection[int] = ()) -> bool:
    """Whether every engine of a headless server has what it needs to work.

    An engine begins to load after the handshake with its API server's node, so one that is up has
    it behind it. Where there are workers alone, their engine is on another node.

    Args:
        tree: the server's processes.
        ready_pids: pids whose log lines announce it, for processes without an agent.
    """
    engines = [process for process in tree if process.role is Role.ENGINE]
    if engines:
        return all(process.pid in ready_pids or has_scheduler(process) for process in engines)
    workers = [process for process in tree if process.role is Role.WORKER]
    return bool(workers) and all(process.pid in ready_pids for process in workers)


def has_scheduler(engine: Process) -> bool:
    """Whether an engine has a scheduler, as its heartbeat says; False where there is none."""
    try:
        pulse = agent_files.read_heartbeat(engine)
    except VllmopsError:
        return False
    return pulse is not None and pulse.heartbeat.current_step is not None


def parse_ready_pid(raw: str) -> int | None:
    """The pid of the process that a log line says is up, None for most lines."""
    match = logs.LINE.match(raw)
    role = logs.parse_line_role(raw) if match else None
    sign = {Role.ENGINE: ENGINE_UP, Role.WORKER: WORKER_UP}.get(role) if role else None
    return int(match["pid"]) if match and sign and sign.search(raw) else None
