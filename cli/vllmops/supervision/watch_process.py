"""``vllmops watch`` for an instance: one at a time; it survives the death of the supervisor."""

from __future__ import annotations

import os

from ..servers import detached_process
from ..servers.record import InstanceFolder
from ..support.files import lock_file


def start_watch(folder: InstanceFolder, directory: str) -> None:
    """Start it, unless it runs; it writes to the instance's log, and ends with the instance.

    It holds a lock for as long as it lives, by which the next supervisor knows of it.

    Args:
        folder: the instance.
        directory: where it runs, as what the record has for it may be relative to that; if it is
            still there.

    Raises:
        OSError: it can't be started, or the lock's file not be made.
    """
    lock = lock_file(folder.watch_lock)
    if lock is None:
        return
    try:
        there = directory if os.path.isdir(directory) else None
        given = ("watch", "--supervised", folder.name)
        detached_process.start_detached("vllmops", given, [lock], directory=there)
    finally:
        os.close(lock)
