"""Repairs LRU caches from the agent's thread, while vLLM's threads use them, or spin in them.

Every change is made in one stretch in which no other thread runs, at a moment when none of them is
half-way through an operation on such a cache: a thread that spins in ``popitem()`` is between two
complete states most of the time. Only what was found is touched, and it is looked at anew before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from ..snapshots.repairs import CacheRepair, Change, Fault, ProcessRepair, Wish
from . import found, log
from .caches import at_once
from .identity import role

LOOKS, APART_S = 3, 0.05
# A thread waits so long for its turn before it takes it: far longer than a change lasts.
TURN_S = 0.05
ATTEMPTS, PAUSE_S = 100, 0.002
SHOWN = 5

# Where LRU caches are implemented: vLLM's class, the one below it, our patches of it.
MODULES = (
    "vllm.utils.cache",
    "cachetools",
    "vllmops.patches.mm_lru_ghost_keys",
    "vllmops.patches.mm_lru_stale_eviction",
)
# A thread in one of these has not begun to change anything, or is done with it, and does not
# iterate: the order may change under it.
RESTING = frozenset({"popitem", "pop", "__contains__", "order"})

T = TypeVar("T")


@dataclass
class Faults:
    """What is wrong with one cache.

    Args:
        keys: concerned, by fault.
        excess: bytes that the cache's size is above the sum of its entries.
    """

    keys: dict[Fault, list[Any]] = field(default_factory=dict)
    excess: float = 0

    def __bool__(self) -> bool:
        return bool(self.keys or self.excess)

    def both(self, other: Faults) -> Faults:
        """What two looks have in common."""
        keys = {}
        for fault, mine in self.keys.items():
            theirs = set(other.keys.get(fault, ()))
            if common := [key for key in mine if key in theirs]:
                keys[fault] = common
        return Faults(keys, self.excess if self.excess == other.excess else 0)

    def changes(self) -> list[Change]:
        told = [
            Change(fault=fault, count=len(keys), keys=[str(key) for key in keys[:SHOWN]])
            for fault, keys in self.keys.items()
        ]
        if self.excess:
            told.append(Change(fault=Fault.SIZE_SUM, count=self.excess))
        return told


def repair(wish: Wish) -> ProcessRepair:
    """Repair every LRU cache of this process that has a lasting fault."""
    began = time.perf_counter()
    repaired = []
    for holder in found.every("mm-cache"):
        cache = vars(holder).get("_cache")
        if cache is None:
            continue
        try:
            if wish.front_only is None:
                faults, mend = lasting(cache), mend_faults
            else:
                faults, mend = front_only(holder, cache, wish.front_only), drop
            if not faults:
                continue
            left = None if wish.dry_run else apply(cache, faults, mend)
        except Exception as error:
            faults, left = Faults(), f"it has a shape that is not known: {error!r}"
        name = type(holder).__name__
        side = "P1" if "Receiver" in name else "P0" if role() == "api" else role()
        each = CacheRepair(name=name, side=side, changes=faults.changes(), left=left)
        repaired.append(each)
        if not wish.dry_run:
            log.warning("vllmops: repaired %s", each)
    return ProcessRepair(
        pid=os.getpid(),
        role=role(),
        dry_run=wish.dry_run,
        caches=repaired,
        seconds=time.perf_counter() - began,
    )


def lasting(cache: Any) -> Faults:
    """What is wrong in several looks alike: the rest is an operation half-way through."""
    faults = look(cache)
    for _ in range(LOOKS - 1):
        if not faults:
            break
        time.sleep(APART_S)
        faults = faults.both(look(cache))
    return faults


def look(cache: Any) -> Faults:
    """What is wrong at this moment."""
    sized = cache._Cache__size
    own, order, data, sizes, pinned = at_once(
        (dict, vars(cache)),
        (list, cache._LRUCache__order),
        (dict, cache._Cache__data),
        (dict, {} if sized is None else sized),
        (list, cache.pinned_items),
    )
    ordered = frozenset(order)
    keys = {
        Fault.GHOST_KEYS: [key for key in order if key not in data],
        Fault.LOST_KEYS: [key for key in data if key not in ordered],
        Fault.UNSIZED: [] if sized is None else [key for key in data if key not in sizes],
        Fault.SIZED_ONLY: [key for key in sizes if key not in data],
        Fault.DEAD_PINS: [key for key in pinned if key not in data],
    }
    total = len(data) if sized is None else sum(sizes.values())
    return Faults(
        {fault: each for fault, each in keys.items() if each}, own["_Cache__currsize"] - total
    )


def front_only(holder: Any, cache: Any, keys: Iterable[str]) -> Faults:
    """Those of the front end's keys that it has."""
    if "Sender" not in type(holder).__name__:
        return Faults()
    held = [key for key in keys if key in cache._Cache__data]
    return Faults({Fault.FRONT_ONLY: held} if held else {})


def apply(cache: Any, faults: Faults, mend: Callable[[Any, Faults], None]) -> str | None:
    """Mend at a moment when nobody is in the middle of something; returns why not, if not."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs without a GIL: no moment can be had when nobody else runs"
    # Outside of the stretch below: it may take long, and calls vLLM's code.
    sizes = {
        key: cache.getsizeof(cache._Cache__data[key]) for key in faults.keys.get(Fault.UNSIZED, ())
    }

    def attempt() -> bool:
        if not resting():
            return False
        mend(cache, faults)
        for key, size in sizes.items():
            if key in cache._Cache__data:
                cache._Cache__size.setdefault(key, size)
        if mend is mend_faults:
            settle(cache)
        return True

    for _ in range(ATTEMPTS):
        if alone(attempt):
            return None
        time.sleep(PAUSE_S)
    return f"some thread was in the middle of an operation on it, {ATTEMPTS} times"


def alone(act: Callable[[], T]) -> T:
    """Run something short while no other thread runs.

    A thread that wants its turn waits one switch interval from when somebody else took theirs:
    with a long interval, and right after we took ours, that is more than `act` needs. `act` must
    not wait for anything, or it gives its turn away.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        time.sleep(PAUSE_S)
        return act()
    finally:
        sys.setswitchinterval(interval)


def resting() -> bool:
    """Whether no thread is in the middle of an operation on an LRU cache."""
    files = {module.__file__ for name in MODULES if (module := sys.modules.get(name)) is not None}
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


def mend_faults(cache: Any, faults: Faults) -> None:
    """Take away what is still wrong of what was found; called while no other thread runs."""
    order, data, sizes = cache._LRUCache__order, cache._Cache__data, cache._Cache__size
    for key in faults.keys.get(Fault.GHOST_KEYS, ()):
        if key not in data:
            order.pop(key, None)
    for key in faults.keys.get(Fault.LOST_KEYS, ()):
        if key in data and key not in order:
            # When it was used is not known; nobody has for longest is the safe guess.
            order[key] = None
            order.move_to_end(key, last=False)
    for key in faults.keys.get(Fault.SIZED_ONLY, ()):
        if key not in data:
            sizes.pop(key, None)
    for key in faults.keys.get(Fault.DEAD_PINS, ()):
        if key not in data:
            cache.pinned_items.discard(key)


def settle(cache: Any) -> None:
    """Make the cache's size the sum of its entries."""
    sizes = cache._Cache__size
    total = len(cache._Cache__data) if sizes is None else sum(sizes.values())
    if cache._Cache__currsize != total:
        cache._Cache__currsize = total


def drop(cache: Any, faults: Faults) -> None:
    """Remove entries as vLLM itself does when the engine misses one."""
    for key in faults.keys[Fault.FRONT_ONLY]:
        cache.pop(key, None)
