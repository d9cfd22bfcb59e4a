"""What the patches cost: vLLM's LRUCache with and without them, and a repair of a large one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.modules import locate_installed_vllm, lru_module

from vllmops.agent.actions import cache_repair
from vllmops.agent.hooks import vllm_objects
from vllmops.agent.patches import mm_lru_ghost_keys, mm_lru_stale_eviction
from vllmops.model.cache_repairs import RepairRequest

from .figure import Figure, Limit, interleave_measurements, medians
from .setting import Setting

ENTRIES, GHOSTS = 100_000, 1_000
OPERATIONS = 20_000
PATCHED = ("touch", "popitem")


def measure(setting: Setting) -> Iterator[Figure]:
    rounds = 4 if setting.short else 40
    module = lru_module(locate_installed_vllm())
    stock = {name: vars(module.LRUCache)[name] for name in PATCHED}
    for patch in (mm_lru_ghost_keys, mm_lru_stale_eviction):
        patch.apply_patch(module)
    patched = {name: vars(module.LRUCache)[name] for name in PATCHED}
    cache = make_full_cache(module)
    for name, operate in OPERATE.items():
        targets = {
            "stock": partial(measure_operations, operate, cache, stock),
            "patched": partial(measure_operations, operate, cache, patched),
            "again": partial(measure_operations, operate, cache, stock),
        }
        of = medians(interleave_measurements(rounds, targets))
        yield Figure(
            f"LRUCache {name}, {ENTRIES:,} entries, patched",
            "s",
            of["patched"],
            "stock",
            of["stock"],
            Limit(3) if setting.short else Limit(1.05),
            rounds,
            control=of["again"],
        )
    holder = Receiver(_cache=cache)
    vllm_objects.track_object("mm-cache", holder)
    for number in range(GHOSTS):
        cache._LRUCache__order[f"ghost{number}"] = None
    began = time.perf_counter()
    (done,) = cache_repair.repair_caches(RepairRequest()).caches
    took = time.perf_counter() - began
    if done.reason or done.changes[0].count != GHOSTS:
        raise RuntimeError(f"not repaired: {done}")
    looks = cache_repair.LOOKS * cache_repair.APART_S
    yield Figure(
        f"cache repair, {ENTRIES:,} entries, {GHOSTS:,} ghost keys",
        "s",
        took,
        "its pauses",
        looks,
        Limit(0, 5 if setting.short else 1),
        1,
    )


class Receiver(SimpleNamespace):
    """Stands in for what holds the cache in vLLM."""


def make_full_cache(module: ModuleType) -> Any:
    """A cache that is full."""
    cache = module.LRUCache(ENTRIES, getsizeof=lambda _: 1)
    for number in range(ENTRIES):
        cache[f"{number:064}"] = number
    return cache


def measure_operations(
    operate: Callable[[Any, list[str]], None], cache: Any, methods: dict[str, Any]
) -> float:
    """Seconds for some operations on the same cache, with the one or the other methods."""
    for name, method in methods.items():
        setattr(type(cache), name, method)
    keys = list(cache._LRUCache__order)[:OPERATIONS]
    began = time.perf_counter()
    operate(cache, keys)
    return time.perf_counter() - began


def touch(cache: Any, keys: list[str]) -> None:
    for key in keys:
        cache.touch(key)


def get(cache: Any, keys: list[str]) -> None:
    for key in keys:
        cache.get(key)


def put(cache: Any, keys: list[str]) -> None:
    for key in keys:
        cache.put(key, 1)


def evict(cache: Any, keys: list[str]) -> None:
    """Each insertion evicts one."""
    for key in keys:
        cache.put(f"{key[:64]}{time.perf_counter_ns()}", 1)


OPERATE = {"touch": touch, "get": get, "put": put, "eviction": evict}
