"""The backend ``redis://…``, Valkey's too: for several machines; needs the package redis.

All operations are one Lua script, ``redis.lua``. What is acknowledged survives the server's death
with ``appendonly yes`` and ``appendfsync always``. With ``everysec`` it answers before it has
written while the disk is busy with what it wrote before: up to 2 s can be lost then.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from redis.exceptions import BusyLoadingError, NoScriptError, RedisError, ResponseError

from vllmops.support.errors import VllmopsError
from vllmops.support.urls import parse_store_url

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
)
from .batching import CallBatcher
from .redis_conversations import RedisConversations
from .redis_primary import TROUBLE, make_connection_source, parse_wait_replicas

if TYPE_CHECKING:
    from .redis_primary import Connection

SCHEMA = 2
LEAST_VERSION = (6, 2)  # ZADD GT
BATCH = 1000
# Entries that one call looks at for a page: a Redis server does nothing else meanwhile.
LOOKED_AT = 5000


# How a server begins an answer that refuses a call and changes nothing: another one takes writes,
# or will, or this one will soon.
ELSEWHERE = {"READONLY", "MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "LOADING"}
ELSEWHERE |= {"NOREPLICAS", "MISCONF"}
# When it is called again, seconds after one another; the caller tries again after that.
PAUSES_S = (0.05, 0.1, 0.2)
# As a model, in the script, too: it may be any.
ANY = "\0"
# Those that are acknowledged to somebody; the rest is done again by itself where it is lost.
WRITES = frozenset({"create", "put", "set_status", "delete", "append", "open"}) | {
    "create_conversation",
    "set_metadata",
    "delete_conversation",
    "delete_entry",
    "add_entries",
    "hold",
}
# For how long a replica is waited for; the least there is, where there was none.
WAIT_MS, GLANCE_MS = 1000, 1


class UnconfirmedError(RedisError):
    """A write that too few replicas have: it may be lost when another server takes over."""


class Redis(RedisConversations):
    """A server for all; it comes back by itself when that does."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = TROUBLE

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        super().__init__(url, limits)
        self.root = f"{{{name}}}:"
        parts = parse_store_url(url)
        self.source = make_connection_source(url, parts, self.root)
        self.client = self.source.client
        self.script = self.client.register_script(
            files(__package__).joinpath("redis.lua").read_text("utf-8")
        )
        self.calling = CallBatcher(
            self.send_with_retries, lambda words: sum(map(estimate_size, words))
        )
        self.uses = LastUseBuffer(self.write_uses)
        self.replicas, self.strict = parse_wait_replicas(parts)

    async def run_operation(self, operation: str, *values: Any) -> Any:
        """Run an operation of the script."""
        return unwrap_answer(await self.calling(self.build_command(operation, values)))

    async def run_slow_operation(self, operation: str, *values: Any) -> Any:
        """As `run_operation`, for what may take long: nobody waits for it who does not call it."""
        (found,) = await self.send_with_retries([self.build_command(operation, values)])
        return unwrap_answer(found)

    def build_command(self, operation: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return ("EVALSHA", self.script.sha, 1, self.root, operation, repr(time.time()), *values)

    async def send_with_retries(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """What the server answers to each, be it an error."""
        found = await self.send_once(calls)
        for pause_s in PAUSES_S:
            refused = [i for i, answer in enumerate(found) if is_retryable(answer)]
            if not refused:
                break
            await asyncio.sleep(pause_s)
            again = await self.send_once([calls[i] for i in refused])
            for i, answer in zip(refused, again, strict=True):
                found[i] = answer
        return found

    async def send_once(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """As `send_with_retries`; another server is looked for where this one refuses a call."""
        writes = [i for i, call in enumerate(calls) if call[4] in WRITES] if self.replicas else []
        async with self.source.lend() as connection:
            wait_ms = GLANCE_MS if self.source.has_no_replica and not self.strict else WAIT_MS
            wait = [("WAIT", self.replicas, wait_ms)] if writes else []
            found = await send_commands(connection, [*calls, *wait])
            unknown = [i for i, answer in enumerate(found) if isinstance(answer, NoScriptError)]
            if unknown:
                load = ("SCRIPT LOAD", self.script.script)
                again = await send_commands(connection, [load, *(calls[i] for i in unknown), *wait])
                for i, answer in zip(unknown, again[1:], strict=False):
                    found[i] = answer
                found[len(calls) :] = again[len(again) - len(wait) :]
            refused = any(is_retryable(answer) for answer in found)
            if refused or (writes and not await self.is_confirmed(connection, found[-1])):
                await self.source.abandon_server()
                # Some of them may have been done before the others were refused.
                for i in writes:
                    if not isinstance(found[i], RedisError):
                        found[i] = UnconfirmedError(
                            "it was written, but too few replicas have confirmed the write"
                        )
        return found[: len(calls)]

    async def is_confirmed(self, connection: Connection, count: Any) -> bool:
        """Whether a write has reached enough replicas, or there is none.

        Args:
            connection: on which it was written.
            count: how many have confirmed it.
        """
        glanced = self.source.has_no_replica
        self.source.has_no_replica = unwrap_answer(count) < self.replicas
        if self.source.has_no_replica and not self.strict:
            (role,) = await send_commands(connection, [("ROLE",)])
            if unwrap_answer(role)[0] != b"master":
                return False
            if not role[2]:
                # None is connected: it may be dead, or take writes itself by now.
                return await self.source.is_still_primary(connection)
            if glanced:
                (count,) = await send_commands(connection, [("WAIT", self.replicas, WAIT_MS)])
            self.source.has_no_replica = unwrap_answer(count) < self.replicas
        return not self.source.has_no_replica

    async def write_uses(self, uses: list[tuple[str, float]]) -> None:
        """Write down when responses were used, where none is created with which that goes."""
        await self.run_slow_operation("note", encode_uses(uses))

    async def exists(self) -> bool:
        # A store that somebody has emptied has no schema until it is opened again.
        keys = (f"{self.root}{name}" for name in ("schema", "all", "conversations"))
        return bool(await self.client.exists(*keys))

    async def open(self) -> None:
        found, version = await self.run_operation("open", SCHEMA)
        if found > SCHEMA:
            raise make_schema_error(self.url, found, SCHEMA)
        while found < SCHEMA and await self.run_slow_operation("build", SCHEMA, BATCH) == BATCH:
            pass
        # What tells none is somebody's that speaks as Redis does.
        if version and tuple(map(int, version.split(b"."))) < LEAST_VERSION:
            raise VllmopsError(
                "store.redis",
                f"the server is compatible with Redis {version.decode()}; the store needs 6.2",
                "install a newer Redis or Valkey, or use another --store",
            )

    async def close(self) -> None:
        try:
            await self.uses.flush()
            await self.conversation_uses.flush()
        finally:
            await self.source.close()

    async def delete_store(self) -> None:
        async for key in self.client.scan_iter(match=f"{self.root}*", count=BATCH):
            await self.client.delete(key)

    @property
    def failure_args(self) -> tuple[Any, ...]:
        """What failing a run takes."""
        return (self.limits.lease_s, self.limits.events_kept_s, GONE)

    async def create(self, response: Response) -> bool:
        return bool(await self.run_operation("create", *self.build_create_args(response)))

    def build_create_args(self, response: Response) -> tuple[Any, ...]:
        return (
            response.id,
            response.owner,
            response.model,
            response.status,
            repr(response.created_at),
            response.previous_id or "",
            response.error,
            response.body,
            response.input,
            self.limits.lease_s,
            self.limits.max_size,
            self.limits.owner_limit,
            encode_uses(self.uses.take_pending()),
        )

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return bool(
            await self.run_operation(
                "put", *self.build_put_args(response, join_statuses(unless_status))
            )
        )

    def build_put_args(self, response: Response, unless_status: str) -> tuple[Any, ...]:
        return (
            response.id,
            response.owner,
            repr(response.created_at),
            unless_status,
            response.status,
            response.error,
            response.body,
            *self.failure_args,
        )

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed_statuses: Collection[str] = RUNNING,
        error: str = "",
    ) -> StatusChange:
        found = await self.run_operation(
            "set_status",
            response_id,
            owner,
            join_statuses(allowed_statuses),
            status,
            error,
            self.limits.lease_s,
            self.limits.events_kept_s,
        )
        return (
            StatusChange(bool(found[0]), response_from_fields(found[1]))
            if found
            else StatusChange(False, None)
        )

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await self.run_operation("get", response_id, owner, *self.failure_args)
        if not found:
            return None
        await self.uses.mark_used([response_id])
        return response_from_fields(found)

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self.run_operation("delete", response_id, owner))

    async def list_responses(self, owner: str, query: ResponseQuery) -> ResponsePage:
        await self.run_operation("fail", *self.failure_args)
        upwards = query.descending == query.is_backward
        after, before = [
            (await self.find_cursor(owner, cursor), cursor) if cursor else ("", "")
            for cursor in (query.after_id, query.before_id)
        ]
        start, end = (before, after) if query.is_backward else (after, before)
        found: list[Response] = []
        while True:
            part = await self.run_operation(
                "page",
                owner,
                ANY if query.model is None else query.model,
                query.status or EVERYBODY,
                int(upwards),
                *start,
                *end,
                query.limit + 1 - len(found),
                LOOKED_AT,
            )
            found += [response_from_fields(response) for response in part[0]]
            if len(part) == 1:
                break
            start = part[1], part[2]
        shown = found[: query.limit]
        return ResponsePage(shown[::-1] if query.is_backward else shown, len(found) > query.limit)

    async def find_cursor(self, owner: str, response_id: str) -> str:
        """When a response was made, as the server has it."""
        found = await self.run_operation("cursor", response_id, owner)
        if found is None:
            raise CursorUnknown(response_id)
        return str(found, "ascii")

    async def list_turns(self, owner: str, response_id: str) -> list[Response]:
        found = await self.run_operation("conversation", response_id, owner, *self.failure_args)
        turns = [response_from_fields(response) for response in reversed(found)]
        await self.uses.mark_turns_used([response.id for response in turns])
        return turns

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        given = list(ids)
        for start in range(0, len(given), BATCH):
            await self.run_operation("touch", owner, *given[start : start + BATCH])

    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        found = await self.run_operation(
            "running", self.limits.lease_s if renew else "", GONE, *ids
        )
        return {name.decode() for name in found}

    async def append_events(self, response: Response, chunk: EventChunk) -> bool:
        done = await self.run_operation(
            "append",
            response.id,
            response.owner,
            repr(response.created_at),
            chunk.first_number,
            chunk.last_number,
            chunk.events,
            self.limits.max_events,
            self.limits.events_kept_s,
        )
        return bool(done)

    async def read_events(self, owner: str, response_id: str, after_number: int) -> EventLog | None:
        found = await self.run_operation(
            "log", response_id, owner, after_number, *self.failure_args
        )
        if not found:
            return None
        chunks = []
        for member in found[1]:
            first, last, events = member.split(b":", 2)
            chunks.append(EventChunk(int(first), int(last), events))
        return EventLog(chunks, found[0].decode() in RUNNING)

    async def sweep(self) -> SweepResult:
        await self.uses.flush()
        failed = await self.run_slow_operation("fail", *self.failure_args)
        expired, done = 0, BATCH
        while done == BATCH:
            done = await self.run_slow_operation(
                "expire", repr(time.time() - self.limits.ttl_s), BATCH
            )
            expired += done
        await self.sweep_conversations()
        return SweepResult(expired, await self.evict_lru(), failed)

    async def evict_lru(self) -> int:
        return int(
            await self.run_slow_operation("evict", self.limits.max_size, self.limits.owner_limit)
        )

    async def collect_stats(self, owner: str) -> StoreStats:
        await self.run_slow_operation("fail", *self.failure_args)
        statuses, models, owners = Counter[str](), Counter[str](), Counter[str]()
        size, event_bytes, rank, done = 0, 0, 0, BATCH
        oldest, evictions = b"", 0
        while done == BATCH:
            part = await self.run_slow_operation("stats", owner, rank, BATCH)
            done, by_status, by_model, here, logs, oldest, evictions, by_owner = part
            rank += done
            size += here
            event_bytes += logs
            statuses.update(msgspec.json.decode(by_status, type=dict[str, int]))
            models.update(msgspec.json.decode(by_model, type=dict[str, int]))
            owners.update(msgspec.json.decode(by_owner, type=dict[str, int]))
        return StoreStats(
            statuses=dict(statuses),
            models=dict(models),
            bytes=size,
            event_bytes=event_bytes if owner == EVERYBODY else None,
            oldest=float(oldest) if oldest else None,
            evictions=evictions,
            owners=dict(owners.most_common()),
        )

    async def list_caveats(self) -> list[str]:
        try:
            found = await self.client.config_get("appendonly", "appendfsync", "maxmemory-policy")
        except RedisError:  # somebody else's, who says nothing of it
            return []
        config = {str(key): str(value) for key, value in found.items()}
        caveats = []
        if config.get("appendonly") == "no":
            caveats.append("appendonly no: a crash may lose the last responses")
        elif (when := config.get("appendfsync", "always")) != "always":
            caveats.append(
                f"appendfsync {when}: a crash while the disk is slow may lose the last 2 s"
            )
        if self.replicas:
            many = f"{self.replicas} replica{'s' * (self.replicas > 1)}"
            caveats.append(
                f"a write is acknowledged once {many} confirmed it, and refused where "
                "that is not so"
                if self.strict
                else f"a write is acknowledged once {many} confirmed it; while none is "
                "connected the primary alone has it: ?wait_replicas=1 refuses it then"
            )
        elif int((await self.client.info("replication")).get("connected_slaves", 0)):
            caveats.append(
                "it has replicas, which are not waited for: when one takes over, the last "
                "responses may be lost; ?wait_replicas=1 waits"
            )
        if config.get("maxmemory-policy", "noeviction") != "noeviction":
            caveats.append(
                f"maxmemory-policy {config['maxmemory-policy']}: it may drop any response"
            )
        return caveats


async def send_commands(connection: Connection, calls: Collection[tuple[Any, ...]]) -> list[Any]:
    """What the server answers to some commands, which are sent at once.

    A pipeline of redis-py's would give the connection back, and replicas confirm what came on one
    and the same; it would also ask for the script before each call: 0.26 ms, 2 % of a request.
    """
    await connection.send_packed_command(connection.pack_commands(calls))
    found: list[Any] = []
    for _ in calls:
        try:
            found.append(await connection.read_response())
        except (ResponseError, BusyLoadingError) as error:
            found.append(error)
    return found


def unwrap_answer(answer: Any) -> Any:
    """What a call gives.

    Raises:
        RedisError: the server's answer was an error.
    """
    if isinstance(answer, RedisError):
        raise answer
    return answer


def is_retryable(answer: Any) -> bool:
    """Whether an answer refuses a call that another server, or this one soon, would take."""
    if not isinstance(answer, RedisError):
        return False
    return (answer.status_code or f"{answer}".partition(" ")[0]) in ELSEWHERE


def estimate_size(value: Any) -> int:
    """The bytes of a large value; nothing for others."""
    return len(value) if isinstance(value, bytes) else 0


def encode_uses(uses: Collection[tuple[str, float]]) -> bytes:
    """Uses as the script takes them, each time before its id."""
    return msgspec.json.encode([value for use in uses for value in reversed(use)])


def response_from_fields(fields: list[bytes]) -> Response:
    """A response from its id and its fields."""
    names = [field.decode() for field in fields[:7]]
    return Response(
        id=names[0],
        owner=names[1],
        model=names[2],
        status=names[3],
        created_at=float(names[4]),
        previous_id=names[5] or None,
        error=names[6],
        body=fields[7],
        input=fields[8],
    )
