"""The backends that speak SQL: the schema, and each operation as one statement.

SQLite and PostgreSQL take the same text but for the words in braces, which `Dialect` has. Each
operation being one statement, it is atomic without a transaction of our own, and takes one round
trip. There is no layer between the text and the driver: SQLAlchemy's asynchronous engine was
measured at 0.14 of what aiosqlite does with the same statements, and at 0.5 of asyncpg.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec

from .backend import (
    EVERYBODY,
    FINISHED,
    GONE,
    RUNNING,
    STATUSES,
    Backend,
    Chunk,
    CursorUnknown,
    Limits,
    Log,
    Page,
    Query,
    Response,
    Stats,
    Swap,
    Swept,
    Uses,
    targets,
    too_new,
)

# One entry for each version of the schema: what leads to it from the one before.
SCHEMA = (
    (
        """CREATE TABLE {name}_responses (
            id {text} PRIMARY KEY,
            owner {text} NOT NULL,
            model {text} NOT NULL,
            status {text} NOT NULL,
            created_at {float} NOT NULL,
            accessed_at {float} NOT NULL,
            lease {float},
            previous_id {text},
            error TEXT NOT NULL,
            body {bytes} NOT NULL,
            input {bytes} NOT NULL
        )""",
        """CREATE TABLE {name}_events (
            response_id {text} NOT NULL REFERENCES {name}_responses ON DELETE CASCADE,
            first BIGINT NOT NULL,
            last BIGINT NOT NULL,
            written_at {float} NOT NULL,
            events {bytes} NOT NULL,
            PRIMARY KEY (response_id, first)
        )""",
    ),
    (
        "CREATE INDEX {name}_by_age ON {name}_responses (created_at)",
        "CREATE INDEX {name}_by_owner ON {name}_responses (owner, created_at)",
        "CREATE INDEX {name}_by_model ON {name}_responses (model, created_at)",
        # Most are completed: a list of those finds them without.
        "CREATE INDEX {name}_by_status ON {name}_responses (status, created_at)"
        " WHERE status <> 'completed'",
        "CREATE INDEX {name}_by_use ON {name}_responses ((lease IS NOT NULL), accessed_at)",
        "CREATE INDEX {name}_by_lease ON {name}_responses (lease) WHERE lease IS NOT NULL",
        "CREATE INDEX {name}_events_by_age ON {name}_events (written_at)",
    ),
    ("CREATE INDEX {name}_by_share ON {name}_responses (owner, (lease IS NOT NULL), accessed_at)",),
)
META = "CREATE TABLE IF NOT EXISTS {name}_meta (key {text} PRIMARY KEY, value BIGINT NOT NULL)"
META_GET = "SELECT value FROM {name}_meta WHERE key = $1"
META_ADD = """INSERT INTO {name}_meta (key, value) VALUES ($1, $2)
    ON CONFLICT (key) DO UPDATE SET value = {name}_meta.value + $2"""
# Turns of a conversation: what ends a chain that bites its own tail.
LONGEST = 10_000
META_SCHEMA = """INSERT INTO {name}_meta (key, value) VALUES ('schema', %d)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value"""
TABLES = ("events", "responses", "meta")

COLUMNS = ("id", "owner", "model", "status", "created_at", "previous_id", "error", "body", "input")
ALL = ", ".join(COLUMNS)
CREATE = f"""INSERT INTO {{name}}_responses ({ALL}, accessed_at, lease)
    %s ON CONFLICT (id) DO NOTHING RETURNING id"""
CREATE_ONE = CREATE % "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, {now} + $11)"
PUT = """UPDATE {name}_responses
    SET status = $4, error = $5, body = $6, accessed_at = $7, lease = {now} + $8
    WHERE id = $1 AND owner = $2 AND created_at = $3
    AND (status NOT IN (%s) OR (status = 'failed' AND error = $9)) RETURNING 1"""
SET_STATUS = f"""UPDATE {{name}}_responses SET status = $3, error = $4, lease = {{now}} + $5
    WHERE id = $1 AND $2 IN ('*', owner) AND status IN (%s) RETURNING {ALL}"""
GET = f"""SELECT {ALL}, {{lapsed}} FROM {{name}}_responses
    WHERE id = $1 AND $2 IN ('*', owner)"""
GET_MANY = f"SELECT {ALL}, {{lapsed}} FROM {{name}}_responses WHERE id {{among}}"
DELETE = "DELETE FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner) RETURNING 1"
TOUCH = """UPDATE {name}_responses SET accessed_at = $3
    WHERE id = $1 AND $2 IN ('*', owner) AND accessed_at < $3"""
# So that turns are looked up by their ids, the one before is a subquery of its own, and no index
# fits the owner: before it has analyzed a table PostgreSQL takes an owner's responses for few, and
# went through all of them for each turn.
CONVERSATION = f"""WITH RECURSIVE turns (turn, previous, age) AS (
        SELECT id, previous_id, 0 FROM {{name}}_responses
        WHERE id = $1 AND $2 IN ('*', owner || '')
        UNION ALL
        SELECT previous, (
            SELECT previous_id FROM {{name}}_responses WHERE id = previous AND $2 IN ('*', owner)
        ), age + 1
        FROM turns WHERE previous IS NOT NULL AND age < {LONGEST}
    )
    SELECT {ALL}, {{lapsed}} FROM turns JOIN {{name}}_responses ON id = turn
    WHERE $2 IN ('*', owner || '') ORDER BY age DESC"""
RUNNING_AMONG = """SELECT id FROM {name}_responses
    WHERE id {among} AND (lease IS NOT NULL OR (status = 'failed' AND error = $2))"""
# Nothing and some seconds are nothing.
RENEW = """UPDATE {name}_responses SET lease = lease - lease + {now} + $3
    WHERE id {among} AND (lease IS NOT NULL OR (status = 'failed' AND error = $2)) RETURNING id"""
APPEND = """INSERT INTO {name}_events (response_id, first, last, written_at, events)
    SELECT id, CAST($4 AS BIGINT), CAST($5 AS BIGINT), {now}, CAST($6 AS {bytes})
    FROM {name}_responses WHERE id = $1 AND owner = $2 AND created_at = $3
    ON CONFLICT (response_id, first) DO UPDATE SET written_at = {now} RETURNING 1"""
TRIM = "DELETE FROM {name}_events WHERE response_id = $1 AND last <= $2"
LOG = """SELECT first, last, events FROM {name}_events
    WHERE response_id = $1 AND last > $2 ORDER BY first"""
CURSOR = "SELECT created_at FROM {name}_responses WHERE id = $1 AND $2 IN ('*', owner)"
PAGE = f"SELECT {ALL} FROM {{name}}_responses WHERE %s ORDER BY created_at %s, id %s LIMIT %d"
FAIL = """UPDATE {name}_responses SET status = 'failed', error = $1, lease = NULL
    WHERE {lapsed} RETURNING 1"""
EXPIRE = """WITH gone AS (
        SELECT id FROM {name}_responses
        WHERE (lease IS NOT NULL) = {false} AND accessed_at < $1 LIMIT $2 {skip}
    ) DELETE FROM {name}_responses WHERE id IN (SELECT id FROM gone) RETURNING 1"""
# An index has all that these two need; of owners with as many the one first who has stored nothing
# for longest.
SHARES = """SELECT owner, count(*) FROM {name}_responses WHERE $1 IN ('*', owner)
    GROUP BY owner ORDER BY count(*) DESC, max(created_at)"""
# What runs sorts behind what does not.
EVICT = """WITH gone AS (
        SELECT id FROM {name}_responses WHERE owner = $1 AND id <> $3
        ORDER BY (lease IS NOT NULL), accessed_at
        LIMIT {most}(0, (SELECT count(*) FROM {name}_responses WHERE owner = $1) - $2) {skip}
    ) DELETE FROM {name}_responses WHERE id IN (SELECT id FROM gone) RETURNING 1"""
FORGET = """DELETE FROM {name}_events WHERE written_at < {now} - $1 AND response_id IN (
    SELECT id FROM {name}_responses WHERE lease IS NULL) RETURNING 1"""
STATS = """SELECT status, model, count(*), sum(length(body) + length(input)), min(created_at)
    FROM {name}_responses WHERE $1 IN ('*', owner) GROUP BY status, model"""
EVENT_BYTES = "SELECT sum(length(events)) FROM {name}_events"
# Rows that one statement deletes.
BATCH = 1000


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What differs: the words in braces, and how the text is marked up for the driver.

    Args:
        words: by name.
        marked: the text as the driver takes its placeholders, ``$1`` and so on before.
    """

    words: dict[str, str]
    marked: Callable[[str], str] = str


class Sql(Backend):
    """A backend by statements; a subclass brings the driver.

    Args:
        url: without a namespace.
        limits: what is kept.
        name: what the tables' names begin with.
        dialect: see there.
    """

    def __init__(self, url: str, limits: Limits, name: str, dialect: Dialect) -> None:
        super().__init__(url, limits)
        words = {"name": name, **dialect.words}
        # So that a server that was away for long fails nothing when it comes back.
        words["lapsed"] = f"(lease IS NOT NULL AND lease < {words['now']} AND {words['steady']})"
        self.text: Callable[[str], str] = lru_cache(256)(
            lambda template: dialect.marked(template.format(**words))
        )
        self.uses = Uses(self.used)
        # Counting is slow, so it is done once in a while: of all, and of an owner.
        self.every, self.every_one = max(1, limits.max_size // 100), max(1, limits.share // 100)
        self.created = Counter[str]()

    @abstractmethod
    async def fetch(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        """Run one statement, and have what it gives."""

    @abstractmethod
    async def many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        """Run one statement for each set of values."""

    def steps(self, found: int) -> list[str]:
        """The statements that lead from a schema's version to the newest; none from that.

        Raises:
            VllmopsError: ``store.schema``.
        """
        if found > len(SCHEMA):
            raise too_new(self.url, found, len(SCHEMA))
        steps = [statement for step in SCHEMA[found:] for statement in step]
        if steps:
            steps.append(META_SCHEMA % len(SCHEMA))
        return [self.text(statement) for statement in steps]

    def lease(self, status: str) -> float | None:
        return self.limits.lease_s if status in RUNNING else None

    async def close(self) -> None:
        await self.uses.flush()

    async def drop(self) -> None:
        for table in TABLES:
            await self.fetch(self.text(f"DROP TABLE IF EXISTS {{name}}_{table}"))

    async def create(self, response: Response) -> bool:
        done = await self.add(response)
        if done:
            self.created[response.owner] += 1
            if self.created.total() >= self.every:
                self.created.clear()
                await self.evict(response.id)
            elif self.limits.max_per_key and self.created[response.owner] >= self.every_one:
                del self.created[response.owner]
                await self.uses.flush()
                given = (response.owner, self.limits.share, response.id)
                await self.evicted(len(await self.fetch(self.text(EVICT), *given)))
        return done

    async def add(self, response: Response) -> bool:
        """As `create`, and none is evicted."""
        return bool(await self.fetch(self.text(CREATE_ONE), *self.row(response)))

    def row(self, response: Response) -> tuple[Any, ...]:
        """What `CREATE` takes for a response."""
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
            self.lease(response.status),
        )

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        done = await self.fetch(
            self.text(among(PUT, frozenset(unless_status))),
            response.id,
            response.owner,
            response.created_at,
            response.status,
            response.error,
            response.body,
            time.time(),
            self.lease(response.status),
            GONE,
        )
        return bool(done)

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed: Collection[str] = RUNNING,
        error: str = "",
    ) -> Swap:
        done = await self.fetch(
            self.text(among(SET_STATUS, frozenset(allowed))),
            response_id,
            owner,
            status,
            error,
            self.lease(status),
        )
        if done:
            return Swap(True, made(done[0]))
        return Swap(False, await self.find(owner, response_id))

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await self.find(owner, response_id)
        if found is not None:
            await self.uses.note([response_id])
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self.fetch(self.text(DELETE), response_id, owner))

    async def page(self, owner: str, query: Query) -> Page:
        await self.fetch(self.text(FAIL), GONE)
        upwards = query.descending == query.backwards
        conditions, values = ["TRUE"], list[Any]()

        def placed(value: Any) -> str:
            values.append(value)
            return f"${len(values)}"

        if owner != EVERYBODY:
            conditions.append(f"owner = {placed(owner)}")
        if query.model is not None:
            conditions.append(f"model = {placed(query.model)}")
        if query.status is not None:
            conditions.append(f"status = '{checked(query.status)}'")
            if query.status != "completed":
                # So that the partial index is seen to fit.
                conditions.append("status <> 'completed'")
        for cursor, newer in (
            (query.after, not query.descending),
            (query.before, query.descending),
        ):
            if cursor is not None:
                rows = await self.fetch(self.text(CURSOR), cursor, owner)
                if not rows:
                    raise CursorUnknown(cursor)
                sign = ">" if newer else "<"
                key = f"({placed(rows[0][0])}, {placed(cursor)})"
                conditions.append(f"(created_at, id) {sign} {key}")
        direction = "ASC" if upwards else "DESC"
        where = " AND ".join(conditions)
        statement = PAGE % (where, direction, direction, query.limit + 1)
        found = [made(row) for row in await self.fetch(self.text(statement), *values)]
        shown = found[: query.limit]
        return Page(shown[::-1] if query.backwards else shown, len(found) > query.limit)

    async def conversation(self, owner: str, response_id: str) -> list[Response]:
        found = await self.alive(CONVERSATION, response_id, owner)
        await self.uses.note([response.id for response in found])
        return found

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        now = time.time()
        await self.many(
            self.text(TOUCH), [(response_id, owner, now) for response_id in sorted(ids)]
        )

    async def running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        if renew:
            rows = await self.fetch(self.text(RENEW), list(ids), GONE, self.limits.lease_s)
        else:
            rows = await self.fetch(self.text(RUNNING_AMONG), list(ids), GONE)
        return {row[0] for row in rows}

    async def append(self, response: Response, chunk: Chunk) -> bool:
        done = await self.fetch(
            self.text(APPEND),
            response.id,
            response.owner,
            response.created_at,
            chunk.first,
            chunk.last,
            chunk.events,
        )
        if (surplus := chunk.last - self.limits.max_events) >= 0:
            await self.fetch(self.text(TRIM), response.id, surplus)
        return bool(done)

    async def log(self, owner: str, response_id: str, after: int) -> Log | None:
        found = await self.find(owner, response_id)
        if found is None:
            return None
        rows = await self.fetch(self.text(LOG), response_id, after)
        return Log([Chunk(row[0], row[1], row[2]) for row in rows], found.running)

    async def sweep(self) -> Swept:
        await self.uses.flush()
        failed = await self.fetch(self.text(FAIL), GONE)
        expired, done = 0, BATCH
        while done == BATCH:
            oldest = time.time() - self.limits.ttl_s
            done = len(await self.fetch(self.text(EXPIRE), oldest, BATCH))
            expired += done
        await self.fetch(self.text(FORGET), self.limits.events_kept_s)
        return Swept(expired, await self.evict(""), len(failed))

    async def stats(self, owner: str) -> Stats:
        await self.fetch(self.text(FAIL), GONE)
        statuses, models = Counter[str](), Counter[str]()
        rows = await self.fetch(self.text(STATS), owner)
        for status, model, count, *_ in rows:
            statuses[status] += count
            models[model] += count
        logs = await self.fetch(self.text(EVENT_BYTES)) if owner == EVERYBODY else None
        evictions = await self.fetch(self.text(META_GET), "evictions")
        return Stats(
            statuses=dict(statuses),
            models=dict(models),
            bytes=sum(int(row[3]) for row in rows),
            event_bytes=int(logs[0][0] or 0) if logs else None,
            oldest=min((row[4] for row in rows), default=None),
            evictions=evictions[0][0] if evictions else 0,
            owners=dict(await self.shares(owner)),
        )

    async def find(self, owner: str, response_id: str) -> Response | None:
        """As `get`, and no use of it."""
        found = await self.alive(GET, response_id, owner)
        return found[0] if found else None

    async def alive(self, statement: str, *values: Any) -> list[Response]:
        """What a statement finds that tells of each row, last, whether its lease has lapsed."""
        rows = await self.fetch(self.text(statement), *values)
        if any(row[-1] for row in rows):
            await self.fetch(self.text(FAIL), GONE)
            rows = await self.fetch(self.text(statement), *values)
        return [made(row) for row in rows]

    async def used(self, uses: list[tuple[str, float]]) -> None:
        """Write down when responses were used."""
        await self.many(
            self.text(TOUCH), [(response_id, EVERYBODY, at) for response_id, at in uses]
        )

    async def evict(self, spared: str) -> int:
        """Drop what was used longest ago until nobody, and all together, have more than may be."""
        await self.uses.flush()
        shares = dict(await self.shares(EVERYBODY))
        gone = 0
        for owner, target in targets(shares, self.limits).items():
            gone += len(await self.fetch(self.text(EVICT), owner, target, spared))
        return await self.evicted(gone)

    async def evicted(self, count: int) -> int:
        """Count what had to make room."""
        if count:
            await self.fetch(self.text(META_ADD), "evictions", count)
        return count

    async def shares(self, owner: str) -> list[tuple[str, int]]:
        """How many responses each owner has, the fullest first."""
        return [(row[0], row[1]) for row in await self.fetch(self.text(SHARES), owner)]


def made(row: Sequence[Any]) -> Response:
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
def among(template: str, statuses: frozenset[str]) -> str:
    """A statement with a set of statuses in its text; of no status where the set is empty."""
    return template % ", ".join(f"'{checked(status)}'" for status in sorted(statuses or {""}))


def checked(status: str) -> str:
    """A status, which is safe in a statement's text.

    Raises:
        ValueError: it is none.
    """
    if status and status not in STATUSES:
        raise ValueError(f"{status!r} is not a status")
    return status
