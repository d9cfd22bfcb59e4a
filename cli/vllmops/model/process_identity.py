"""Which process: a pid is used again, a pid with its start on one boot of the machine is not.

The start counts from the boot of the machine, as the kernel does. A start in seconds since the
epoch moves whenever somebody sets the clock, and then a live process looks like another one.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class ProcessIdentity(NamedTuple):
    """One process, also after its pid is used again.

    Args:
        pid: process id.
        start_ticks: when it started, in clock ticks since boot: field 22 of ``/proc/PID/stat``.
        boot: the kernel's id of that boot; empty if the kernel has none.
    """

    pid: int
    start_ticks: int
    boot: str


def read_identity(pid: int) -> ProcessIdentity:
    """The process that has a pid now.

    Raises:
        ProcessLookupError: there is none, or it is hidden (proc's ``hidepid``).
        OSError: it can't be read, for example because no file can be opened.
    """
    return ProcessIdentity(pid, int(read_stat_fields(pid)[19]), read_boot_id())


def read_stat_fields(pid: int | str) -> list[str]:
    """Fields 3 and on of ``/proc/PID/stat`` or ``PID/task/TID``; raises as `read_identity`."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, PermissionError) as error:
        raise ProcessLookupError(f"there is no process {pid} to be seen") from error


@cache
def read_boot_id() -> str:
    """The kernel's id of this boot of the machine, empty if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def compute_age_s(start_ticks: int) -> float:
    """The age of a process of this boot in seconds, by a clock that nobody sets."""
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS, 0.0)
