"""Take a server down: an optional drain, then every process, then their shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..collect.agents import agent_client, agent_files
from ..collect.http import vllm_client
from ..collect.machine import processes, shared_memory
from ..collect.machine.processes import VITAL, Process, is_alive
from ..model.agent_socket import get_socket_directory
from ..model.agent_state import Traffic
from ..model.roles import Role
from ..support.errors import VllmopsError
from ..support.home import resolve_home

POLL_S = 0.1
EXIT_GRACE_S = 10.0
KILL_TIMEOUT_S = 30.0
# A take-down ends within this time, whatever hangs; asking agents and cleaning up included.
END_S = EXIT_GRACE_S + KILL_TIMEOUT_S + 20.0

T = TypeVar("T")


def drain_server(
    tree: Sequence[Process],
    url: str | None,
    seconds: float,
    report_progress: Callable[[str], None],
    should_stop_waiting: Callable[[], bool] = lambda: False,
    *,
    rerun: bool = False,
) -> str:
    """Refuse new requests and wait for those in flight; returns what happened to them.

    Those that are in flight at the end get 503 rather than a reset.

    Args:
        tree: the server's processes.
        url: asked for vLLM's own counts where an agent does not answer.
        seconds: how long to wait at most; 0 cuts off at once, and returns nothing.
        report_progress: called with a line about the progress.
        should_stop_waiting: whether to wait no longer.
        rerun: whether the next start runs again what now runs in the background.
    """
    refusing = refuse_requests(tree, cut=not seconds, rerun=rerun)
    if not seconds:
        return ""
    how = "draining" if refusing else "draining (no agent: new requests are still accepted)"
    if not select_by_role(tree, Role.API):
        how = "draining (no API server here: new requests still arrive)"
    told = (
        url or refusing or select_by_role(tree, Role.API)
    )  # else nobody can: no agent, no API server
    left = wait_for_requests(
        tree,
        url,
        seconds if told else 0.0,
        lambda text: report_progress(f"{how}, {text}"),
        should_stop_waiting,
    )
    if left == 0:
        return "drained"
    refuse_requests(tree, cut=True, rerun=rerun)
    return f"requests cut off: {'unknown' if left is None else left}"


def wait_for_requests(
    tree: Sequence[Process],
    url: str | None,
    seconds: float,
    report_progress: Callable[[str], None],
    should_stop_waiting: Callable[[], bool] = lambda: False,
) -> int | None:
    """Wait for the requests in flight; returns how many are left, None if unknown.

    Its parameters are those of `drain_server`.
    """
    deadline = time.monotonic() + seconds
    left = count_in_flight(tree, url)
    while (
        left != 0
        and time.monotonic() < deadline
        and not should_stop_waiting()
        and not find_dead_processes(tree)
    ):
        report_progress(f"requests in flight: {'unknown' if left is None else left}")
        time.sleep(POLL_S)
        left = count_in_flight(tree, url)
    return left


def find_dead_processes(tree: Sequence[Process]) -> list[Process]:
    """The processes of a server that have ended, and without which it does not go on."""
    here = [process for process in tree if not isinstance(process, agent_files.ProxiedProcess)]
    return [process for process in here if process.role in VITAL and not is_alive(process)]


def refuse_requests(tree: Sequence[Process], *, cut: bool = False, rerun: bool = False) -> bool:
    """Make every API server refuse new requests with 503; False if one can't be reached.

    Args:
        tree: the server's processes.
        cut: whether those in flight get 503, too.
        rerun: as in `drain_server`.
    """
    gates = collect_agent_answers(
        select_by_role(tree, Role.API),
        lambda gate: gate.set_draining(draining=True, cut=cut, rerun=rerun),
    )
    return bool(gates) and None not in gates


def count_in_flight(tree: Sequence[Process], url: str | None) -> int | None:
    """Requests that have not finished, at least; None if unknown.

    HTTP requests count, streams included, and what an engine has without one, or will have: a
    background response, say. Where an agent does not answer, vLLM's own metrics are asked. They
    are of the engine's last output, so their zero says nothing of what another agent waits for.
    """
    fronts = collect_agent_answers(
        select_by_role(tree, Role.API), lambda gate: gate.fetch_traffic()
    )
    engines = collect_agent_answers(
        select_by_role(tree, Role.ENGINE), lambda core: core.fetch_engine_state()
    )
    http = [count_unfinished(traffic) if traffic else None for traffic in fronts]
    engine = [core.unfinished_requests if core else None for core in engines]
    known = max(sum(count or 0 for count in http), sum(count or 0 for count in engine))
    # What an engine has is from API servers, where they are in this tree.
    told = bool(fronts) and all(
        traffic and traffic.engine_requests is not None for traffic in fronts
    )
    if http + engine and None not in http and (told or None not in engine):
        return known
    counted = vllm_client.fetch_metrics(url) if url else None
    if counted is None or counted.running is None:
        return known or None
    count = max(known, round(counted.running + (counted.waiting or 0)))
    silent = [answer is None for answer in (*fronts, *engines)]
    return count or (None if any(silent) and not all(silent) else 0)


def count_unfinished(traffic: Traffic) -> int | None:
    """Requests of an API server that have not finished; None if it can't tell."""
    return (
        None if traffic.in_flight is None else max(traffic.in_flight, traffic.engine_requests or 0)
    )


def select_by_role(tree: Sequence[Process], role: Role) -> list[Process]:
    return [process for process in tree if process.role is role]


def collect_agent_answers(
    processes: Sequence[Process], question: Callable[[agent_client.Agent], T]
) -> list[T | None]:
    """What the agents answer, all asked at once, so that many that hang take no longer than one."""

    def ask_agent(process: Process) -> T | None:
        try:
            return question(agent_client.open_agent(process))
        except VllmopsError:
            return None

    with ThreadPoolExecutor(max(len(processes), 1)) as pool:
        return list(pool.map(ask_agent, processes))


@dataclass(frozen=True)
class TakedownResult:
    """The result of taking a server down.

    Args:
        removed_segments: segments that were removed.
        unkillable: processes that SIGKILL did not end, as in a driver call that does not return.
    """

    removed_segments: tuple[str, ...]
    unkillable: tuple[Process, ...]

    def __str__(self) -> str:
        if not self.unkillable:
            return ""
        pids = ", ".join(str(process.pid) for process in self.unkillable)
        return f"SIGKILL does not end pid {pids}: see `cat /proc/PID/stack`, or reboot"


def take_down(
    tree: Sequence[Process], session: int | None = None, segments: Iterable[str] = ()
) -> TakedownResult:
    """End every process of a tree, with SIGTERM first, and remove its shared memory.

    Args:
        tree: the processes, root first.
        session: their session id, by which those are found that left their parents.
        segments: names in ``/dev/shm`` that they were seen to use.
    """
    shared = set(segments)
    # An API server that lives ends its engine and workers in order; orphans get their own signal.
    first = [p for p in tree[:1] if p.role in {Role.API, Role.LAUNCHER} and is_alive(p)] or tree
    add_used_segments(find_survivors(tree, session), shared)
    deadline = time.monotonic() + EXIT_GRACE_S
    for wave in (first, tree):
        for process in wave:
            send_signal(process, signal.SIGTERM)
        while any(map(is_alive, wave)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            add_used_segments(find_survivors(tree, session), shared)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (left := find_survivors(tree, session)) and time.monotonic() < deadline:
        # Stopped first: one that is starting may share something new after the check.
        for process in left:
            send_signal(process, signal.SIGSTOP)
        add_used_segments(left, shared)
        for process in left:
            send_signal(process, signal.SIGKILL)
        time.sleep(POLL_S)
    for process in tree:
        for suffix in (".sock", ".beat"):  # of an agent that had no time to remove them
            with contextlib.suppress(OSError, VllmopsError):
                place = Path(process.home) if process.home else resolve_home()
                (get_socket_directory(place) / f"{process.pid}{suffix}").unlink(missing_ok=True)
    return TakedownResult(tuple(shared_memory.remove_unused_segments(shared)), tuple(left))


def add_used_segments(users: Iterable[Process], segments: set[str]) -> None:
    """Take note of the segments that processes use."""
    for process in users:
        segments |= shared_memory.find_used_segments(process.pid)


def find_survivors(tree: Sequence[Process], session: int | None) -> list[Process]:
    """The live processes of a tree, by its members and by their session."""
    table = processes.read_process_table()
    by_pid = {process.pid: process for process in tree if is_alive(process)}
    for pid in find_session_members(table, session):
        by_pid[pid] = Process(Role.OTHER, pid, table[pid].start_ticks)
    return list(by_pid.values())


def find_session_members(table: processes.Table, session: int | None) -> list[int]:
    """The live processes of a session; its number is not reused while it has any."""
    pids = []
    for pid, seen in table.items():
        with contextlib.suppress(OSError):
            if session and not seen.zombie and os.getsid(pid) == session:
                pids.append(pid)
    return pids


def send_signal(process: Process, number: int) -> None:
    """Signal this very process; one that has gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        if is_alive(process):
            os.kill(process.pid, number)
