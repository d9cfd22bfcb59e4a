"""What the agent has cost this process, and what it has repaired in it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final

PREFIX: Final = "vllmops-"  # of the names of the agent's threads
NS: Final = 1e9

# By what was repaired: a cache, or one of the states that `heal` knows.
repairs: Counter[str] = Counter()
_ended: Counter[str] = Counter()
_lock = threading.Lock()


def wrap_with_cpu_accounting(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work of a short thread, whose CPU time is added to the agent's when it ends."""

    @wraps(work)
    def wrapper(*args: Any) -> None:
        try:
            work(*args)
        finally:
            with _lock:
                _ended["ns"] += time.thread_time_ns()

    return wrapper


def measure_cpu_s() -> float:
    """CPU seconds of the agent's threads so far."""
    spent = _ended["ns"]
    for thread in threading.enumerate():
        if thread.name.startswith(PREFIX):
            # A clock of a thread that has just ended would crash the process; its file is gone.
            with suppress(OSError, ValueError, IndexError):
                path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
                spent += int(path.read_text().split()[0])
    return spent / NS
