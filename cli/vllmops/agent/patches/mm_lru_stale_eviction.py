"""``LRUCache.popitem()`` spins on a stale key, whatever its origin (see vLLM #43595)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from types import ModuleType
from typing import Any, Final

from .patch import Patch

NOTHING: Final = object()


def has_defect(module: ModuleType) -> bool:
    # The stale key comes first: behind a real one, eviction would not meet it.
    cache = module.LRUCache(2)
    cache["real"] = 1
    cache._LRUCache__order["ghost"] = None
    cache._LRUCache__order.move_to_end("ghost", last=False)
    return bool(cache.popitem() != ("real", 1))


def apply_patch(module: ModuleType) -> None:
    module.LRUCache.popitem = popitem


def popitem(self: Any, remove_pinned: bool = False) -> tuple[Hashable, Any]:
    """Remove and return the least recently used pair, and any stale keys before it.

    Raises:
        RuntimeError: all keys are pinned, or the cache is empty.
        StopIteration: the cache is empty, with `remove_pinned`: as in vLLM.
    """
    order, data = self._LRUCache__order, self._Cache__data
    while (key := find_removable_key(order, self.pinned_items, remove_pinned)) not in data:
        if key is NOTHING:
            # A key with data and no place in the order would stay forever.
            key = find_removable_key(data, self.pinned_items, remove_pinned)
            if key is NOTHING:
                if remove_pinned:
                    raise StopIteration
                raise RuntimeError("All items are pinned, cannot remove oldest from the cache.")
            order[key] = None
            break
        order.pop(key, None)
    return key, self.pop(key)


def find_removable_key(
    keys: Iterable[Hashable], pinned_keys: set[Hashable], remove_pinned: bool
) -> Hashable:
    """The first key that may be removed, `NOTHING` where there is none."""
    for key in keys:
        if remove_pinned or key not in pinned_keys:
            return key
    return NOTHING


PATCH = Patch(
    id="mm-lru-stale-eviction",
    upstream="https://github.com/vllm-project/vllm/pull/43595",
    title="LRUCache.popitem() spins on a key without data",
    hit="Servers with a stale key in an LRU order, whatever its origin: the eviction that meets "
    "it never ends, and neither does a cache reset. In every vLLM up to 0.33: upstream fixed "
    "one cause of such keys, not the eviction.",
    changes="LRUCache.popitem() drops stale keys and continues with a real one, as the pull "
    "request's first version did; a key without a place in the order can be evicted again.",
    modules=("vllm.utils.cache",),
    present=has_defect,
    apply=apply_patch,
)
