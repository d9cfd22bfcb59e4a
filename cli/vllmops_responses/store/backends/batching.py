"""Calls to a database that come together, made as one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Given = TypeVar("Given")
Got = TypeVar("Got")

# Calls, and about bytes, that are made as one.
MOST, ROOM = 64, 1 << 20


class CallBatcher(Generic[Given, Got]):
    """Calls of one turn of the event loop, and those that come meanwhile, are made as one.

    A step of the engine ends several answers, so their calls come together. Each that goes alone
    wakes the database's server, which then waits for a core on a busy machine.

    Args:
        run: makes some calls, and gives as many results in their order; what it raises is raised
            by all of them.
        weigh: about how many bytes a call takes.
    """

    def __init__(
        self,
        run: Callable[[list[Given]], Coroutine[Any, Any, Sequence[Got]]],
        weigh: Callable[[Given], int],
    ) -> None:
        self.run = run
        self.weigh = weigh
        self.busy = False
        self.waiting: deque[tuple[Given, asyncio.Future[Got]]] = deque()
        self.together: list[asyncio.Future[Got]] = []
        self.task: asyncio.Task[Sequence[Got]] | None = None

    async def __call__(self, argument: Given) -> Got:
        future: asyncio.Future[Got] = asyncio.get_running_loop().create_future()
        if self.busy:
            self.waiting.append((argument, future))
        else:
            self.busy = True
            try:
                await asyncio.sleep(0)  # those of the same turn have come by then
                if not self.waiting:  # no task: most calls are alone
                    return (await self.run([argument]))[0]
                self.waiting.appendleft((argument, future))
            finally:
                self.start_batch()
        try:
            return await future
        finally:
            left = future.cancelled() and future in self.together
            if left and self.task and all(task.done() for task in self.together):
                self.task.cancel()  # nobody waits for it any more

    def start_batch(self) -> None:
        self.together = []
        self.task = asyncio.create_task(self.run_batch()) if self.waiting else None
        self.busy = self.task is not None
        if self.task:
            self.task.add_done_callback(self.deliver_results)

    async def run_batch(self) -> Sequence[Got]:
        """Make the calls that have come until now."""
        given, weight = list[Given](), 0
        while self.waiting and len(given) < MOST and weight < ROOM:
            item, future = self.waiting.popleft()
            if not future.done():
                given.append(item)
                self.together.append(future)
                weight += self.weigh(item)
        return await self.run(given) if given else ()

    def deliver_results(self, task: asyncio.Task[Sequence[Got]]) -> None:
        """Tell each caller what has come of its call."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled() and len(task.result()) != len(self.together):
            error = RuntimeError(f"{len(task.result())} results of {len(self.together)} calls")
        for index, future in enumerate(self.together):
            if future.done():
                continue
            if task.cancelled():
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result()[index])
        self.start_batch()
