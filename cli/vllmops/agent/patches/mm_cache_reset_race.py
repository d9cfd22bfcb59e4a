"""A multimodal cache is reset on one thread while another one uses it."""

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
# Whatever changes the LRU order or what is behind it.
METHODS = (
    "get_and_update_features",
    "get_and_update_item",
    "touch_sender_cache_item",
    "touch_receiver_cache_item",
    "invalidate",
    "clear_cache",
)
# Nobody holds it for more than milliseconds; a loop is not to wait for a thread that is stuck.
WAIT_S = 1.0
TEAR_S, TEAR_PATCHED_S = 0.1, 0.01


class Slow:
    """Stands in for an LRUCache whose ``get`` takes until somebody clears it, or some time."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.entered, self.cleared = threading.Event(), threading.Event()
        self.torn = False

    def get(self, key: str) -> SimpleNamespace:  # noqa: ARG002
        self.entered.set()
        self.torn = self.cleared.wait(self.patience_s)
        return SimpleNamespace(item=None, prompt_updates=None)

    def clear(self) -> None:
        self.cleared.set()


def present(module: ModuleType) -> bool | None:
    cls = next((each for each in classes(module) if not inspect.isabstract(each)), None)
    if cls is None:
        return None
    holder: Any = object.__new__(cls)
    patched = hasattr(cls.clear_cache, MARK)
    holder._cache = slow = Slow(TEAR_PATCHED_S if patched else TEAR_S)
    user = threading.Thread(target=holder.get_and_update_item, args=(None, "vllmops-probe"))
    user.start()
    slow.entered.wait(WAIT_S)
    holder.clear_cache()
    user.join(WAIT_S)
    return slow.torn


def apply(module: ModuleType) -> None:
    for cls in classes(module):
        for name in METHODS:
            method = vars(cls).get(name)
            # What is abstract is overridden, and the override patched.
            if method and not hasattr(method, MARK) and not hasattr(method, "__isabstractmethod__"):
                setattr(cls, name, exclusive(method))


def classes(module: ModuleType) -> Iterator[Any]:
    """The module's own classes of multimodal caches, but for those in shared memory."""
    for name, cls in vars(module).items():
        own = inspect.isclass(cls) and cls.__module__ == module.__name__
        if own and not name.startswith("Shm") and "BaseMultiModalCache" in map(NAME, cls.__mro__):
            yield cls


def exclusive(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, never at the same time as another one of the same cache."""

    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        # setdefault() is one step: two threads get the same lock.
        lock = self.__dict__.setdefault("_vllmops_lock", threading.RLock())
        taken = lock.acquire(timeout=WAIT_S)
        try:
            return method(self, *args, **kwargs)
        finally:
            if taken:
                lock.release()

    setattr(alone, MARK, True)
    return alone


PATCH = Patch(
    id="mm-cache-reset-race",
    upstream="none: reported by vllmops",
    title="a multimodal cache is reset while another thread uses it",
    hit="Whoever resets the multimodal cache of a server in use (a reset, a pause, new weights): "
    "EngineCore's main loop empties it while its input thread inserts, and keys without data or "
    "wrong sizes can be what is left. In every vLLM up to 0.33.",
    changes="What changes such a cache takes a lock of its own, for one second at most.",
    modules=("vllm.multimodal.cache", "vllm.multimodal.cache.base", "vllm.multimodal.cache.lru"),
    present=present,
    apply=apply,
)
