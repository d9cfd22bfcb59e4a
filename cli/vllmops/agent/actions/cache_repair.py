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

from ...model.cache_repairs import (
    CacheChange,
    CacheDefect,
    CacheRepair,
    ProcessRepair,
    RepairRequest,
)
from .. import cost
from ..hooks import vllm_objects
from ..identity import make_process_fields
from ..log import log
from ..state.caches import find_cache_side, observe_lru_cache
from ..versions import module_locations

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
class CacheFaults:
    """The faults of one cache.

    Args:
        keys: the affected keys, by fault.
        excess: bytes by which the cache's size exceeds the sum of its entries.
    """

    keys: dict[CacheDefect, list[Any]] = field(default_factory=dict)
    excess: float = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.excess)

    def intersect(self, other_faults: CacheFaults) -> CacheFaults:
        """The faults that two looks have in common."""
        keys = {}
        for fault, mine in self.keys.items():
            theirs = set(other_faults.keys.get(fault, ()))
            if common := [key for key in mine if key in theirs]:
                keys[fault] = common
        return CacheFaults(keys, self.excess if self.excess == other_faults.excess else 0)

    def list_changes(self) -> list[CacheChange]:
        changes = [
            CacheChange(defect=fault, count=len(keys), keys=[str(key) for key in keys[:SHOWN]])
            for fault, keys in self.keys.items()
        ]
        if self.excess:
            changes.append(CacheChange(defect=CacheDefect.SIZE_SUM, count=self.excess))
        return changes


def repair_caches(request: RepairRequest) -> ProcessRepair:
    """Repair every LRU cache of this process that has a lasting fault."""
    began = time.perf_counter()
    repaired = []
    for holder in vllm_objects.list_objects("mm-cache"):
        cache = vars(holder).get("_cache")
        if cache is None:
            continue
        try:
            if request.front_only is None:
                faults = find_lasting_faults(holder)
            else:
                faults = find_front_only_keys(holder, cache, request.front_only)
            if not faults:
                continue
            left = None if request.dry_run else repair_cache(cache, faults)
        except Exception as error:
            faults, left = CacheFaults(), f"it has an unknown shape: {error!r}"
        change = CacheRepair(
            name=type(holder).__name__,
            side=find_cache_side(holder),
            changes=faults.list_changes(),
            reason=left,
        )
        repaired.append(change)
        if left is not None:
            log.warning("vllmops: could not repair %s", change)
        elif not request.dry_run:
            cost.repairs["cache"] += 1
            log.warning("vllmops: repaired %s", change)
    return ProcessRepair(
        pid=os.getpid(),
        **make_process_fields(),
        dry_run=request.dry_run,
        caches=repaired,
        seconds=time.perf_counter() - began,
    )


def find_lasting_faults(holder: Any) -> CacheFaults:
    """The faults that several looks have in common: others are unfinished operations."""
    faults = find_faults(holder)
    for _ in range(LOOKS - 1):
        if not faults:
            break
        time.sleep(APART_S)
        faults = faults.intersect(find_faults(holder))
    return faults


def find_faults(holder: Any) -> CacheFaults:
    """The faults at this moment."""
    cache = observe_lru_cache(holder)
    keys = {
        CacheDefect.GHOST_KEYS: cache.order_only,
        CacheDefect.LOST_KEYS: cache.data_only,
        CacheDefect.UNSIZED: cache.unsized,
        CacheDefect.SIZED_ONLY: cache.sized_only,
        CacheDefect.DEAD_PINS: cache.pinned_only,
    }
    total = cache.entries if cache.sum_bytes is None else cache.sum_bytes
    return CacheFaults(
        {fault: found for fault, found in keys.items() if found}, cache.bytes - total
    )


def find_front_only_keys(holder: Any, cache: Any, keys: Iterable[str]) -> CacheFaults:
    """The given keys that the front end's cache has."""
    if "Sender" not in type(holder).__name__:
        return CacheFaults()
    held = [key for key in keys if key in cache._Cache__data]
    return CacheFaults({CacheDefect.FRONT_ONLY: held} if held else {})


def repair_cache(cache: Any, faults: CacheFaults) -> str | None:
    """Repair a cache at a moment when no thread uses it; returns the reason if it can't."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs without a GIL, so other threads can't be held"
    # Before the stretch without other threads: it calls vLLM's code and may take long.
    unsized = faults.keys.get(CacheDefect.UNSIZED, ())
    sizes = {key: cache.getsizeof(cache._Cache__data[key]) for key in unsized}

    def fix_if_resting() -> bool:
        if not are_caches_idle():
            return False
        fix_faults(cache, faults, sizes)
        return True

    for _ in range(ATTEMPTS):
        if run_exclusively(fix_if_resting):
            return None
        time.sleep(PAUSE_S)
    return f"a thread was using the cache in each of {ATTEMPTS} attempts"


def run_exclusively(action: Callable[[], T]) -> T:
    """Run something short while no other thread runs.

    A thread that waits for the GIL gets it one switch interval after the current thread took it.
    With a long interval, and right after this thread took the GIL, that is more than `action`
    needs. `action` must not block: that releases the GIL.
    """
    # The interval is global: a second caller would restore the long one as if it were the usual.
    with _turn:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            time.sleep(PAUSE_S)
            return action()
        finally:
            sys.setswitchinterval(interval)


_turn = threading.Lock()
# A child forked meanwhile would keep the long interval and the lock.
os.register_at_fork(
    before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release
)


def are_caches_idle() -> bool:
    """Whether no thread is in the middle of an operation on an LRU cache."""
    names = (*MODULES, module_locations.find_symbol_module("lru") or "")
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


def fix_faults(cache: Any, faults: CacheFaults, missing: Mapping[Any, float]) -> None:
    """Fix the faults that are still present; called while no other thread runs.

    Args:
        cache: vLLM's.
        faults: those found before.
        missing: the sizes of the entries that had none.
    """
    order, data, sizes = cache._LRUCache__order, cache._Cache__data, cache._Cache__size
    for key in faults.keys.get(CacheDefect.GHOST_KEYS, ()):
        if key not in data:
            order.pop(key, None)
    for key in faults.keys.get(CacheDefect.LOST_KEYS, ()):
        if key in data and key not in order:
            # Its last use is unknown; treating it as the oldest is safe.
            order[key] = None
            order.move_to_end(key, last=False)
    for key in faults.keys.get(CacheDefect.SIZED_ONLY, ()):
        if key not in data:
            sizes.pop(key, None)
    for key in faults.keys.get(CacheDefect.DEAD_PINS, ()):
        if key not in data:
            cache.pinned_items.discard(key)
    for key, size in missing.items():
        if key in data:
            sizes.setdefault(key, size)
    for key in faults.keys.get(CacheDefect.FRONT_ONLY, ()):
        cache.pop(key, None)  # as vLLM itself does when the engine misses one
    if faults.excess or faults.keys.keys() & {CacheDefect.SIZED_ONLY, CacheDefect.UNSIZED}:
        cache._Cache__currsize = len(data) if sizes is None else sum(sizes.values())
