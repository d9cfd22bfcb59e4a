"""Counts what the store of an API server holds, for its ``/metrics``."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.state import engine
from vllmops.model.server_metrics import StoreUsage

if TYPE_CHECKING:
    from ..store.backend import StoreStats
    from ..store.response_store import ResponseStore

# From one count of the store to the next, which goes through many rows, and its share of the time.
STORE_S, STORE_SHARE = 60.0, 0.005


class StoreUsageCounter:
    """The store of this API server, counted now and then by its own event loop."""

    def __init__(self) -> None:
        self.counting: Future[StoreStats] | None = None
        self.due = 0.0
        self.began = 0.0
        self.last_usage: StoreUsage | None = None

    def poll_usage(self) -> StoreUsage | None:
        """The last count; begins a new one if it is due, and never waits for it."""
        store: Any = getattr(vllm_objects.find_latest("responses"), "store", None)
        now = time.monotonic()
        if self.counting and self.counting.done():
            counting, self.counting = self.counting, None
            self.due = now + max(STORE_S, (now - self.began) / STORE_SHARE)
            failed = store is None or counting.exception()
            self.last_usage = None if failed else make_store_usage(store, counting.result())
        if store is not None and self.counting is None and now >= self.due:
            from ..store.backend import EVERYBODY  # noqa: PLC0415 - other processes don't need the store
            from ..store.response_store import ResponseStore  # noqa: PLC0415

            if not isinstance(store, ResponseStore):  # vLLM's own
                return None
            try:
                _, loop = engine.require_front_end()
            except RuntimeError:  # not up yet
                return self.last_usage
            self.began = now
            self.counting = asyncio.run_coroutine_threadsafe(store.collect_stats(EVERYBODY), loop)
        return self.last_usage


def make_store_usage(store: ResponseStore, stats: StoreStats) -> StoreUsage:
    return StoreUsage(
        backend=type(store.backend).__name__.lower(),
        statuses=stats.statuses,
        bytes=stats.bytes,
        evictions=stats.evictions,
        capacity=store.backend.limits.max_size,
    )
