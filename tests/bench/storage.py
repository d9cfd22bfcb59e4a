"""What the store adds to its drivers, how it grows, and what it keeps in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sqlite3
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from tests.support.databases import Servers, folder_for_servers, postgres_parts

from vllmops_responses.server.conversations.conversation_turns import (
    ConversationTurns,
)
from vllmops_responses.server.conversations.turn_history import HistoryReader
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Backend, Limits, Response, ResponseQuery
from vllmops_responses.store.backends.postgresql import Postgresql
from vllmops_responses.store.backends.redis import Redis
from vllmops_responses.store.backends.sql import SqlBackend
from vllmops_responses.store.backends.sqlite import Sqlite, bind_values, parse_file_path
from vllmops_responses.store.conversation_backend import Conversation
from vllmops_responses.store.response_store import ResponseStore

from .figure import Figure, Limit, make_paired_figure
from .setting import Setting

OWNER = "0" * 64
OF_DRIVER = 0.6  # of the operations per second of the driver with its pool
# A turn of a conversation, in times of a link of a chain: the 20th, and the 100th. Its items are in
# the store twice, so it costs a little more until there are many to be read.
TURNS = {20: 1.35, 100: 1.1}
PAGES = 20
FEW = 1_000
ENDLESS = Limits(max_size=10**9)
WORDS = "the quick brown fox jumps over a lazy dog and runs far away from its own long shadow"

Act = Callable[[], Awaitable[object]]


def measure(setting: Setting) -> Iterator[Figure]:
    urls = {"sqlite": f"sqlite:///{setting.home}/storage.db"}
    with contextlib.ExitStack() as stack:
        if not setting.short:
            programs = Servers(postgres_parts(folder_for_servers()))
            stack.callback(programs.end)
            urls |= {item: programs.add(item).url for item in ("postgresql", "redis")}
        for kind, url in urls.items():
            yield from asyncio.run(operations(setting, kind, url))
        for kind, url in urls.items():
            yield from asyncio.run(turns(setting, kind, url))
        for kind, url in urls.items():
            yield asyncio.run(lists(setting, kind, url))
    yield asyncio.run(in_memory(setting))


def response(number: int) -> Response:
    """One of some KB, of which no two are alike."""
    choice = random.Random(number)
    text = " ".join(choice.choices(WORDS.split(), k=300))
    part: dict[str, Any] = {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": None,
    }
    item = {"id": f"msg_{number:032x}", "type": "message", "role": "assistant", "content": [part]}
    body = {"id": f"resp_{number:032x}", "object": "response", "model": "demo", "output": [item]}
    return Response(
        id=f"resp_{number:032x}",
        owner=OWNER,
        model="demo",
        status="completed",
        body=json.dumps(body, separators=(",", ":")).encode(),
        input=b'[{"role":"user","content":"What does the fox do?"}]',
    )


async def operations(setting: Setting, kind: str, url: str) -> list[Figure]:
    """`create` and `get`, one after the other, against the driver with the same statements."""
    backend = backend_factory.make_backend(f"{url}?namespace=ops", ENDLESS)
    rounds, item = (4, 20) if setting.short else (60, 50)
    times: dict[str, list[float]] = {"create": [], "raw create": [], "get": [], "raw get": []}
    numbers, choice = iter(range(10**9)), random.Random(1)
    async with ResponseStore(backend) as store, driver(backend, url) as raw:
        packed = await store.pack_response(response(0))
        for _ in range(rounds):
            made = [response(next(numbers)) for _ in range(item)]
            rivals = [f"raw_{next(numbers)}" for _ in range(item)]
            blocks = dict.fromkeys(times, 0.0)
            for one, rival in zip(made, rivals, strict=True):
                pairs: dict[str, list[tuple[str, Act]]] = {
                    "create": [
                        ("create", partial(store.create, one)),
                        (
                            "raw create",
                            partial(raw, "create", make_create_args(backend, packed, rival)),
                        ),
                    ],
                    "get": [
                        ("get", partial(store.get, OWNER, one.id)),
                        ("raw get", partial(raw, "get", make_get_args(backend, rival))),
                    ],
                }
                for pair in pairs.values():
                    # Each comes first as often: who does finds the processor's caches full of
                    # something else.
                    for name, act in choice.sample(pair, 2):
                        began = time.perf_counter()
                        assert await act(), name
                        blocks[name] += time.perf_counter() - began
            for name, seconds in blocks.items():
                times[name].append(seconds / item)
    return [
        make_paired_figure(
            f"{name} in the store, {kind}",
            times[name],
            "its driver",
            times[f"raw {name}"],
            1 / OF_DRIVER,
            short=setting.short,
        )
        for name in ("create", "get")
    ]


def make_create_args(backend: Backend, packed: Response, response_id: str) -> list[Any]:
    """What `create` gives the driver."""
    row = [packed.owner, packed.model, packed.status]
    rest = [packed.error, packed.body, packed.input]
    limits = backend.limits
    if isinstance(backend, Redis):
        created = repr(packed.created_at)
        bounds = [limits.lease_s, limits.max_size, limits.owner_limit]
        return [response_id, *row, created, "", *rest, *bounds, "[]"]
    return [response_id, *row, packed.created_at, None, *rest, time.time(), None]


def make_get_args(backend: Backend, response_id: str) -> list[Any]:
    """What `get` gives the driver."""
    judged = backend.failure_args if isinstance(backend, Redis) else ()
    return [response_id, OWNER, *judged]


@contextlib.asynccontextmanager
async def driver(
    backend: Backend, url: str
) -> AsyncIterator[Callable[[str, list[Any]], Awaitable[Any]]]:
    """The backend's driver by itself: runs an operation's statement."""
    if isinstance(backend, Redis):
        script = backend.script

        async def call(operation: str, values: list[Any]) -> Any:
            head = [operation, repr(time.time())]
            return await backend.client.evalsha(script.sha, 1, backend.root, *head, *values)

        yield call
        return
    assert isinstance(backend, SqlBackend)
    texts = {name: backend.text[name] for name in ("create", "get")}
    if isinstance(backend, Sqlite):
        connection = sqlite3.connect(
            parse_file_path(url), isolation_level=None, check_same_thread=False
        )
        with contextlib.closing(connection):
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.create_function("statement_timestamp", 0, time.time)
            connection.create_function("date_part", 2, lambda _, at: at)

            async def execute(operation: str, values: list[Any]) -> Any:
                # As an event loop must, which a disk could hold up otherwise.
                def run() -> Any:
                    return connection.execute(texts[operation], bind_values(values)).fetchall()

                return await asyncio.to_thread(run)

            yield execute
        return
    assert isinstance(backend, Postgresql)

    async def fetch(operation: str, values: list[Any]) -> Any:
        # There is a statement for many alone.
        given = [[value] for value in values] if operation == "create" else values
        async with backend.pool.lend() as connection:
            return await connection.fetch(texts[operation], *given)

    yield fetch


async def turns(setting: Setting, kind: str, url: str) -> list[Figure]:
    """A turn of a conversation against a link of a chain: all but HTTP and the engine.

    What this process computes. Both take as many round trips, and commit to the same disk.
    """
    rounds, item = (2, 5) if setting.short else (60, 10)
    figures = []
    for depth, limit in TURNS.items():
        backend = backend_factory.make_backend(f"{url}?namespace=turns{depth}", ENDLESS)
        spent: dict[str, list[float]] = {"turn": [], "link": []}
        choice = random.Random(1)
        async with ResponseStore(backend) as store:
            talk = Talk(store)
            for number in range(rounds):
                await talk.begin(f"conv_{number}")
                acts = {"turn": talk.turn, "link": talk.link}
                for act in acts.values():
                    for _ in range(depth):
                        await act()
                for name in choice.sample(list(acts), len(acts)):
                    began = time.process_time()
                    for _ in range(item):
                        await acts[name]()
                    spent[name].append((time.process_time() - began) / item)
            await backend.delete_store()
        name, of, rival = f"turn {depth} of a conversation, {kind}", spent["turn"], spent["link"]
        figures.append(
            make_paired_figure(name, of, "of a chain", rival, limit, short=setting.short)
        )
    return figures


class Talk:
    """Turns as the agent keeps them, of a conversation and of a chain; the answers are made up.

    Args:
        store: that keeps them.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.conversations = ConversationTurns(store)
        self.history = HistoryReader(list, harmony=False)
        self.numbers = itertools.count()
        self.conversation, self.last = "", ""

    async def begin(self, conversation_id: str) -> None:
        """Begin a conversation, and a chain."""
        self.conversation, self.last = conversation_id, ""
        made = Conversation(id=conversation_id, owner=OWNER)
        await self.store.conversations.create(made, [])

    async def turn(self) -> None:
        made = response(next(self.numbers))
        turn = SimpleNamespace(
            request=SimpleNamespace(request_id=made.id),
            began=made.created_at,
            owner=OWNER,
            items=made.input,
            hold=None,
        )
        await self.conversations.begin_turn(turn, self.conversation)
        assert turn.hold
        await self.history.read_conversation_items(turn.hold.entries)
        assert await self.conversations.finish_turn(turn, made, made.body, is_new=True)

    async def link(self) -> None:
        made = response(next(self.numbers))
        if self.last:
            await self.history.read_turns(await self.store.list_turns(OWNER, self.last))
        assert await self.store.create(replace(made, previous_id=self.last or None))
        self.last = made.id


async def lists(setting: Setting, kind: str, url: str) -> Figure:
    """A page of a list, the newest and one far behind, of many and of few."""
    many = 10_000 if setting.short else 1_000_000
    medians = {}
    for count in (FEW, many):
        backend = backend_factory.make_backend(f"{url}?namespace=n{count}", ENDLESS)
        async with ResponseStore(backend, deadline_s=600) as store:
            await fill(store, count)
            middle = f"r{count // 2:09d}"
            taken = []
            for after in [None, middle] * PAGES:
                began = time.perf_counter()
                page = await store.list_responses(OWNER, ResponseQuery(after_id=after))
                taken.append(time.perf_counter() - began)
                assert len(page.responses) == 20
            medians[count] = statistics.median(taken)
            await backend.delete_store()
    return Figure(
        f"a page of a list of {many:,}, {kind}",
        "s",
        medians[many],
        f"of {FEW:,}",
        medians[FEW],
        Limit(6) if setting.short else Limit(2),
        2 * PAGES,
    )


async def fill(store: ResponseStore, count: int) -> None:
    """Put many small responses into a store, past what would take them one by one."""
    backend, packed = store.backend, await store.pack_response(response(0))
    now = time.time()

    def small(number: int) -> Response:
        return Response(
            id=f"r{number:09d}",
            owner=OWNER,
            model="demo",
            status="completed",
            created_at=now + number,
            body=packed.input,
            input=packed.input,
        )

    for start in range(0, count, 10_000):
        some = [small(number) for number in range(start, min(start + 10_000, count))]
        if isinstance(backend, Postgresql):
            await backend.insert_responses(some)
        elif isinstance(backend, Sqlite):
            await backend.execute_batch(
                "create", [backend.build_create_args(made) for made in some]
            )
        else:
            assert isinstance(backend, Redis)
            async with backend.client.pipeline(transaction=False) as pipeline:
                for made in some:
                    words = ["create", repr(time.time()), *make_create_args(backend, made, made.id)]
                    pipeline.evalsha(backend.script.sha, 1, backend.root, *words)
                await pipeline.execute()


async def in_memory(setting: Setting) -> Figure:
    """What the backend ``memory`` keeps, against the JSON that it was given."""
    count, given = 500 if setting.short else 5_000, 0
    async with ResponseStore(backend_factory.make_backend("memory://", ENDLESS)) as store:
        tracemalloc.start()
        for number in range(count):
            made = response(number)
            given += len(made.body) + len(made.input)
            await store.create(made)
        del made
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return Figure("kept in memory", "bytes", used, "its JSON", given, Limit(1.5), count)
