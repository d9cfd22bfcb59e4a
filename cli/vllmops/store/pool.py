"""Connections to a database's server.

The drivers' own pools take as long as a small statement does.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

C = TypeVar("C")

# Longer than that, and something on the way may have forgotten the connection.
IDLE_S = 300.0
# A call that was given up after so long has met silence: the others may be as dead.
SILENT_S = 0.5


class Pool(ABC, Generic[C]):
    """Lends connections, the one that was used last first; after any trouble none again.

    Args:
        size: connections at most.
    """

    def __init__(self, size: int) -> None:
        self.slots = asyncio.Semaphore(size)
        # Nobody uses these, since when.
        self.idle: list[tuple[C, float]] = []

    @abstractmethod
    async def connect(self) -> C:
        """A new connection."""

    @abstractmethod
    async def fit(self, connection: C) -> bool:
        """Whether one that was used before can be used again."""

    @abstractmethod
    async def end(self, connection: C) -> None:
        """Let go of one at once."""

    def lend(self) -> Lent[C]:
        """A connection, for an ``async with``."""
        return Lent(self)

    async def take(self) -> C:
        """A connection that can be trusted."""
        while self.idle:
            connection, since = self.idle.pop()
            if time.monotonic() - since < IDLE_S and await self.fit(connection):
                return connection
            await self.end(connection)
        return await self.connect()

    async def empty(self) -> None:
        """Let go of all; one that is in use goes when that is over."""
        idle, self.idle = self.idle, []
        for connection, _ in idle:
            await self.end(connection)


class Lent(Generic[C]):
    """A connection for as long as it is needed.

    Args:
        pool: whose.
    """

    # A generator would do, and make each statement a twentieth slower.
    def __init__(self, pool: Pool[C]) -> None:
        self.pool = pool

    async def __aenter__(self) -> C:
        await self.pool.slots.acquire()
        try:
            # Put back nowhere else: `empty` begins another list.
            self.idle = self.pool.idle
            self.connection = await self.pool.take()
            self.since = time.monotonic()
        except BaseException:
            self.pool.slots.release()
            raise
        return self.connection

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pool.slots.release()
        if kind is None and self.idle is self.pool.idle:
            self.idle.append((self.connection, time.monotonic()))
            return
        await self.pool.end(self.connection)
        if kind is not None and time.monotonic() - self.since > SILENT_S:
            await self.pool.empty()
