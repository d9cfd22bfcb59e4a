"""The backend ``postgresql://…``: for several machines; needs the package asyncpg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import asyncpg

from .backend import Chunk, Limits, Response
from .sql import META, META_ADD, META_GET, SCHEMA, Dialect, Sql

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
    )

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        steady = f"pg_postmaster_start_time() < clock_timestamp() - interval '{limits.lease_s:f} s'"
        super().__init__(url, limits, name, Dialect(words={**WORDS, "steady": steady}))
        self.name = name
        self.pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def open(self) -> None:
        if self.pool:
            self.pool.terminate()
        self.pool = await asyncpg.create_pool(
            self.url,
            min_size=1,
            max_size=CONNECTIONS,
            reset=nothing,
            server_settings={"application_name": "vllmops"},
        )
        async with self.pool.acquire() as connection, connection.transaction():
            # Several processes start at once, and one of them makes the tables.
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", self.name)
            await connection.execute(self.text(META))
            row = await connection.fetchrow(self.text(META_GET), "schema")
            found = row[0] if row else 0
            for statement in self.steps(found):
                await connection.execute(statement)
            if found < len(SCHEMA):
                await connection.execute(self.text(META_ADD), "schema", len(SCHEMA) - found)
            if found == 0:
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
        assert self.pool
        async with self.pool.acquire() as connection:
            rows: Sequence[Sequence[Any]] = await connection.fetch(statement, *values)
        return rows

    async def many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        assert self.pool
        async with self.pool.acquire() as connection:
            await connection.executemany(statement, values)


async def nothing(_: object) -> None:
    """Connections come back as they were taken, so there is nothing to reset."""
