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


class Identity(NamedTuple):
    """One process, also after its pid is used again.

    Args:
        pid: process id.
        start_ticks: when it started, in clock ticks since boot: field 22 of ``/proc/PID/stat``.
        boot: the kernel's id of that boot; empty if the kernel has none.
    """

    pid: int
    start_ticks: int
    boot: str


def of(pid: int) -> Identity:
    """The process that has a pid now.

    Raises:
        ProcessLookupError: there is none, or it is hidden (proc's ``hidepid``).
        OSError: it can't be read, for example because no file can be opened.
    """
    return Identity(pid, int(stat(pid)[19]), boot_id())


def stat(pid: int | str) -> list[str]:
    """Fields 3 and on of ``/proc/PID/stat``, also of a thread, ``PID/task/TID``; raises as `of`."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, PermissionError) as error:
        raise ProcessLookupError(f"there is no process {pid} to be seen") from error


@cache
def boot_id() -> str:
    """The kernel's id of this boot of the machine, empty if it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def age_s(start_ticks: int) -> float:
    """The age of a process of this boot in seconds, by a clock that nobody sets."""
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / TICKS, 0.0)
