"""One thread resets a multimodal cache while another thread uses it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

from .patch import Patch

MARK = "__vllmops__"
NAME = attrgetter("__name__")
# The methods that change the LRU order or the data.
METHODS = (
    "get_and_update_features",
    "get_and_update_item",
    "touch_sender_cache_item",
    "touch_receiver_cache_item",
    "invalidate",
    "clear_cache",
)
# The lock is held for milliseconds; a main loop must not wait forever for a stuck thread.
WAIT_S = 1.0
TEAR_S, TEAR_PATCHED_S = 0.1, 0.01


class SlowCache:
    """Stands in for an LRUCache whose ``get`` waits until ``clear``, or for `patience_s`."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.get_called, self.clear_called = threading.Event(), threading.Event()
        self.torn = False

    def get(self, key: str) -> SimpleNamespace:  # noqa: ARG002
        self.get_called.set()
        self.torn = self.clear_called.wait(self.patience_s)
        return SimpleNamespace(item=None, prompt_updates=None)

    def clear(self) -> None:
        self.clear_called.set()


def has_defect(module: ModuleType) -> bool | None:
    cls = next((cls for cls in list_cache_classes(module) if not inspect.isabstract(cls)), None)
    if cls is None:
        return None
    holder: Any = object.__new__(cls)
    patched = hasattr(cls.clear_cache, MARK)
    holder._cache = slow = SlowCache(TEAR_PATCHED_S if patched else TEAR_S)
    user = threading.Thread(target=holder.get_and_update_item, args=(None, "vllmops-probe"))
    user.start()
    slow.get_called.wait(WAIT_S)
    holder.clear_cache()
    user.join(WAIT_S)
    return slow.torn


def apply_patch(module: ModuleType) -> None:
    for cls in list_cache_classes(module):
        for name in METHODS:
            method = vars(cls).get(name)
            # Abstract methods are overridden, and the overriding methods are patched.
            if method and not hasattr(method, MARK) and not hasattr(method, "__isabstractmethod__"):
                setattr(cls, name, wrap_with_lock(method))


def list_cache_classes(module: ModuleType) -> Iterator[Any]:
    """The module's own classes of multimodal caches, without those in shared memory."""
    for name, cls in vars(module).items():
        own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if own and not name.startswith("Shm") and "BaseMultiModalCache" in map(NAME, cls.__mro__):
            yield cls


def wrap_with_lock(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with a lock that the methods of one cache share."""

    @functools.wraps(method)
    def call_with_lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        # setdefault() is atomic: two threads get the same lock.
        lock = self.__dict__.setdefault("_vllmops_lock", threading.RLock())
        taken = lock.acquire(timeout=WAIT_S)
        try:
            return method(self, *args, **kwargs)
        finally:
            if taken:
                lock.release()

    setattr(call_with_lock, MARK, True)
    return call_with_lock


PATCH = Patch(
    id="mm-cache-reset-race",
    upstream="none: reported by vllmops",
    title="a multimodal cache is reset while another thread uses it",
    hit="Servers whose multimodal cache is reset during use (by a reset, a pause, new weights): "
    "EngineCore's main loop empties it while its input thread inserts, which can leave keys "
    "without data or wrong sizes. In every vLLM up to 0.33.",
    changes="Methods that change such a cache take a lock, and wait for it at most one second.",
    modules=("vllm.multimodal.cache", "vllm.multimodal.cache.base", "vllm.multimodal.cache.lru"),
    present=has_defect,
    apply=apply_patch,
)
