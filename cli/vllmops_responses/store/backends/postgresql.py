"""The backend ``postgresql://…``: for several machines; needs the package asyncpg."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, ClassVar, TypeAlias, TypeVar

import asyncpg

from vllmops.support.background import start_task
from vllmops.support.urls import FORMS, parse_store_url, redact_url, reject_url

from ..backend import EVERYBODY, FINISHED, EventChunk, Limits, Response
from ..conversation_backend import ConversationResult, ItemAddition
from .batching import CallBatcher
from .connection_pool import ConnectionPool
from .sql import SqlBackend
from .sql_conversations import Rollback, Rows, Steps

T = TypeVar("T")
Connection: TypeAlias = asyncpg.Connection

CONNECTIONS = 8
# How long one of several hosts is waited for: less than a call may take.
HOST_S = 0.8
PORT = 5432
TROUBLE = (
    OSError,  # TimeoutError is one
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
# Another server takes writes, or will: this one does not any more, or not yet.
ELSEWHERE = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)


async def is_usable(connection: Connection) -> bool:
    return not connection.is_closed()


async def close_connection(connection: Connection) -> None:
    with suppress(*TROUBLE):
        await connection.close(timeout=HOST_S)


class Postgresql(SqlBackend):
    """A database for all; it comes back by itself when the server does."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = TROUBLE

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        super().__init__(url, limits, name, "postgresql.sql")
        self.name = name
        self.closing: set[asyncio.Task[None]] = set()
        self.pool = ConnectionPool(self.connect, is_usable, self.close_in_background, CONNECTIONS)
        parts = parse_store_url(url)
        self.hosts = [(host, port or PORT) for host, port in parts.hosts]
        given = "target_session_attrs" in parts.query or "PGTARGETSESSIONATTRS" in os.environ
        # Of several hosts only one takes writes.
        self.target_session_attrs = None if given or len(self.hosts) < 2 else "read-write"
        self.finding = CallBatcher(self.find_responses, lambda _: 0)

    def is_call_error(self, error: BaseException) -> bool:
        return isinstance(error, asyncpg.DataError)  # the values of a statement

    async def exists(self) -> bool:
        connection = await self.connect()
        try:
            return bool(await connection.fetchval("SELECT to_regclass($1)", f"{self.name}_meta"))
        finally:
            await connection.close()

    async def connect(self) -> Connection:
        """A new connection: to a host that takes writes, of several."""
        if len(self.hosts) < 2:
            return await self.connect_to_host()
        error: Exception = OSError("no host")
        for host, port in list(self.hosts):
            try:
                return await self.connect_to_host(host=host, port=port, timeout=HOST_S)
            except TROUBLE as found:
                error = found
            # The next call begins with one that may be better.
            self.hosts.append(self.hosts.pop(0))
        raise error

    async def connect_to_host(self, **given: Any) -> Connection:
        """A connection, where a host has what is asked for.

        Raises:
            VllmopsError: ``usage``, where the driver can't read the URL.
        """
        try:
            return await asyncpg.connect(
                self.url,
                server_settings={"application_name": "vllmops"},
                target_session_attrs=self.target_session_attrs,
                **given,
            )
        except (ValueError, asyncpg.ClientConfigurationError):
            reject_url(f"{redact_url(self.url)!r} has an invalid parameter", FORMS["postgresql"])

    async def open(self) -> None:
        await self.pool.close_all()
        async with self.pool.lend() as connection, connection.transaction():
            await self.upgrade_schema(connection)

    async def upgrade_schema(self, connection: Connection) -> None:
        await connection.execute(self.text["alone"])
        await connection.execute(self.text["meta"])
        version = await connection.fetchval(self.text["meta get"], "schema") or 0
        for statement in self.list_migrations(version):
            await connection.execute(statement)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await self.pool.close_all()
            if self.closing:
                await asyncio.wait(self.closing)

    async def close_in_background(self, connection: Connection) -> None:
        """Let go of one, and wait for nobody: the server may be silent, or still end a call."""
        start_task(close_connection(connection), self.closing)

    async def find_response(self, owner: str, response_id: str) -> Response | None:
        return await self.finding((owner, response_id))

    async def find_responses(self, owners_and_ids: list[tuple[str, str]]) -> list[Response | None]:
        """As `find_response`, for several owners and ids."""
        if len(owners_and_ids) == 1:
            return [await super().find_response(*owners_and_ids[0])]
        ids = {response_id for _, response_id in owners_and_ids}
        found = {
            response.id: response for response in await self.select_responses("get many", list(ids))
        }
        return [
            response
            if (response := found.get(response_id)) and owner in {EVERYBODY, response.owner}
            else None
            for owner, response_id in owners_and_ids
        ]

    async def insert_responses(self, responses: list[Response]) -> list[bool]:
        # In one order everywhere, or two processes could wait for each other.
        rows = sorted(
            (self.build_create_args(response) for response in responses), key=itemgetter(0)
        )
        columns = [list(column) for column in zip(*rows, strict=True)]
        added = {row[0] for row in await self.execute_named("create", *columns)}
        done = []
        for response in responses:
            done.append(response.id in added)
            added.discard(response.id)
        return done

    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        try:
            return await super().append_events(response, chunk)
        except asyncpg.ForeignKeyViolationError:  # deleted while the statement ran
            return False

    async def execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        return await self.run_on_primary(lambda connection: connection.fetch(statement, *values))

    async def take_hold(self, *given: Any) -> Rows | None:
        rows = await self.execute_named("hold", *given)
        if rows and not rows[0][-1]:
            return await self.execute_named("entries", given[0])
        return [row for row in rows if row[0] is not None] if rows else None

    async def insert_items(
        self, addition: ItemAddition, response: Response | None, *, is_new: bool
    ) -> ConversationResult:
        """In one round trip; what hinders that is found out in several."""
        entries, storing, row = addition.entries, "nothing", tuple[Any, ...]()
        if response:
            storing = "create" if is_new else "put"
            row = (
                self.build_create_args(response)
                if is_new
                else self.build_put_args(response, FINISHED)
            )
        text = "".join(self.text[name] for name in ("add", f"and {storing}", "added"))
        given = (
            addition.conversation_id,
            addition.owner,
            addition.holder,
            len(entries),
            [one.id for one in entries],
            [one.answer for one in entries],
            [one.body for one in entries],
            self.limits.max_items,
            *row,
        )

        async def run_insert(connection: Connection) -> Rows:
            with suppress(asyncpg.UniqueViolationError, asyncpg.DivisionByZeroError):
                return await connection.fetch(text, *given)  # type: ignore[no-any-return]
            return ()

        if await self.run_on_primary(run_insert):
            return ConversationResult.DONE
        return await super().insert_items(addition, response, is_new=is_new)

    async def run_transaction(self, steps: Callable[[], Steps]) -> ConversationResult:
        async def run_on_connection(connection: Connection) -> ConversationResult:
            try:
                async with connection.transaction():
                    return await self.run_steps(connection, steps())
            except Rollback as undone:
                return undone.outcome

        return await self.run_on_primary(run_on_connection)

    async def run_steps(self, connection: Connection, steps: Steps) -> ConversationResult:
        """Run steps; what came of them."""
        try:
            step = next(steps)
            while True:
                # Of many rows it takes the columns.
                values = (
                    [list(column) for column in zip(*step.values, strict=True)]
                    if step.is_batch
                    else step.values
                )
                step = steps.send(await connection.fetch(self.text[step.name], *values))
        except StopIteration as done:
            outcome: ConversationResult = done.value
            return outcome

    async def execute_batch(self, name: str, values: list[tuple[Any, ...]]) -> None:
        text = self.text[name]
        await self.run_on_primary(lambda connection: connection.executemany(text, values))

    async def run_on_primary(self, run: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run something on a server that takes writes.

        A connection to one that takes none is not used again. If it has done nothing yet, the next
        server is asked.
        """
        try:
            return await self.run_on_connection(run)
        except asyncpg.ReadOnlySQLTransactionError:
            return await self.run_on_connection(run)
        except asyncpg.UndefinedTableError:  # dropped, or another database is in its place
            await self.open()
            return await self.run_on_connection(run)

    async def run_on_connection(self, run: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run something on a connection."""
        try:
            async with self.pool.lend() as connection:
                return await run(connection)
        except ELSEWHERE:
            await self.pool.close_all()
            raise

    async def list_caveats(self) -> list[str]:
        rows = await self.execute_named("caveats")
        caveats = [
            f"{name} = {setting}: a crash may lose the last responses" for name, setting in rows
        ]
        names = await self.execute_named("standbys")
        if len(self.hosts) > 1 and not names[0][0]:
            caveats.append(
                "synchronous_standby_names is empty: when a standby takes over, the last responses "
                "may be lost"
            )
        return caveats
