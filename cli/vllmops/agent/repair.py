"""Repairs LRU caches from the agent's thread, while vLLM's threads use them or spin in them.

All changes happen in one stretch in which no other thread runs, at a moment when no thread is in
the middle of an operation on such a cache: a thread that spins in ``popitem()`` is between two
complete states most of the time. Only keys with a fault are changed, and each is checked again
first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from ..protocol.repairs import CacheRepair, Change, Fault, ProcessRepair, RepairRequest
from . import account, objects
from .adapters import places
from .caches import lru, side
from .identity import here
from .log import log

LOOKS, APART_S = 3, 0.05
# The switch interval during a change: far longer than a change takes.
TURN_S = 0.05
ATTEMPTS, PAUSE_S = 100, 0.002
SHOWN = 5

# The modules that implement LRU caches beside vLLM's: its base class, and the patches.
MODULES = (
    "cachetools",
    "vllmops.agent.patches.mm_lru_ghost_keys",
    "vllmops.agent.patches.mm_lru_stale_eviction",
)
# Functions in which a thread does not change or iterate over a cache right now, so that the order
# may change.
RESTING = frozenset({"popitem", "pop", "__contains__", "order"})

T = TypeVar("T")


@dataclass
class Faults:
    """The faults of one cache.

    Args:
        keys: the affected keys, by fault.
        excess: bytes by which the cache's size exceeds the sum of its entries.
    """

    keys: dict[Fault, list[Any]] = field(default_factory=dict)
    excess: float = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.excess)

    def both(self, other: Faults) -> Faults:
        """The faults that two looks have in common."""
        keys = {}
        for fault, mine in self.keys.items():
            theirs = set(other.keys.get(fault, ()))
            if common := [key for key in mine if key in theirs]:
                keys[fault] = common
        return Faults(keys, self.excess if self.excess == other.excess else 0)

    def changes(self) -> list[Change]:
        changes = [
            Change(fault=fault, count=len(keys), keys=[str(key) for key in keys[:SHOWN]])
            for fault, keys in self.keys.items()
        ]
        if self.excess:
            changes.append(Change(fault=Fault.SIZE_SUM, count=self.excess))
        return changes


def repair(request: RepairRequest) -> ProcessRepair:
    """Repair every LRU cache of this process that has a lasting fault."""
    began = time.perf_counter()
    repaired = []
    for holder in objects.every("mm-cache"):
        cache = vars(holder).get("_cache")
        if cache is None:
            continue
        try:
            if request.front_only is None:
                faults = lasting(holder)
            else:
                faults = front_only(holder, cache, request.front_only)
            if not faults:
                continue
            left = None if request.dry_run else apply(cache, faults)
        except Exception as error:
            faults, left = Faults(), f"it has an unknown shape: {error!r}"
        change = CacheRepair(
            name=type(holder).__name__, side=side(holder), changes=faults.changes(), left=left
        )
        repaired.append(change)
        if left is not None:
            log.warning("vllmops: could not repair %s", change)
        elif not request.dry_run:
            account.repairs["cache"] += 1
            log.warning("vllmops: repaired %s", change)
    return ProcessRepair(
        pid=os.getpid(),
        **here(),
        dry_run=request.dry_run,
        caches=repaired,
        seconds=time.perf_counter() - began,
    )


def lasting(holder: Any) -> Faults:
    """The faults that several looks have in common: others are unfinished operations."""
    faults = look(holder)
    for _ in range(LOOKS - 1):
        if not faults:
            break
        time.sleep(APART_S)
        faults = faults.both(look(holder))
    return faults


def look(holder: Any) -> Faults:
    """The faults at this moment."""
    cache = lru(holder)
    keys = {
        Fault.GHOST_KEYS: cache.order_only,
        Fault.LOST_KEYS: cache.data_only,
        Fault.UNSIZED: cache.unsized,
        Fault.SIZED_ONLY: cache.sized_only,
        Fault.DEAD_PINS: cache.pinned_only,
    }
    total = cache.entries if cache.sum_bytes is None else cache.sum_bytes
    return Faults({fault: found for fault, found in keys.items() if found}, cache.bytes - total)


def front_only(holder: Any, cache: Any, keys: Iterable[str]) -> Faults:
    """The given keys that the front end's cache has."""
    if "Sender" not in type(holder).__name__:
        return Faults()
    held = [key for key in keys if key in cache._Cache__data]
    return Faults({Fault.FRONT_ONLY: held} if held else {})


def apply(cache: Any, faults: Faults) -> str | None:
    """Repair a cache at a moment when no thread uses it; returns the reason if it can't."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs without a GIL, so other threads can't be held"
    # Before the stretch without other threads: it calls vLLM's code and may take long.
    unsized = faults.keys.get(Fault.UNSIZED, ())
    sizes = {key: cache.getsizeof(cache._Cache__data[key]) for key in unsized}

    def attempt() -> bool:
        if not resting():
            return False
        fix(cache, faults, sizes)
        return True

    for _ in range(ATTEMPTS):
        if alone(attempt):
            return None
        time.sleep(PAUSE_S)
    return f"a thread was using the cache in each of {ATTEMPTS} attempts"


def alone(act: Callable[[], T]) -> T:
    """Run something short while no other thread runs.

    A thread that waits for the GIL gets it one switch interval after the current thread took it.
    With a long interval, and right after this thread took the GIL, that is more than `act` needs.
    `act` must not block: that releases the GIL.
    """
    # The interval is global: a second caller would restore the long one as if it were the usual.
    with _turn:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            time.sleep(PAUSE_S)
            return act()
        finally:
            sys.setswitchinterval(interval)


_turn = threading.Lock()
# A child forked meanwhile would keep the long interval and the lock.
os.register_at_fork(
    before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release
)


def resting() -> bool:
    """Whether no thread is in the middle of an operation on an LRU cache."""
    names = (*MODULES, places.where("lru") or "")
    files = {module.__file__ for name in names if (module := sys.modules.get(name)) is not None}
    own = sys._getframe()
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None and frame is not own:
            if frame.f_code.co_filename in files:
                if frame.f_code.co_name not in RESTING:
                    return False
                break
            frame = frame.f_back
    return True


def fix(cache: Any, faults: Faults, missing: Mapping[Any, float]) -> None:
    """Fix the faults that are still present; called while no other thread runs.

    Args:
        cache: vLLM's.
        faults: those found before.
        missing: the sizes of the entries that had none.
    """
    order, data, sizes = cache._LRUCache__order, cache._Cache__data, cache._Cache__size
    for key in faults.keys.get(Fault.GHOST_KEYS, ()):
        if key not in data:
            order.pop(key, None)
    for key in faults.keys.get(Fault.LOST_KEYS, ()):
        if key in data and key not in order:
            # Its last use is unknown; treating it as the oldest is safe.
            order[key] = None
            order.move_to_end(key, last=False)
    for key in faults.keys.get(Fault.SIZED_ONLY, ()):
        if key not in data:
            sizes.pop(key, None)
    for key in faults.keys.get(Fault.DEAD_PINS, ()):
        if key not in data:
            cache.pinned_items.discard(key)
    for key, size in missing.items():
        if key in data:
            sizes.setdefault(key, size)
    for key in faults.keys.get(Fault.FRONT_ONLY, ()):
        cache.pop(key, None)  # as vLLM itself does when the engine misses one
    if faults.excess or faults.keys.keys() & {Fault.SIZED_ONLY, Fault.UNSIZED}:
        cache._Cache__currsize = len(data) if sizes is None else sum(sizes.values())
