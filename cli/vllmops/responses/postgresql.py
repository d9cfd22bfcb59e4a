"""The backend ``postgresql://…``: for several machines; needs the package asyncpg."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import asyncpg

from .backend import EVERYBODY, Chunk, Limits, Response
from .gathering import Gathered
from .pool import Pool
from .sql import CREATE, GET_MANY, META, META_GET, Dialect, Sql

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

CONNECTIONS = 8
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
# The rows as columns: one commit, and one answer, for all of them.
CREATE_MANY = (
    CREATE
    % """SELECT id, owner, model, status, created_at, previous_id, error, body, input, used,
    {now} + lease FROM unnest(CAST($1 AS TEXT[]), CAST($2 AS TEXT[]), CAST($3 AS TEXT[]),
    CAST($4 AS TEXT[]), CAST($5 AS FLOAT[]), CAST($6 AS TEXT[]), CAST($7 AS TEXT[]),
    CAST($8 AS BYTEA[]), CAST($9 AS BYTEA[]), CAST($10 AS FLOAT[]), CAST($11 AS FLOAT[]))
    AS given (id, owner, model, status, created_at, previous_id, error, body, input, used, lease)"""
)
# They are packed already.
UNPACKED = """ALTER TABLE {name}_responses ALTER body SET STORAGE EXTERNAL,
    ALTER input SET STORAGE EXTERNAL"""


class Connections(Pool["Connection"]):
    """Connections to one database.

    Args:
        url: of it.
    """

    def __init__(self, url: str) -> None:
        super().__init__(CONNECTIONS)
        self.url = url

    async def connect(self) -> Connection:
        return await asyncpg.connect(self.url, server_settings={"application_name": "vllmops"})

    async def fit(self, connection: Connection) -> bool:
        return not connection.is_closed()

    async def end(self, connection: Connection) -> None:
        connection.terminate()


class Postgresql(Sql):
    """A database for all; it comes back by itself when the server does."""

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
        self.connections = Connections(url)
        self.finding = Gathered(self.find_all, lambda _: 0, at_once=True)
        self.adding = Gathered(self.add_all, lambda each: len(each.body) + len(each.input))

    async def there(self) -> bool:
        connection = await asyncpg.connect(self.url)
        try:
            return bool(await connection.fetchval("SELECT to_regclass($1)", f"{self.name}_meta"))
        finally:
            await connection.close()

    async def open(self) -> None:
        await self.connections.empty()
        async with self.connections.lend() as connection:
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
        try:
            await super().close()
            for connection, _ in self.connections.idle:
                await connection.close()
        finally:
            await self.connections.empty()

    async def find(self, owner: str, response_id: str) -> Response | None:
        return await self.finding((owner, response_id))

    async def find_all(self, wanted: list[tuple[str, str]]) -> list[Response | None]:
        """As `find`, for several owners and ids."""
        if len(wanted) == 1:
            return [await super().find(*wanted[0])]
        ids = {response_id for _, response_id in wanted}
        found = {each.id: each for each in await self.alive(GET_MANY, list(ids))}
        return [
            each if (each := found.get(response_id)) and owner in {EVERYBODY, each.owner} else None
            for owner, response_id in wanted
        ]

    async def add(self, response: Response) -> bool:
        return await self.adding(response)

    async def add_all(self, responses: list[Response]) -> list[bool]:
        """Whether each id was free; of two with one id the first has it."""
        # In one order everywhere, or two processes could wait for each other.
        rows = sorted((self.row(each) for each in responses), key=itemgetter(0))
        columns = [list(each) for each in zip(*rows, strict=True)]
        added = {row[0] for row in await self.fetch(self.text(CREATE_MANY), *columns)}
        done = []
        for each in responses:
            done.append(each.id in added)
            added.discard(each.id)
        return done

    async def append(self, response: Response, chunk: Chunk) -> bool:
        try:
            return await super().append(response, chunk)
        except asyncpg.ForeignKeyViolationError:  # deleted while the statement ran
            return False

    async def fetch(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        async with self.connections.lend() as connection:
            rows: Sequence[Sequence[Any]] = await connection.fetch(statement, *values)
        return rows

    async def many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        async with self.connections.lend() as connection:
            await connection.executemany(statement, values)

    async def caveats(self) -> list[str]:
        rows = await self.fetch(
            "SELECT name, setting FROM pg_settings"
            " WHERE name IN ('fsync', 'synchronous_commit') AND setting = 'off' ORDER BY name"
        )
        return [
            f"{name} = {setting}: a crash may take the last responses" for name, setting in rows
        ]
