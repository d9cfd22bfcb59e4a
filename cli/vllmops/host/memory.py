"""The memory of this machine, or of a process's control group."""

from __future__ import annotations

import psutil

from . import proc


def room(pid: int | None) -> tuple[int, int]:
    """The memory that a process can have, and what is left of it, in bytes."""
    free = psutil.virtual_memory()
    total, available = free.total, free.available
    if limit := container(pid):
        total, available = min(total, limit[0]), min(available, limit[1])
    return total, available


def container(pid: int | None) -> tuple[int, int] | None:
    """A control group's memory limit and what is left of it, in bytes; None without a limit.

    Inactive page cache counts as left, because the kernel drops it first.
    """
    group = proc.cgroup(pid) if pid else None
    if group is None:
        return None
    try:
        limit = proc.text(group / "memory.max").strip()
        used = int(proc.text(group / "memory.current"))
        stat = dict(line.split() for line in proc.text(group / "memory.stat").splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return int(limit), int(limit) - used + int(stat.get("inactive_file", 0))
