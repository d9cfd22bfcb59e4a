"""The backends that speak SQL: each operation is one statement.

The statements are in ``*.sql``. Each operation being one statement, it is atomic without a
transaction of our own, and takes one round trip. There is no layer between the text and the
driver: SQLAlchemy's asynchronous engine was measured at 0.14 of what aiosqlite does with the same
statements, and at 0.5 of asyncpg.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ..backend import (
    EVERYBODY,
    FINISHED,
    GONE,
    RUNNING,
    CursorUnknown,
    EventChunk,
    EventLog,
    LastUseBuffer,
    Limits,
    Response,
    ResponsePage,
    ResponseQuery,
    StatusChange,
    StoreStats,
    SweepResult,
    join_statuses,
    make_schema_error,
    plan_evictions,
)
from ..conversation_backend import ConversationResult, ItemAddition
from .batching import CallBatcher
from .sql_conversations import SqlConversations, TransactionStep

SCHEMA = 4
# Rows that one statement deletes.
BATCH = 1000


class SqlBackend(SqlConversations):
    """A backend by statements; a subclass brings the driver.

    Args:
        url: without a namespace.
        limits: what is kept.
        name: what the tables' names begin with.
        statements_file: the file with the statements that only this database takes.
    """

    def __init__(self, url: str, limits: Limits, name: str, statements_file: str) -> None:
        super().__init__(url, limits)
        texts = {**load_statements("statements.sql"), **load_statements(statements_file)}
        self.text = {each: text.replace("{name}", name) for each, text in texts.items()}
        self.uses = LastUseBuffer(self.write_uses)
        # Counting is slow, so it is done once in a while: of all, and of an owner.
        self.count_interval, self.every_one = (
            max(1, limits.max_size // 100),
            max(1, limits.owner_limit // 100),
        )
        self.created_counts = Counter[str]()
        self.adding = CallBatcher(self.insert_responses, estimate_size)

    @abstractmethod
    async def execute(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """Run one statement, and have what it gives."""

    @abstractmethod
    async def execute_batch(self, name: str, values: list[tuple[Any, ...]]) -> None:
        """Run a statement of that name for each set of values."""

    async def execute_named(self, name: str, *values: Any) -> Sequence[Sequence[Any]]:
        """As `execute`, for the statement of that name."""
        return await self.execute(self.text[name], *values)

    def list_migrations(self, schema_version: int) -> list[str]:
        """The statements that lead from a schema's version to the newest; none from that.

        Raises:
            VllmopsError: ``store.schema``.
        """
        if schema_version > SCHEMA:
            raise make_schema_error(self.url, schema_version, SCHEMA)
        steps = [
            self.text[f"schema {version}"] for version in range(schema_version + 1, SCHEMA + 1)
        ]
        return [statement for step in steps for statement in step.split(";")]

    def get_lease_s(self, status: str) -> float | None:
        return self.limits.lease_s if status in RUNNING else None

    async def close(self) -> None:
        await self.uses.flush()
        await self.conversation_uses.flush()

    async def delete_store(self) -> None:
        for statement in self.text["drop"].split(";"):
            await self.execute(statement)

    async def create(self, response: Response) -> bool:
        done = await self.insert_response(response)
        if done:
            await self.make_room(response)
        return done

    async def add_items(
        self, addition: ItemAddition, response: Response | None = None, *, is_new: bool = False
    ) -> ConversationResult:
        outcome = await super().add_items(addition, response, is_new=is_new)
        if is_new and response and outcome is ConversationResult.DONE:
            await self.make_room(response)
        return outcome

    async def make_room(self, response: Response) -> None:
        """Evict what is too much, now that one more is stored; rows are counted once in a while."""
        self.created_counts[response.owner] += 1
        if self.created_counts.total() >= self.count_interval:
            self.created_counts.clear()
            await self.evict_lru(response.id)
        elif self.limits.max_per_key and self.created_counts[response.owner] >= self.every_one:
            del self.created_counts[response.owner]
            await self.uses.flush()
            given = (response.owner, self.limits.owner_limit, response.id)
            await self.count_evictions(len(await self.execute_named("evict", *given)))

    async def insert_response(self, response: Response) -> bool:
        """As `create`, and none is evicted."""
        return await self.adding(response)

    @abstractmethod
    async def insert_responses(self, responses: list[Response]) -> list[bool]:
        """As `insert_response`, for several; of two with one id the first has it."""

    def build_create_args(self, response: Response) -> tuple[Any, ...]:
        """What ``create`` takes for a response."""
        return (
            response.id,
            response.owner,
            response.model,
            response.status,
            response.created_at,
            response.previous_id,
            response.error,
            response.body,
            response.input,
            time.time(),
            self.get_lease_s(response.status),
        )

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return bool(await self.execute_named("put", *self.build_put_args(response, unless_status)))

    def build_put_args(self, response: Response, unless_status: Collection[str]) -> tuple[Any, ...]:
        """What ``put`` takes for a response."""
        return (
            response.id,
            response.owner,
            response.created_at,
            response.status,
            response.error,
            response.body,
            time.time(),
            self.get_lease_s(response.status),
            GONE,
            join_statuses(unless_status),
        )

    def make_store_step(self, response: Response, *, is_new: bool) -> TransactionStep:
        if is_new:
            return TransactionStep("create", [self.build_create_args(response)], is_batch=True)
        return TransactionStep("put", self.build_put_args(response, FINISHED))

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> StatusChange:
        done = await self.execute_named(
            "set status",
            response_id,
            owner,
            status,
            error,
            self.get_lease_s(status),
            join_statuses(allowed_statuses),
        )
        if done:
            return StatusChange(True, response_from_row(done[0]))
        return StatusChange(False, await self.find_response(owner, response_id))

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await self.find_response(owner, response_id)
        if found is not None:
            await self.uses.mark_used([response_id])
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self.execute_named("delete", response_id, owner))

    async def list_responses(self, owner: str, query: ResponseQuery) -> ResponsePage:
        await self.execute_named("fail", GONE, self.limits.lease_s)
        cursors = [
            await self.find_cursor(owner, each) for each in (query.after_id, query.before_id)
        ]
        older, newer = cursors if not query.descending else cursors[::-1]
        status = "completed" if query.status == "completed" else "status"
        parts = (
            "page",
            "of any owner" if owner == EVERYBODY else "of owner",
            "of any model" if query.model is None else "of model",
            "of any status" if query.status is None else f"of {status}",
            "from" if older[1] else "from any",
            "to" if newer[1] else "to any",
            "upwards" if query.descending == query.is_backward else "downwards",
        )
        rows = await self.execute(
            " ".join(self.text[part] for part in parts),
            *(owner, query.model, query.status, *older, *newer, query.limit + 1),
        )
        found = [response_from_row(row) for row in rows]
        shown = found[: query.limit]
        return ResponsePage(shown[::-1] if query.is_backward else shown, len(found) > query.limit)

    async def find_cursor(
        self, owner: str, response_id: str | None
    ) -> tuple[float | None, str | None]:
        """Where a response is in a list; nowhere where none is asked for."""
        if response_id is None:
            return None, None
        if rows := await self.execute_named("cursor", response_id, owner):
            return rows[0][0], response_id
        raise CursorUnknown(response_id)

    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        found = await self.find_turns(owner, response_id)
        await self.uses.mark_turns_used([response.id for response in found])
        return found

    async def find_turns(self, owner: str, response_id: str) -> list[Response]:
        """As `list_turns`, and no use of it."""
        return await self.select_responses("conversation", response_id, owner)

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        now = time.time()
        await self.execute_batch(
            "touch", [(response_id, owner, now) for response_id in sorted(ids)]
        )

    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        if renew:
            rows = await self.execute_named("renew", list(ids), GONE, self.limits.lease_s)
        else:
            rows = await self.execute_named("running", list(ids), GONE)
        return {row[0] for row in rows}

    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        done = await self.execute_named(
            "append",
            response.id,
            response.owner,
            response.created_at,
            chunk.first_number,
            chunk.last_number,
            chunk.events,
        )
        if (surplus := chunk.last_number - self.limits.max_events) >= 0:
            await self.execute_named("trim", response.id, surplus)
        return bool(done)

    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        found = await self.find_response(owner, response_id)
        if found is None:
            return None
        rows = await self.execute_named("log", response_id, after_number)
        return EventLog([EventChunk(row[0], row[1], row[2]) for row in rows], found.is_running)

    async def sweep(self) -> SweepResult:
        await self.uses.flush()
        failed = await self.execute_named("fail", GONE, self.limits.lease_s)
        expired, done = 0, BATCH
        while done == BATCH:
            oldest = time.time() - self.limits.ttl_s
            done = len(await self.execute_named("expire", oldest, BATCH))
            expired += done
        await self.execute_named("forget", self.limits.events_kept_s)
        await self.sweep_conversations()
        return SweepResult(expired, await self.evict_lru(""), len(failed))

    async def collect_stats(self, owner: str) -> StoreStats:
        await self.execute_named("fail", GONE, self.limits.lease_s)
        statuses, models = Counter[str](), Counter[str]()
        rows = await self.execute_named("stats", owner)
        for status, model, count, *_ in rows:
            statuses[status] += count
            models[model] += count
        logs = await self.execute_named("event bytes") if owner == EVERYBODY else None
        evictions = await self.execute_named("meta get", "evictions")
        return StoreStats(
            statuses=dict(statuses),
            models=dict(models),
            bytes=sum(int(row[3]) for row in rows),
            event_bytes=int(logs[0][0] or 0) if logs else None,
            oldest=min((row[4] for row in rows), default=None),
            evictions=evictions[0][0] if evictions else 0,
            owners=dict(await self.count_by_owner(owner)),
        )

    async def find_response(self, owner: str, response_id: str) -> Response | None:
        """As `get`, and no use of it."""
        found = await self.select_responses("get", response_id, owner)
        return found[0] if found else None

    async def select_responses(self, name: str, *values: Any) -> list[Response]:
        """What a statement finds that tells of each row, last, whether its lease has lapsed."""
        rows = await self.execute_named(name, *values)
        if any(row[-1] for row in rows):
            await self.execute_named("fail", GONE, self.limits.lease_s)
            rows = await self.execute_named(name, *values)
        return [response_from_row(row) for row in rows]

    async def write_uses(self, uses: list[tuple[str, float]]) -> None:
        """Write down when responses were used."""
        await self.execute_batch(
            "touch", [(response_id, EVERYBODY, at) for response_id, at in uses]
        )

    async def evict_lru(self, spared_id: str) -> int:
        """Drop what was used longest ago until nobody, and all together, have more than may be."""
        await self.uses.flush()
        shares = dict(await self.count_by_owner(EVERYBODY))
        gone = 0
        for owner, target in plan_evictions(shares, self.limits).items():
            gone += len(await self.execute_named("evict", owner, target, spared_id))
        return await self.count_evictions(gone)

    async def count_evictions(self, count: int) -> int:
        """Count what had to make room."""
        if count:
            await self.execute_named("meta add", "evictions", count)
        return count

    async def count_by_owner(self, owner: str) -> list[tuple[str, int]]:
        """How many responses each owner has, the fullest first."""
        return [(row[0], row[1]) for row in await self.execute_named("shares", owner)]


def response_from_row(row: Sequence[Any]) -> Response:
    """A response from its columns."""
    return Response(
        id=row[0],
        owner=row[1],
        model=row[2],
        status=row[3],
        created_at=row[4],
        previous_id=row[5],
        error=row[6],
        body=row[7],
        input=row[8],
    )


@cache
def load_statements(file: str) -> dict[str, str]:
    """The statements of a file by name, without comments."""
    text = files(__package__).joinpath(file).read_text("utf-8")
    found = {}
    for part in text.split("-- name: ")[1:]:
        name, *lines = part.splitlines()
        found[name] = "\n".join(line for line in lines if not line.startswith("--")).strip()
    return found


def estimate_size(response: Response) -> int:
    """About how many bytes a new response takes."""
    return len(response.body) + len(response.input)
