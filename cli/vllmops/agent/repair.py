"""Repairs LRU caches from the agent's thread, while vLLM's threads use them, or spin in them.

Every change is made in one stretch in which no other thread runs, at a moment when none of them is
half-way through an operation on such a cache: a thread that spins in ``popitem()`` is between two
complete states most of the time. Only what was found is touched, and it is looked at anew before.
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
from . import objects
from .caches import lru, side
from .identity import role
from .log import log

LOOKS, APART_S = 3, 0.05
# A thread waits so long for its turn before it takes it: far longer than a change lasts.
TURN_S = 0.05
ATTEMPTS, PAUSE_S = 100, 0.002
SHOWN = 5

# Where LRU caches are implemented: vLLM's class, the one below it, our patches of it.
MODULES = (
    "vllm.utils.cache",
    "cachetools",
    "vllmops.agent.patches.mm_lru_ghost_keys",
    "vllmops.agent.patches.mm_lru_stale_eviction",
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
            faults, left = Faults(), f"it has a shape that is not known: {error!r}"
        each = CacheRepair(
            name=type(holder).__name__, side=side(holder), changes=faults.changes(), left=left
        )
        repaired.append(each)
        if not request.dry_run:
            log.warning("vllmops: repaired %s", each)
    return ProcessRepair(
        pid=os.getpid(),
        role=role(),
        dry_run=request.dry_run,
        caches=repaired,
        seconds=time.perf_counter() - began,
    )


def lasting(holder: Any) -> Faults:
    """What is wrong in several looks alike: the rest is an operation half-way through."""
    faults = look(holder)
    for _ in range(LOOKS - 1):
        if not faults:
            break
        time.sleep(APART_S)
        faults = faults.both(look(holder))
    return faults


def look(holder: Any) -> Faults:
    """What is wrong at this moment."""
    cache = lru(holder)
    keys = {
        Fault.GHOST_KEYS: cache.order_only,
        Fault.LOST_KEYS: cache.data_only,
        Fault.UNSIZED: cache.unsized,
        Fault.SIZED_ONLY: cache.sized_only,
        Fault.DEAD_PINS: cache.pinned_only,
    }
    total = cache.entries if cache.sum_bytes is None else cache.sum_bytes
    return Faults({fault: each for fault, each in keys.items() if each}, cache.bytes - total)


def front_only(holder: Any, cache: Any, keys: Iterable[str]) -> Faults:
    """Those of the front end's keys that it has."""
    if "Sender" not in type(holder).__name__:
        return Faults()
    held = [key for key in keys if key in cache._Cache__data]
    return Faults({Fault.FRONT_ONLY: held} if held else {})


def apply(cache: Any, faults: Faults) -> str | None:
    """Mend at a moment when nobody is in the middle of something; returns why not, if not."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python runs without a GIL: no moment can be had when nobody else runs"
    # Outside of the stretch below: it may take long, and calls vLLM's code.
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
    return f"some thread was in the middle of an operation on it, {ATTEMPTS} times"


def alone(act: Callable[[], T]) -> T:
    """Run something short while no other thread runs.

    A thread that wants its turn waits one switch interval from when somebody else took theirs:
    with a long interval, and right after we took ours, that is more than `act` needs. `act` must
    not wait for anything, or it gives its turn away.
    """
    # The interval is the whole process's: a second caller would take the long one for the usual.
    with _turn:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        try:
            time.sleep(PAUSE_S)
            return act()
        finally:
            sys.setswitchinterval(interval)


_turn = threading.Lock()
# A child that is forked in between would keep the long interval, and the lock.
os.register_at_fork(
    before=_turn.acquire, after_in_parent=_turn.release, after_in_child=_turn.release
)


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


def fix(cache: Any, faults: Faults, missing: Mapping[Any, float]) -> None:
    """Take away what is still wrong of what was found; called while no other thread runs.

    Args:
        cache: vLLM's.
        faults: what was found.
        missing: the sizes of entries that had none.
    """
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
    for key, size in missing.items():
        if key in data:
            sizes.setdefault(key, size)
    for key in faults.keys.get(Fault.FRONT_ONLY, ()):
        cache.pop(key, None)  # as vLLM itself does when the engine misses one
    if faults.excess or faults.keys.keys() & {Fault.SIZED_ONLY, Fault.UNSIZED}:
        cache._Cache__currsize = len(data) if sizes is None else sum(sizes.values())
