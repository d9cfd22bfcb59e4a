"""What a hand-over needs: memory for two servers, one listening socket, and an empty first one."""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from ..collect.machine import memory
from ..collect.machine.gpu import NvidiaGpus
from ..collect.machine.processes import VITAL, Process, is_alive
from ..model.roles import Role
from ..support.errors import VllmopsError
from ..support.numbers import format_count
from . import shutdown

PIDFD_GETFD = 438  # on x86-64 and aarch64
# A client may use its connection again as long as vLLM keeps it: for 5 s, unless it was told else.
KEEP_ALIVE, KEEP_ALIVE_S, SLACK_S = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", 5.0, 1.0
POLL_S = 0.2
SPARE = 1.1


def explain_insufficient_memory(tree: Sequence[Process]) -> str:
    """Why a second server like this one does not fit beside it; empty if it does."""
    needed = 0
    for process in tree:
        with suppress(psutil.Error):
            # What processes share counts once.
            needed += psutil.Process(process.pid).memory_full_info().pss
    _, available = memory.read_available_memory(tree[0].pid if tree else None)
    if SPARE * needed > available:
        return f"it takes {format_gb(needed)}, and {format_gb(available)} of memory are free"
    gpus = NvidiaGpus()
    pids = {process.pid for process in tree}
    for index, handle in enumerate(gpus.handles):
        used: Counter[str] = Counter()
        with suppress(gpus.nvml.NVMLError):
            for process in gpus.nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                used["here"] += (process.usedGpuMemory or 0) if process.pid in pids else 0
            free = gpus.nvml.nvmlDeviceGetMemoryInfo(handle).free
            if used["here"] > free:
                return (
                    f"it takes {format_gb(used['here'])} of GPU {index}, and {format_gb(free)} are "
                    "free"
                )
    return ""


def format_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def copy_listening_socket(tree: Sequence[Process], port: int) -> int:
    """A copy of the socket on which a server listens: the number of an open file.

    Raises:
        OSError: there is none, or the kernel does not give it.
    """
    for process in tree:
        if process.role not in {Role.API, Role.LAUNCHER}:
            continue
        with suppress(psutil.Error):
            for one in psutil.Process(process.pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                    return copy_open_file(process.pid, one.fd)
    raise OSError(0, f"no process of it listens on port {port}")


def copy_open_file(pid: int, number: int) -> int:
    """A copy of another process's open file; raises OSError."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy: int = libc.syscall(PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return copy


def is_accepting_connections(tree: Sequence[Process]) -> bool:
    """Whether all API servers of a tree take connections, as their agents say."""
    apis = shutdown.select_by_role(tree, Role.API)
    answers = shutdown.collect_agent_answers(apis, lambda api: api.fetch_traffic().serves)
    return bool(apis) and all(answers)


def stop_accepting(tree: Sequence[Process]) -> bool:
    """Have all API servers of a tree take no more connections; False if one can't be told."""
    answers = shutdown.collect_agent_answers(
        shutdown.select_by_role(tree, Role.API),
        lambda api: api.set_draining(draining=False, leave=True),
    )
    return all(traffic and not traffic.serves for traffic in answers)


def drain_first_server(
    tree: Sequence[Process],
    seconds: float,
    report_progress: Callable[[str], None],
    should_stop_waiting: Callable[[], bool],
    environment: dict[str, str],
) -> str:
    """Have a server take no more connections, and finish what it has; what is cut off gets 503.

    Args:
        tree: its processes.
        seconds: how long to wait at most.
        report_progress: called with what is waited for.
        should_stop_waiting: whether to wait no longer.
        environment: of the server.

    Returns:
        What happened, in words.
    """
    with suppress(ValueError):
        quiet_s = SLACK_S + float(environment.get(KEEP_ALIVE) or KEEP_ALIVE_S)
    until, since, before = time.monotonic() + seconds + quiet_s, time.monotonic(), -1
    has_left = False
    tree = [process for process in tree if process.role in VITAL]
    while (
        time.monotonic() < until
        and not should_stop_waiting()
        and (tree := list(filter(is_alive, tree)))
    ):
        has_left = has_left or stop_accepting(tree)
        left, now = shutdown.count_in_flight(tree, None), count_started_requests(tree)
        if not has_left or left != 0 or now != before:
            since, before = time.monotonic(), now
        elif time.monotonic() - since > quiet_s:
            return "no request was lost"
        known = "an unknown number of requests" if left is None else format_count(left, "request")
        still = "" if has_left else ", and still takes connections: an agent does not answer"
        report_progress(f"the first server finishes {known}{still}")
        time.sleep(POLL_S)
    left = shutdown.count_in_flight(tree, None)
    shutdown.refuse_requests(tree, cut=True)
    return f"requests cut off: {'unknown' if left is None else left}" if left != 0 else ""


def count_started_requests(tree: Sequence[Process]) -> int:
    """How many requests its API servers have got so far."""
    answers = shutdown.collect_agent_answers(
        shutdown.select_by_role(tree, Role.API), lambda api: api.fetch_traffic().started_requests
    )
    return sum(count or 0 for count in answers)


def make_hand_over_error(name: str, reason: str) -> VllmopsError:
    return VllmopsError(
        "restart.no-hand-over",
        f"{name} was not handed over, and serves on: {reason}",
        f"vllmops restart {name} stops it first; vllmops logs {name} shows the server",
    )
