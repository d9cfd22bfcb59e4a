"""``vllmops watch`` for an instance: one at a time; it survives the death of the supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ..files import take
from .record import Folder


def start(folder: Folder, words: Sequence[str]) -> None:
    """Start it, unless it runs; it writes to the instance's log, and ends with the instance.

    It holds a lock for as long as it lives, by which the next supervisor knows of it.

    Args:
        folder: the instance.
        words: what it is given.

    Raises:
        OSError: it can't be started, or the lock's file not be made.
    """
    lock = take(folder.watch_lock)
    if lock is None:
        return
    try:
        subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "vllmops", "watch"),
                *("--supervised", "--target", folder.name, *words),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
        )
    finally:
        os.close(lock)
