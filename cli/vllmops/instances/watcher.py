"""``vllmops watch`` for an instance: one at a time; it survives the death of the supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..files import take
from . import detached
from .record import Folder


def start(folder: Folder, words: Sequence[str], directory: str) -> None:
    """Start it, unless it runs; it writes to the instance's log, and ends with the instance.

    It holds a lock for as long as it lives, by which the next supervisor knows of it.

    Args:
        folder: the instance.
        words: what it is given.
        directory: where it runs, as what it is given may be relative to that; if it is still there.

    Raises:
        OSError: it can't be started, or the lock's file not be made.
    """
    lock = take(folder.watch_lock)
    if lock is None:
        return
    try:
        given = ("watch", "--supervised", "--target", folder.name, *words)
        there = directory if os.path.isdir(directory) else None
        detached.start("vllmops", given, [lock], directory=there)
    finally:
        os.close(lock)
