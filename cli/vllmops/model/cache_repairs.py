"""What an agent repaired."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .agent_state import AgentAnswer


class CacheDefect(StrEnum):
    """What can be repaired in an LRU cache."""

    GHOST_KEYS = "ghost keys"  # in the order, without data
    LOST_KEYS = "lost keys"  # data that is not in the order
    UNSIZED = "entries without a size"
    SIZED_ONLY = "sizes without data"
    SIZE_SUM = "size that is not the sum of the entries"
    DEAD_PINS = "pins without data"
    FRONT_ONLY = "entries that the engine does not have"


class CacheChange(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one cache.

    Args:
        defect: which.
        count: keys concerned; bytes where the size was wrong.
        keys: the first few of them.
    """

    defect: CacheDefect = msgspec.field(name="fault")
    count: float
    keys: list[str] = []


class CacheRepair(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one cache, and whether it was repaired.

    Args:
        name: the class of the cache.
        side: as in `LruCache`.
        changes: what was repaired; with ``dry_run`` what would be.
        reason: why it was not repaired; None if it was.
    """

    name: str
    side: str
    changes: list[CacheChange]
    reason: str | None = msgspec.field(default=None, name="left")


class ProcessRepair(AgentAnswer, frozen=True, kw_only=True):
    """The repair of one process's caches; those without a fault are left out.

    Args:
        pid: process id.
        role: as in `Hello`.
        dry_run: whether nothing was changed.
        seconds: the duration.
    """

    pid: int
    role: str
    dry_run: bool
    caches: list[CacheRepair]
    seconds: float


class RepairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to repair caches.

    Args:
        dry_run: find only.
        front_only: entries of the front end that the engine does not have: drop these, and look
            for nothing else.
    """

    dry_run: bool = False
    front_only: list[str] | None = None
