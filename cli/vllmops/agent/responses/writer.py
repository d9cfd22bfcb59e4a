"""Writes the events of a run in the background to the store, whatever becomes of the store."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

from ...forever import Trouble, attempt
from ...store.store import Response, ResponseStore, StoreUnavailable
from ..log import log

T = TypeVar("T")

# How long events are gathered before they are written: a write costs more than an event.
BATCH_S = 0.05
# For how long the outcome of a run in the background is kept ready for a store that is down.
PATIENCE_S = 600.0


class Writer:
    """Writes the events of a run to the store, in batches, beside the generation.

    Args:
        store: which may be down for a while.
        run: the run.
    """

    def __init__(self, store: ResponseStore, run: Response) -> None:
        self.store = store
        self.run = run
        # The log keeps no more than so many.
        self.waiting: deque[bytes] = deque(maxlen=store.backend.limits.max_events)
        self.last = -1
        self.news = asyncio.Event()
        self.over = asyncio.Event()
        self.gone = False
        self.trouble = Trouble(f"the events of {run.id} are not all stored", log.error)

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.write(), name=f"events_{self.run.id}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and not issubclass(kind, Exception):
            self.task.cancel()  # nobody wants them any more
        self.over.set()
        self.news.set()
        try:
            await asyncio.wait([self.task])
        finally:
            self.task.cancel()

    def add(self, number: int, event: bytes) -> None:
        """Have an event written; they come in order."""
        self.waiting.append(event)
        self.last = number
        self.news.set()

    async def write(self) -> None:
        while not self.gone:
            await self.news.wait()
            self.news.clear()
            if self.waiting:
                # What can't be stored is left out, and what comes after it is not.
                await attempt(self.write_some, self.trouble)
            elif self.over.is_set():
                return
            if self.over.is_set():
                self.news.set()
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.over.wait(), BATCH_S)

    async def write_some(self) -> None:
        """Write all that waits."""
        batch = list(self.waiting)
        self.waiting.clear()
        first = self.last + 1 - len(batch)
        # What failed may have been written: the same again, and no more, does no harm.
        self.gone = not await patiently(partial(self.store.append, self.run, first, batch))


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the store answers.

    Raises:
        StoreUnavailable: it has not for `PATIENCE_S`.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(error.retry_after_s)
