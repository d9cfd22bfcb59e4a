"""``LRUCache.touch()`` of a missing key leaves it in the LRU order (vLLM #43595)."""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

from .patch import Patch


def has_defect(module: ModuleType) -> bool:
    cache = module.LRUCache(2)
    cache.touch("ghost")
    return "ghost" in cache._LRUCache__order


def apply_patch(module: ModuleType) -> None:
    module.LRUCache.touch = touch


def touch(self: Any, key: Hashable) -> None:
    """Make a key the newest; a key without data stays out of the order."""
    if key in self._Cache__data:
        order = self._LRUCache__order
        try:
            order.move_to_end(key)
        except KeyError:
            # The key has data and no place in the order, so it could never be evicted.
            order[key] = None


PATCH = Patch(
    id="mm-lru-ghost-keys",
    upstream="https://github.com/vllm-project/vllm/pull/43595",
    title="LRUCache.touch() of a missing key leaves a ghost in the LRU order",
    hit="Servers of images, audio or video: each cache miss touches before it inserts. When "
    "eviction meets the ghost, the thread spins forever: EngineCore accepts no requests any "
    "more, and /health still answers 200. In vLLM up to 0.23.",
    changes="LRUCache.touch() ignores missing keys, as in vLLM 0.24.",
    modules=("vllm.utils.cache",),
    present=has_defect,
    apply=apply_patch,
)
