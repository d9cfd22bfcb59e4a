"""The identity of this process."""

from __future__ import annotations

import multiprocessing
import os
import time
from functools import cache

from ..protocol import identity
from ..protocol.identity import Identity

# By the prefixes of vLLM's process names; any other process is the front end.
ROLES = {"EngineCore": "engine", "VllmWorker": "worker", "Worker": "worker"}


def role() -> str:
    """The role of this process by its name: ``api``, ``engine`` or ``worker``."""
    name = multiprocessing.current_process().name
    return next((role for prefix, role in ROLES.items() if name.startswith(prefix)), "api")


def own() -> Identity:
    """The identity of this process, also right after a fork."""
    return known(os.getpid())


@cache
def known(pid: int) -> Identity:
    return identity.of(pid)


def create_time() -> float:
    """When this process started, in seconds since the epoch by the current clock."""
    return time.time() - identity.age_s(own().start_ticks)
