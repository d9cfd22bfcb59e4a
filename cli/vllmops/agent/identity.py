"""Which process this is."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import cache
from pathlib import Path

# By the names that vLLM gives its processes; whatever has none is the front end.
ROLES = {"EngineCore": "engine", "VllmWorker": "worker", "Worker": "worker"}


def role() -> str:
    """What this process takes itself for: ``api``, ``engine`` or ``worker``."""
    name = multiprocessing.current_process().name
    return next((role for prefix, role in ROLES.items() if name.startswith(prefix)), "api")


def create_time() -> float:
    """When this process started, in seconds since the epoch.

    Computed anew each time, as psutil does: both follow when the machine's clock is set.
    """
    booted = int(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    return booted + start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")


@cache
def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine did."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
