"""Shared-memory segments in ``/dev/shm``: whose they are, and sweeping those of the dead.

vLLM's processes share ``psm_*`` and other segments. Python's resource tracker unlinks them when
a server ends in order, and nobody does when it is killed (vLLM #51579, #54002).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

SHM = Path("/dev/shm")  # noqa: S108 - the kernel's own place
MAPPED = re.compile(rb" /dev/shm/([^\n]+?)(?: \(deleted\))?\n")


def used_by(pid: int) -> set[str]:
    """Names of the segments that a process maps or holds open; none if it can't be looked into."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names |= {os.fsdecode(n) for n in MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes())}
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = Path(os.readlink(descriptor.path).removesuffix(" (deleted)"))
                if target.is_relative_to(SHM) and target != SHM:
                    names.add(str(target.relative_to(SHM)))
    return names


def sweep(names: Iterable[str]) -> list[str]:
    """Remove those of the segments that no live process uses; returns what was removed.

    A segment with an owner other than us is left alone: its users may be out of our sight.
    """
    left = {name for name in names if owned(name)}
    for pid in psutil.pids() if left else ():
        left -= used_by(pid)
    removed = []
    for name in sorted(left):
        with contextlib.suppress(OSError):
            (SHM / name).unlink()
            removed.append(name)
    return removed


def owned(name: str) -> bool:
    # A folder there may be another user's, and become a link to anywhere.
    if "/" in name:
        return False
    try:
        return (SHM / name).lstat().st_uid == os.geteuid()
    except OSError:
        return False
