"""The backend ``postgresql://…``: for several machines; needs the package asyncpg."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import asyncpg

from .backend import Chunk, Limits, Response
from .sql import META, META_GET, Dialect, Sql

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

CONNECTIONS = 8
# Longer than that, and something on the way may have forgotten the connection.
IDLE_S = 300.0
WORDS = {
    "text": 'TEXT COLLATE "C"',
    "float": "DOUBLE PRECISION",
    "bytes": "BYTEA",
    # As of the statement, so that an index can be asked.
    "now": "CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)",
    "false": "FALSE",
    "most": "greatest",
    "skip": "FOR UPDATE SKIP LOCKED",
    "among": "= ANY($1)",
}
# They are packed already.
UNPACKED = """ALTER TABLE {name}_responses ALTER body SET STORAGE EXTERNAL,
    ALTER input SET STORAGE EXTERNAL"""


class Postgresql(Sql):
    """A pool of connections; it comes back by itself when the server does."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = (
        OSError,
        asyncpg.PostgresError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,
    )

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        lease = f"interval '{limits.lease_s:f} s'"
        steady = f"pg_postmaster_start_time() < statement_timestamp() - {lease}"
        super().__init__(url, limits, name, Dialect(words={**WORDS, "steady": steady}))
        self.name = name
        # Nobody uses these, since when. asyncpg's own pool takes as long as a small statement.
        self.idle: list[tuple[Connection, float]] | None = None
        self.slots = asyncio.Semaphore(CONNECTIONS)

    async def there(self) -> bool:
        connection = await asyncpg.connect(self.url)
        try:
            return bool(await connection.fetchval("SELECT to_regclass($1)", f"{self.name}_meta"))
        finally:
            await connection.close()

    async def open(self) -> None:
        self.let_go()
        self.idle = []
        async with self.connection() as connection:
            await connection.execute("BEGIN")
            await self.upgrade(connection)
            await connection.execute("COMMIT")  # without it the connection is not used again

    async def upgrade(self, connection: Connection) -> None:
        # Several processes start at once, and one of them makes the tables.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", self.name)
        await connection.execute(self.text(META))
        row = await connection.fetchrow(self.text(META_GET), "schema")
        for statement in self.steps(row[0] if row else 0):
            await connection.execute(statement)
        if row is None:
            await connection.execute(self.text(UNPACKED))

    async def close(self) -> None:
        if self.idle is None:
            return
        try:
            await super().close()
            for connection, _ in self.idle:
                await connection.close()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Of all connections; one that is in use goes when that is over."""
        for connection, _ in self.idle or ():
            connection.terminate()
        self.idle = None

    async def append(self, response: Response, chunk: Chunk) -> bool:
        try:
            return await super().append(response, chunk)
        except asyncpg.ForeignKeyViolationError:  # deleted while the statement ran
            return False

    async def fetch(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        async with self.connection() as connection:
            rows: Sequence[Sequence[Any]] = await connection.fetch(statement, *values)
        return rows

    async def many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        async with self.connection() as connection:
            await connection.executemany(statement, values)

    def connection(self) -> Lent:
        """A connection; after any trouble it is not used again."""
        return Lent(self)

    async def caveats(self) -> list[str]:
        rows = await self.fetch(
            "SELECT name, setting FROM pg_settings"
            " WHERE name IN ('fsync', 'synchronous_commit') AND setting = 'off' ORDER BY name"
        )
        return [
            f"{name} = {setting}: a crash may take the last responses" for name, setting in rows
        ]


class Lent:
    """A connection for as long as it is needed.

    Args:
        pool: whose.
    """

    # A generator would do, and make each statement a twentieth slower.
    def __init__(self, pool: Postgresql) -> None:
        self.pool = pool

    async def __aenter__(self) -> Connection:
        await self.pool.slots.acquire()
        try:
            assert self.pool.idle is not None
            self.idle = self.pool.idle
            self.taken = rested(self.idle) or await asyncpg.connect(
                self.pool.url, server_settings={"application_name": "vllmops"}
            )
        except BaseException:
            self.pool.slots.release()
            raise
        return self.taken

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.pool.slots.release()
        if kind is None and self.idle is self.pool.idle:
            self.idle.append((self.taken, time.monotonic()))
        else:
            self.taken.terminate()


def rested(idle: list[tuple[Connection, float]]) -> Connection | None:
    """The connection that was used last, if there is one that can be trusted."""
    while idle:
        connection, since = idle.pop()
        if not connection.is_closed() and time.monotonic() - since < IDLE_S:
            return connection
        connection.terminate()
    return None
