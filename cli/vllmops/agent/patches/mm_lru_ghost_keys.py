"""``LRUCache.touch()`` of a key that is not there leaves it in the LRU order (vLLM #43595)."""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import Any

from .patch import Patch


def present(module: ModuleType) -> bool:
    cache = module.LRUCache(2)
    cache.touch("ghost")
    return "ghost" in cache._LRUCache__order


def apply(module: ModuleType) -> None:
    module.LRUCache.touch = touch


def touch(self: Any, key: Hashable) -> None:
    """Make a key the newest; one that has no data is left out of the order."""
    if key in self._Cache__data:
        order = self._LRUCache__order
        try:
            order.move_to_end(key)
        except KeyError:
            # It had lost its place, and could not have been evicted any more.
            order[key] = None


PATCH = Patch(
    id="mm-lru-ghost-keys",
    upstream="https://github.com/vllm-project/vllm/pull/43595",
    title="LRUCache.touch() of a missing key leaves a ghost in the LRU order",
    hit="Whoever serves images, audio or video: each cache miss touches before it inserts. Once "
    "eviction meets the ghost, the thread spins for ever: EngineCore takes no request any more, "
    "and /health goes on answering 200. In vLLM up to 0.23.",
    changes="LRUCache.touch() leaves missing keys alone, as in vLLM 0.24.",
    modules=("vllm.utils.cache",),
    present=present,
    apply=apply,
)
