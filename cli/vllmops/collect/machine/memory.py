"""The memory of this machine, or of a process's control group."""

from __future__ import annotations

from pathlib import Path

import psutil

from . import proc


def read_available_memory(pid: int | None) -> tuple[int, int]:
    """The memory that a process can have, and what is left of it, in bytes."""
    free = psutil.virtual_memory()
    total, available = free.total, free.available
    if limit := find_cgroup_limit_and_available(pid):
        total, available = min(total, limit[0]), min(available, limit[1])
    return total, available


def find_cgroup_limit_and_available(pid: int | None) -> tuple[int, int] | None:
    """The memory limit of a process's control groups and what is left, in bytes; None without one.

    A limit may stand at any group above it, such as that of a pod or a slice.
    """
    group = proc.find_cgroup(pid) if pid else None
    limits = (
        [found for each in (group, *group.parents) if (found := read_cgroup_limit(each))]
        if group
        else []
    )
    if not limits:
        return None
    return min(most for most, _ in limits), min(left for _, left in limits)


def read_cgroup_limit(group: Path) -> tuple[int, int] | None:
    """A control group's memory limit and what is left of it, in bytes; None without a limit.

    Inactive page cache counts as left, because the kernel drops it first.
    """
    try:
        most = proc.read_lossy_text(group / "memory.max").strip()
        used = int(proc.read_lossy_text(group / "memory.current"))
        stat = dict(
            line.split() for line in proc.read_lossy_text(group / "memory.stat").splitlines()
        )
    except (OSError, ValueError):
        return None
    if not most.isdigit():
        return None
    return int(most), int(most) - used + int(stat.get("inactive_file", 0))
