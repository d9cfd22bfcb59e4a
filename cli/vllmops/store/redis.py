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

from ..errors import VllmopsError
from .backend import (
    EVERYBODY,
    FINISHED,
    GONE,
    RUNNING,
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
    too_new,
    words,
)
from .gathering import Gathered
from .redis_conversations import RedisConversations
from .redis_source import TROUBLE, source, waited_for
from .urls import parsed

if TYPE_CHECKING:
    from .redis_source import Connection

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
        parts = parsed(url)
        self.source = source(url, parts, self.root)
        self.client = self.source.client
        self.script = self.client.register_script(
            files(__package__).joinpath("redis.lua").read_text("utf-8")
        )
        self.calling = Gathered(self.call_all, lambda words: sum(map(weight, words)))
        self.uses = Uses(self.used)
        self.replicas, self.strict = waited_for(parts)

    async def call(self, operation: str, *values: Any) -> Any:
        """Run an operation of the script."""
        return answered(await self.calling(self.command(operation, values)))

    async def apart(self, operation: str, *values: Any) -> Any:
        """As `call`, for what may take long: nobody waits for it who does not call it."""
        (found,) = await self.call_all([self.command(operation, values)])
        return answered(found)

    def command(self, operation: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return ("EVALSHA", self.script.sha, 1, self.root, operation, repr(time.time()), *values)

    async def call_all(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """What the server answers to each, be it an error."""
        found = await self.try_all(calls)
        for pause_s in PAUSES_S:
            refused = [i for i, answer in enumerate(found) if elsewhere(answer)]
            if not refused:
                break
            await asyncio.sleep(pause_s)
            again = await self.try_all([calls[i] for i in refused])
            for i, answer in zip(refused, again, strict=True):
                found[i] = answer
        return found

    async def try_all(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """As `call_all`, and another server is looked for where this one refuses a call."""
        writes = [i for i, call in enumerate(calls) if call[4] in WRITES] if self.replicas else []
        async with self.source.lend() as connection:
            wait_ms = GLANCE_MS if self.source.alone and not self.strict else WAIT_MS
            wait = [("WAIT", self.replicas, wait_ms)] if writes else []
            found = await asked(connection, [*calls, *wait])
            unknown = [i for i, answer in enumerate(found) if isinstance(answer, NoScriptError)]
            if unknown:
                load = ("SCRIPT LOAD", self.script.script)
                again = await asked(connection, [load, *(calls[i] for i in unknown), *wait])
                for i, answer in zip(unknown, again[1:], strict=False):
                    found[i] = answer
                found[len(calls) :] = again[len(again) - len(wait) :]
            refused = any(elsewhere(answer) for answer in found)
            if refused or (writes and not await self.confirmed(connection, found[-1])):
                await self.source.leave()
                # Some of them may have been done before the others were refused.
                for i in writes:
                    if not isinstance(found[i], RedisError):
                        found[i] = UnconfirmedError(
                            "it was written, but too few replicas have confirmed the write"
                        )
        return found[: len(calls)]

    async def confirmed(self, connection: Connection, count: Any) -> bool:
        """Whether a write has reached enough replicas, or there is none.

        Args:
            connection: on which it was written.
            count: how many have confirmed it.
        """
        glanced = self.source.alone
        self.source.alone = answered(count) < self.replicas
        if self.source.alone and not self.strict:
            (role,) = await asked(connection, [("ROLE",)])
            if answered(role)[0] != b"master":
                return False
            if not role[2]:
                # None is connected: it may be dead, or take writes itself by now.
                return await self.source.confirms(connection)
            if glanced:
                (count,) = await asked(connection, [("WAIT", self.replicas, WAIT_MS)])
            self.source.alone = answered(count) < self.replicas
        return not self.source.alone

    async def used(self, uses: list[tuple[str, float]]) -> None:
        """Write down when responses were used, where none is created with which that goes."""
        await self.apart("note", packed(uses))

    async def there(self) -> bool:
        # A store that somebody has emptied has no schema until it is opened again.
        keys = (f"{self.root}{name}" for name in ("schema", "all", "conversations"))
        return bool(await self.client.exists(*keys))

    async def open(self) -> None:
        found, version = await self.call("open", SCHEMA)
        if found > SCHEMA:
            raise too_new(self.url, found, SCHEMA)
        while found < SCHEMA and await self.apart("build", SCHEMA, BATCH) == BATCH:
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

    async def drop(self) -> None:
        async for key in self.client.scan_iter(match=f"{self.root}*", count=BATCH):
            await self.client.delete(key)

    @property
    def judged(self) -> tuple[Any, ...]:
        """What failing a run takes."""
        return (self.limits.lease_s, self.limits.events_kept_s, GONE)

    async def create(self, response: Response) -> bool:
        return bool(await self.call("create", *self.creating(response)))

    def creating(self, response: Response) -> tuple[Any, ...]:
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
            self.limits.share,
            packed(self.uses.take()),
        )

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return bool(await self.call("put", *self.putting(response, words(unless_status))))

    def putting(self, response: Response, unless_status: str) -> tuple[Any, ...]:
        return (
            response.id,
            response.owner,
            repr(response.created_at),
            unless_status,
            response.status,
            response.error,
            response.body,
            *self.judged,
        )

    async def set_status(
        self,
        owner: str,
        response_id: str,
        status: str,
        *,
        allowed: Collection[str] = RUNNING,
        error: str = "",
    ) -> Swap:
        found = await self.call(
            "set_status",
            response_id,
            owner,
            words(allowed),
            status,
            error,
            self.limits.lease_s,
            self.limits.events_kept_s,
        )
        return Swap(bool(found[0]), made(found[1])) if found else Swap(False, None)

    async def get(self, owner: str, response_id: str) -> Response | None:
        found = await self.call("get", response_id, owner, *self.judged)
        if not found:
            return None
        await self.uses.note([response_id])
        return made(found)

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self.call("delete", response_id, owner))

    async def page(self, owner: str, query: Query) -> Page:
        await self.call("fail", *self.judged)
        upwards = query.descending == query.backwards
        after, before = [
            (await self.cursor(owner, cursor), cursor) if cursor else ("", "")
            for cursor in (query.after, query.before)
        ]
        start, end = (before, after) if query.backwards else (after, before)
        found: list[Response] = []
        while True:
            part = await self.call(
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
            found += [made(response) for response in part[0]]
            if len(part) == 1:
                break
            start = part[1], part[2]
        shown = found[: query.limit]
        return Page(shown[::-1] if query.backwards else shown, len(found) > query.limit)

    async def cursor(self, owner: str, response_id: str) -> str:
        """When a response was made, as the server has it."""
        found = await self.call("cursor", response_id, owner)
        if found is None:
            raise CursorUnknown(response_id)
        return str(found, "ascii")

    async def conversation(self, owner: str, response_id: str) -> list[Response]:
        found = await self.call("conversation", response_id, owner, *self.judged)
        turns = [made(response) for response in reversed(found)]
        await self.uses.note_turns([response.id for response in turns])
        return turns

    async def touch(self, owner: str, ids: Collection[str]) -> None:
        given = list(ids)
        for start in range(0, len(given), BATCH):
            await self.call("touch", owner, *given[start : start + BATCH])

    async def running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        found = await self.call("running", self.limits.lease_s if renew else "", GONE, *ids)
        return {name.decode() for name in found}

    async def append(self, response: Response, chunk: Chunk) -> bool:
        done = await self.call(
            "append",
            response.id,
            response.owner,
            repr(response.created_at),
            chunk.first,
            chunk.last,
            chunk.events,
            self.limits.max_events,
            self.limits.events_kept_s,
        )
        return bool(done)

    async def log(self, owner: str, response_id: str, after: int) -> Log | None:
        found = await self.call("log", response_id, owner, after, *self.judged)
        if not found:
            return None
        chunks = []
        for member in found[1]:
            first, last, events = member.split(b":", 2)
            chunks.append(Chunk(int(first), int(last), events))
        return Log(chunks, found[0].decode() in RUNNING)

    async def sweep(self) -> Swept:
        await self.uses.flush()
        failed = await self.apart("fail", *self.judged)
        expired, done = 0, BATCH
        while done == BATCH:
            done = await self.apart("expire", repr(time.time() - self.limits.ttl_s), BATCH)
            expired += done
        await self.sweep_conversations()
        return Swept(expired, await self.evicted(), failed)

    async def evicted(self) -> int:
        return int(await self.apart("evict", self.limits.max_size, self.limits.share))

    async def stats(self, owner: str) -> Stats:
        await self.apart("fail", *self.judged)
        statuses, models, owners = Counter[str](), Counter[str](), Counter[str]()
        size, event_bytes, rank, done = 0, 0, 0, BATCH
        oldest, evictions = b"", 0
        while done == BATCH:
            part = await self.apart("stats", owner, rank, BATCH)
            done, by_status, by_model, here, logs, oldest, evictions, by_owner = part
            rank += done
            size += here
            event_bytes += logs
            statuses.update(msgspec.json.decode(by_status, type=dict[str, int]))
            models.update(msgspec.json.decode(by_model, type=dict[str, int]))
            owners.update(msgspec.json.decode(by_owner, type=dict[str, int]))
        return Stats(
            statuses=dict(statuses),
            models=dict(models),
            bytes=size,
            event_bytes=event_bytes if owner == EVERYBODY else None,
            oldest=float(oldest) if oldest else None,
            evictions=evictions,
            owners=dict(owners.most_common()),
        )

    async def caveats(self) -> list[str]:
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


async def asked(connection: Connection, calls: Collection[tuple[Any, ...]]) -> list[Any]:
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


def answered(found: Any) -> Any:
    """What a call gives.

    Raises:
        RedisError: the server's answer was an error.
    """
    if isinstance(found, RedisError):
        raise found
    return found


def elsewhere(found: Any) -> bool:
    """Whether an answer refuses a call that another server, or this one soon, would take."""
    if not isinstance(found, RedisError):
        return False
    return (found.status_code or f"{found}".partition(" ")[0]) in ELSEWHERE


def weight(value: Any) -> int:
    """The bytes of a large value; nothing for others."""
    return len(value) if isinstance(value, bytes) else 0


def packed(uses: Collection[tuple[str, float]]) -> bytes:
    """Uses as the script takes them, each time before its id."""
    return msgspec.json.encode([value for use in uses for value in reversed(use)])


def made(fields: list[bytes]) -> Response:
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
