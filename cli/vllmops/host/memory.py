"""The memory of this machine, or of a process's control group."""

from __future__ import annotations

from pathlib import Path

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
    """The memory limit of a process's control groups and what is left, in bytes; None without one.

    A limit may stand at any group above it, such as that of a pod or a slice.
    """
    group = proc.cgroup(pid) if pid else None
    limits = [found for each in (group, *group.parents) if (found := limit(each))] if group else []
    if not limits:
        return None
    return min(most for most, _ in limits), min(left for _, left in limits)


def limit(group: Path) -> tuple[int, int] | None:
    """A control group's memory limit and what is left of it, in bytes; None without a limit.

    Inactive page cache counts as left, because the kernel drops it first.
    """
    try:
        most = proc.text(group / "memory.max").strip()
        used = int(proc.text(group / "memory.current"))
        stat = dict(line.split() for line in proc.text(group / "memory.stat").splitlines())
    except (OSError, ValueError):
        return None
    if not most.isdigit():
        return None
    return int(most), int(most) - used + int(stat.get("inactive_file", 0))
