"""Writes the events of a background run to the store, also if the store fails for a while."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

from vllmops.agent.log import log
from vllmops.support.background import ErrorReporter, run_and_report

from ...store.backend import Response, StoreUnavailable
from ...store.response_store import ResponseStore

T = TypeVar("T")

# Events are collected for this long before they are written: a write costs more than an event.
BATCH_S = 0.05
# How long the result of a background run waits for a store that is down.
PATIENCE_S = 600.0


class EventWriter:
    """Writes the events of a run to the store, in batches, beside the generation.

    Args:
        store: which may be down for a while.
        run: the run.
    """

    def __init__(self, store: ResponseStore, run: Response) -> None:
        self.store = store
        self.run = run
        # As many as the store's log keeps.
        self.waiting: deque[bytes] = deque(maxlen=store.backend.limits.max_events)
        self.last_number = -1
        self.wakeup = asyncio.Event()
        self.run_ended = asyncio.Event()
        self.is_run_gone = False
        self.reporter = ErrorReporter(f"some events of {run.id} are not stored", log.error)

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.write_batches(), name=f"events_{self.run.id}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and not issubclass(kind, Exception):
            self.task.cancel()  # nobody needs the events any more
        self.run_ended.set()
        self.wakeup.set()
        try:
            await asyncio.wait([self.task])
        finally:
            self.task.cancel()

    def queue_event(self, number: int, event: bytes) -> None:
        """Queue an event; events arrive in order."""
        self.waiting.append(event)
        self.last_number = number
        self.wakeup.set()

    async def write_batches(self) -> None:
        while not self.is_run_gone:
            await self.wakeup.wait()
            self.wakeup.clear()
            if self.waiting:
                # Events that can't be stored are left out; later ones are still written.
                await run_and_report(self.write_batch, self.reporter)
            elif self.run_ended.is_set():
                return
            if self.run_ended.is_set():
                self.wakeup.set()
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.run_ended.wait(), BATCH_S)

    async def write_batch(self) -> None:
        """Write all queued events."""
        batch = list(self.waiting)
        self.waiting.clear()
        first = self.last_number + 1 - len(batch)
        # A failed write may have succeeded in part: writing the same batch again does no harm.
        self.is_run_gone = not await retry_while_unavailable(
            partial(self.store.append_events, self.run, first, batch)
        )


async def retry_while_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the store answers.

    Raises:
        StoreUnavailable: the store has not answered within `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(error.retry_after_s)
