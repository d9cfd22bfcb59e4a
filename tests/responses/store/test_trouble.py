"""A backend that is down, or does not answer: one error in bounded time, and back by itself."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest

from vllmops.support.errors import VllmopsError
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response, ResponseQuery, StoreUnavailable
from vllmops_responses.store.backends import sql, sqlite
from vllmops_responses.store.response_store import DEADLINE_S as OWN_DEADLINE_S
from vllmops_responses.store.response_store import BackendCall, ResponseStore

from ...support.extent import EVERYTHING
from ...support.waiting import PATIENCE_S, until_async

DEADLINE_S = 0.5
# How often a server goes and comes back.
TIMES = 2 if EVERYTHING else 1
OWNER = "ann"
T = TypeVar("T")


def response(name: str = "", status: str = "completed") -> Response:
    name = name or f"resp_{time.time_ns()}"
    return Response(id=name, owner=OWNER, model="m", status=status, body=b"{}")


def of_each_kind(store: ResponseStore) -> list[Callable[[], Awaitable[object]]]:
    """Calls that all need the backend."""
    made = response(status="in_progress")
    return [
        lambda: store.create(made),
        lambda: store.put(made),
        lambda: store.set_status(OWNER, "r", "cancelled"),
        lambda: store.get(OWNER, "r"),
        lambda: store.delete(OWNER, "r"),
        lambda: store.list_responses(OWNER, ResponseQuery()),
        lambda: store.list_turns(OWNER, "r"),
        lambda: store.append_events(made, 0, [b"{}"]),
        lambda: store.touch(OWNER, ["r"]),
        lambda: store.follow_events(OWNER, "r").__anext__(),
    ]


async def check_all_calls_fail(store: ResponseStore) -> None:
    """Every call says that the store is unavailable, also when there are many."""
    calls = of_each_kind(store) * 5
    for item in await asyncio.gather(*(call() for call in calls), return_exceptions=True):
        assert isinstance(item, StoreUnavailable), item
        assert 0 < item.retry_after_s <= 2
        assert "unavailable" in item.message


class Late:
    """Ends calls of a store as if their time was up: others are answered however slow they are."""

    def __init__(self, store: ResponseStore) -> None:
        self.bounded, self.calls = store.backend_call, dict[object, BackendCall]()
        store.backend_call = self.note  # type: ignore[method-assign]

    def note(self, *given: Any, **more: Any) -> BackendCall:
        made = self.calls[asyncio.current_task()] = self.bounded(*given, **more)
        return made

    async def begin_call(
        self, call: Awaitable[object]
    ) -> tuple[asyncio.Future[object], BackendCall]:
        """A call that has begun, and what ends it."""
        task = asyncio.ensure_future(call)
        await until_async(lambda: task in self.calls)
        return task, self.calls[task]


async def patient(call: Callable[[], Awaitable[T]]) -> T:
    """Ask as a client does that is told to try again; an unknown outcome is one."""
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            await asyncio.sleep(error.retry_after_s)


async def check_recovery(store: ResponseStore) -> None:
    """It works again, by itself, for many at once."""
    made = [response() for _ in range(50)]
    await asyncio.gather(*(patient(partial(store.create, item)) for item in made))
    # What each call gets is its own answer, not one that came late for another.
    found = await asyncio.gather(*(patient(partial(store.get, OWNER, item.id)) for item in made))
    assert found == made


@pytest.mark.parametrize("kind", ["postgresql", "redis"])
def test_a_server_that_stops_answering(kind: str, servers: Any) -> None:
    server = servers.add(kind)

    async def main() -> None:
        async with ResponseStore(
            backend_factory.make_backend(server.url), deadline_s=DEADLINE_S
        ) as store:
            await check_recovery(store)
            for _ in range(TIMES):
                server.signal(signal.SIGSTOP)
                await check_all_calls_fail(store)
                server.signal(signal.SIGCONT)
                await check_recovery(store)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["postgresql", "redis"])
def test_a_server_that_stops_answering_does_not_block_the_event_loop(
    kind: str, servers: Any
) -> None:
    """Or nobody would let it go on, and no call end, however much time it has."""
    server = servers.add(kind)

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(server.url), deadline_s=600) as store:
            await check_recovery(store)
            server.signal(signal.SIGSTOP)
            calls = [asyncio.ensure_future(call()) for call in of_each_kind(store)]
            await asyncio.sleep(0.3)  # so that they are on their way
            server.signal(signal.SIGCONT)
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["postgresql", "redis"])
def test_a_server_that_is_down_at_first_and_again_later(kind: str, servers: Any) -> None:
    server = servers.add(kind)
    server.kill()

    async def main() -> None:
        async with ResponseStore(
            backend_factory.make_backend(server.url), deadline_s=DEADLINE_S
        ) as store:
            await check_all_calls_fail(store)
            for _ in range(TIMES):
                server.start()
                await check_recovery(store)
                server.kill()
                await check_all_calls_fail(store)
        server.start()

    asyncio.run(main())


def test_tables_that_somebody_has_dropped_are_made_again(shared_servers: Any) -> None:
    url = f"{shared_servers['postgresql'].url}?namespace=t{time.time_ns()}"

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            await store.create(response("r"))
            await backend_factory.make_backend(url).delete_store()
            assert await store.get(OWNER, "r") is None
            assert await store.create(response("r"))

    asyncio.run(main())


def test_an_outage_is_told_once_and_its_end(servers: Any) -> None:
    server, told = servers.add("redis"), list[str]()

    async def main() -> None:
        backend = backend_factory.make_backend(server.url)
        async with ResponseStore(backend, outages=told.append) as store:
            await check_recovery(store)
            server.kill()  # which refuses at once
            await check_all_calls_fail(store)
            await check_all_calls_fail(store)
            server.start()
            await check_recovery(store)

    asyncio.run(main())
    away, again = told
    assert "the store is unavailable" in away
    assert "503" in away
    assert again == "vllmops: the store is available again"


def test_call_that_waits_too_long_fails_while_others_are_answered(shared_servers: Any) -> None:
    url, name = shared_servers["postgresql"].url, f"t{time.time_ns()}"

    async def main() -> None:
        backend = backend_factory.make_backend(f"{url}?namespace={name}")
        async with ResponseStore(backend) as store:
            held, other = response(status="queued"), response()
            assert await store.create(held)
            assert await store.create(other)
            somebody = await asyncpg.connect(url)
            async with somebody.transaction():
                row = f"SELECT FROM {name}_responses WHERE id = $1 FOR UPDATE"
                await somebody.execute(row, held.id)
                waits, stuck = await Late(store).begin_call(
                    store.set_status(OWNER, held.id, "cancelled")
                )
                for _ in range(3):
                    assert await store.create(response())
                assert not waits.done()
                stuck.handle_deadline(asyncio.get_running_loop().time())
                with pytest.raises(StoreUnavailable, match="too long"):
                    await waits
                assert await store.get(OWNER, other.id)
            await somebody.close()

    asyncio.run(main())


def test_writes_that_wait_too_long_while_reads_are_answered(shared_servers: Any) -> None:
    """Or nothing would say that the store is away, and each answer would be made in vain."""
    url, name = shared_servers["postgresql"].url, f"t{time.time_ns()}"
    told: list[str] = []

    async def main() -> None:
        backend = backend_factory.make_backend(f"{url}?namespace={name}")
        async with ResponseStore(backend, outages=told.append) as store:
            made = response()
            assert await store.create(made)
            somebody = await asyncpg.connect(url)
            async with somebody.transaction():
                await somebody.execute(f"LOCK TABLE {name}_responses IN SHARE MODE")
                waits, stuck = await Late(store).begin_call(store.create(response()))
                for _ in range(3):
                    assert await store.get(OWNER, made.id)
                assert not waits.done()
                stuck.handle_deadline(asyncio.get_running_loop().time())
                with pytest.raises(StoreUnavailable, match="too long"):
                    await waits
                assert "the store is unavailable" in told[0]
            await somebody.close()

    asyncio.run(main())


def test_a_stream_goes_on_once_the_server_is_back(servers: Any) -> None:
    server = servers.add("redis")

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(server.url)) as store:
            made = response("r", status="in_progress")
            await store.create(made)
            await store.append_events(made, 0, [b'{"n":0}'])
            words = []

            async def follow() -> None:
                async for item in store.follow_events(OWNER, "r"):
                    words.extend(item.events)

            following = asyncio.create_task(follow())
            while not words:  # noqa: ASYNC110 - an event would say no more
                await asyncio.sleep(0.01)
            server.kill()
            await asyncio.sleep(0.5)
            server.start()
            await check_recovery(store)
            await patient(lambda: store.append_events(made, 1, [b'{"n":1}']))
            await patient(lambda: store.set_status(OWNER, "r", "cancelled"))
            await asyncio.wait_for(following, 60)
            assert words == [b'{"n":0}', b'{"n":1}']

    asyncio.run(main())


def test_a_file_that_somebody_holds(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def main() -> None:
        backend = backend_factory.make_backend(f"sqlite:///{path}")
        async with ResponseStore(backend, deadline_s=DEADLINE_S) as store:
            await check_recovery(store)
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                # The call's own deadline ends it.
                with pytest.raises(StoreUnavailable):
                    await store.create(response("r"))
                # Readers wait for nobody.
                assert await patient(lambda: store.get(OWNER, "x")) is None
                other.execute("ROLLBACK")
            await check_recovery(store)

    asyncio.run(main())


def test_an_event_loop_that_was_blocked_is_no_outage(shared_url: str) -> None:
    """As by a tool parser's regular expression: what the backend has answered is read then."""

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(shared_url)) as store:
            await store.create(response())
            made = response()
            calls = [asyncio.create_task(store.create(made)) for made in (made, response())]
            store.deadline_s = OWN_DEADLINE_S
            await asyncio.sleep(0)
            time.sleep(store.deadline_s + 1)  # noqa: ASYNC251
            await asyncio.gather(*calls)
            store.deadline_s = PATIENCE_S
            assert await store.get(OWNER, made.id)

    asyncio.run(main())


@pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
def test_refusal_of_a_single_call_is_no_outage(shared_url: str) -> None:
    """The others' calls go on."""

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(shared_url)) as store:

            async def hold_with_invalid_name() -> None:
                async with store.backend_call() as backend:
                    await backend.hold_conversation(OWNER, "conv", "\0")

            with pytest.raises(StoreUnavailable):
                await hold_with_invalid_name()
            assert await store.create(response())

    asyncio.run(main())


def test_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("")

    async def main() -> None:
        url = f"sqlite:///{tmp_path}/in-the-way/responses.db"
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=DEADLINE_S) as store:
            await check_all_calls_fail(store)
            (tmp_path / "in-the-way").unlink()
            await check_recovery(store)
        assert (tmp_path / "in-the-way/responses.db").stat().st_mode & 0o777 == 0o600

    asyncio.run(main())


def test_a_write_that_nobody_waits_for_is_left_out(tmp_path: Path) -> None:
    """What queues up behind a lock is not done long after its caller was told that it failed."""
    path = tmp_path / "responses.db"

    async def main() -> None:
        backend = backend_factory.make_backend(f"sqlite:///{path}")
        assert isinstance(backend, sqlite.Sqlite)
        async with ResponseStore(backend, deadline_s=DEADLINE_S) as store:
            await check_recovery(store)
            assert backend.writer
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                calls = [store.create(response(f"late-{number}")) for number in range(20)]
                shown = await asyncio.gather(*calls, return_exceptions=True)
                # The one that is being tried is given up, too: it needs no lock to be behind it.
                await backend.writer.run_job(lambda _: None)
                other.execute("ROLLBACK")
            assert all(isinstance(item, StoreUnavailable) for item in shown)
            await check_recovery(store)
            for number in range(20):
                assert await patient(partial(store.get, OWNER, f"late-{number}")) is None

    asyncio.run(main())


def test_a_schema_from_the_future_is_no_trouble_that_passes(shared_url: str) -> None:
    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(shared_url)) as store:
            await raise_schema(store)
        store = ResponseStore(backend_factory.make_backend(shared_url))
        with pytest.raises(VllmopsError) as shown:
            await store.open()
        assert shown.value.code == "store.schema"
        assert "schema 99, but this vllmops supports up to" in shown.value.message
        assert shown.value.hint == "install the newest vllmops"
        # Not a word of it was changed.
        with pytest.raises(VllmopsError) as shown:
            await store.create(response())
        assert shown.value.code == "store.schema"
        await store.close()

    asyncio.run(main())


async def raise_schema(store: ResponseStore) -> None:
    """Make it one that version 99 of the schema has made."""
    backend: Any = store.backend
    if hasattr(backend, "client"):
        await backend.client.set(f"{backend.root}schema", 99)
    else:
        await backend.execute_named("meta add", "schema", 99 - sql.SCHEMA)


@pytest.mark.parametrize("shared_url", ["sqlite", "postgresql"], indirect=True)
def test_an_older_schema_is_upgraded(shared_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = [response(f"r{number}") for number in range(5)]
        with monkeypatch.context() as old:
            old.setattr(sql, "SCHEMA", 1)
            async with ResponseStore(backend_factory.make_backend(shared_url)) as store:
                for item in made:
                    assert await store.create(item)
        # All at once, as servers are started.
        stores = [
            ResponseStore(backend_factory.make_backend(shared_url), deadline_s=60) for _ in range(4)
        ]
        await asyncio.gather(*(item.open() for item in stores))
        for store in stores:
            backend: Any = store.backend
            rows = await backend.execute_named("meta get", "schema")
            assert rows[0][0] == sql.SCHEMA > 1
            page = await store.list_responses(OWNER, ResponseQuery(descending=False))
            assert page.responses == made
            await store.close()

    asyncio.run(main())
