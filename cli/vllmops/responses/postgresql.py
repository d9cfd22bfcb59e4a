"""The backend ``postgresql://…``: for several machines; needs the package asyncpg."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import asyncpg

from .backend import Chunk, Limits, Response
from .sql import META, META_GET, Dialect, Sql

CONNECTIONS = 8
WORDS = {
    "text": 'TEXT COLLATE "C"',
    "float": "DOUBLE PRECISION",
    "bytes": "BYTEA",
    "now": "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)",
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
        steady = f"pg_postmaster_start_time() < clock_timestamp() - interval '{limits.lease_s:f} s'"
        super().__init__(url, limits, name, Dialect(words={**WORDS, "steady": steady}))
        self.name = name
        self.pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def there(self) -> bool:
        connection = await asyncpg.connect(self.url)
        try:
            return bool(await connection.fetchval("SELECT to_regclass($1)", f"{self.name}_meta"))
        finally:
            await connection.close()

    async def open(self) -> None:
        if self.pool:
            self.pool.terminate()
        self.pool = await asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=CONNECTIONS,
            reset=nothing,
            server_settings={"application_name": "vllmops"},
        )
        async with self.connection() as connection:
            await connection.execute("BEGIN")
            await self.upgrade(connection)
            await connection.execute("COMMIT")  # without it the connection is not used again

    async def upgrade(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        # Several processes start at once, and one of them makes the tables.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", self.name)
        await connection.execute(self.text(META))
        row = await connection.fetchrow(self.text(META_GET), "schema")
        for statement in self.steps(row[0] if row else 0):
            await connection.execute(statement)
        if row is None:
            await connection.execute(self.text(UNPACKED))

    async def close(self) -> None:
        if self.pool is None:
            return
        try:
            await super().close()
            await self.pool.close()
        finally:
            self.pool.terminate()
            self.pool = None

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

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """One of the pool's, which does not get it back after any trouble."""
        assert self.pool
        pool = self.pool
        connection = await pool.acquire()
        try:
            yield connection
        except BaseException:
            # The pool would wait until a server that does not answer has stopped the statement, and
            # would hand out a connection whose server has just said that it goes down.
            connection.terminate()
            raise
        finally:
            await pool.release(connection)

    async def caveats(self) -> list[str]:
        rows = await self.fetch(
            "SELECT name, setting FROM pg_settings"
            " WHERE name IN ('fsync', 'synchronous_commit') AND setting = 'off' ORDER BY name"
        )
        return [
            f"{name} = {setting}: a crash may take the last responses" for name, setting in rows
        ]


async def nothing(_: object) -> None:
    """Connections come back as they were taken, so there is nothing to reset."""
