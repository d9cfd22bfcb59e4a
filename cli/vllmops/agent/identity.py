"""Which process this is."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import cache

from ..protocol import identity
from ..protocol.identity import Identity

# By the names that vLLM gives its processes; whatever has none is the front end.
ROLES = {"EngineCore": "engine", "VllmWorker": "worker", "Worker": "worker"}


def role() -> str:
    """What this process takes itself for: ``api``, ``engine`` or ``worker``."""
    name = multiprocessing.current_process().name
    return next((role for prefix, role in ROLES.items() if name.startswith(prefix)), "api")


def own() -> Identity:
    """Which process this is, also in a fork."""
    return known(os.getpid())


@cache
def known(pid: int) -> Identity:
    return identity.of(pid)


def create_time() -> float:
    """When this process started, in seconds since the epoch, by the clock as it is set now."""
    return time.time() - identity.age_s(own().start_ticks)
