"""Connections to a database's server that are used again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from vllmops.support.background import start_task

from ..backend import SILENT_S

Connection = TypeVar("Connection")

# Longer than that, and something on the way may have forgotten a connection.
IDLE_S = 300.0
# How long a connection is made that nobody waits for any more.
LATE_S = 2.0


class ConnectionPool(Generic[Connection]):
    """Lends connections, the one that was used last first.

    The drivers' own pools take as long as a short call: 0.2 ms after the process has waited for
    the engine.

    Args:
        connect: makes a connection.
        is_usable: whether one that rests is still open.
        end: lets go of one, and waits for no server.
        max_connections: how many are lent at once.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        is_usable: Callable[[Connection], Awaitable[bool]],
        end: Callable[[Connection], Awaitable[None]],
        max_connections: int,
    ) -> None:
        self.connect = connect
        self.is_usable = is_usable
        self.end = end
        self.room = asyncio.Semaphore(max_connections)
        # With the time when each began to rest; the one that was used last is last.
        self.resting: list[tuple[Connection, float]] = []
        # How often all were let go of.
        self.emptied_count = 0
        self.late_tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Connection]:
        """A connection, which is not used again after trouble; after a long one none is."""
        async with self.room:
            emptied = self.emptied_count
            connection = await self.take_idle_connection() or await self.open_connection()
            began = time.monotonic()
            try:
                yield connection
            except BaseException:
                await self.end(connection)
                if time.monotonic() - began > SILENT_S:
                    await self.close_all()
                raise
            if emptied == self.emptied_count:
                self.resting.append((connection, time.monotonic()))
            else:
                await self.end(connection)

    async def open_connection(self) -> Connection:
        """A new connection; one that nobody waits for any more when it is made is let go of.

        The drivers can't be stopped while they connect: their own tasks would tell of errors.
        """
        making = asyncio.ensure_future(self.connect())
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            start_task(self.close_late_connection(making), self.late_tasks)
            raise

    async def close_late_connection(self, making: asyncio.Future[Connection]) -> None:
        done, _ = await asyncio.wait({making}, timeout=LATE_S)
        if not done:
            making.cancel()
        elif not (making.cancelled() or making.exception()):
            await self.end(making.result())

    async def take_idle_connection(self) -> Connection | None:
        """One that rests; None where none does that can be used."""
        late = time.monotonic() - IDLE_S
        while self.resting and self.resting[0][1] < late:
            await self.end(self.resting.pop(0)[0])
        while self.resting:
            connection, _ = self.resting.pop()
            if await self.is_usable(connection):
                return connection
            await self.end(connection)
        return None

    async def close_all(self) -> None:
        """Let go of all connections, of one that is lent when it comes back."""
        self.emptied_count += 1
        while self.resting:
            await self.end(self.resting.pop()[0])
