"""What was acknowledged survives kill -9, of whoever wrote it and of the database server."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import (
    EVERYBODY,
    GONE,
    Limits,
    Response,
    ResponseQuery,
    StoreUnavailable,
)
from vllmops_responses.store.response_store import ResponseStore

from ...support.databases import Servers
from ...support.extent import EVERYTHING

OWNER = "ann"
KILLS = 3 if EVERYTHING else 2
LEASE_S = 3.0


async def check(store: ResponseStore, acknowledged: list[str]) -> None:
    """Each is there, has ended and has its event; of the rest none is half there."""
    for item in acknowledged:
        found = await store.get(OWNER, item)
        assert found, item
        log = await store.read_events(OWNER, item, -1)
        assert (found.status, log and len(log.chunks)) == ("completed", 1)
    page = await store.list_responses(EVERYBODY, ResponseQuery(limit=100_000))
    assert {item.id for item in page.responses} >= set(acknowledged)
    for kept in page.responses:
        assert kept.body.startswith(b'{"id"')
    assert (await store.collect_stats(EVERYBODY)).response_count == len(page.responses)


def test_the_writer_is_killed(shared_url: str, writer: Callable[..., Any]) -> None:
    acknowledged: list[str] = []
    chance = random.Random(1)
    for number in range(KILLS):
        process = writer(shared_url)
        process.send(store=f"r{number}-")
        acknowledged += [process.read() for _ in range(chance.randrange(20, 60))]
        # A line that was cut off was not said.
        acknowledged += [item.strip() for item in process.kill() if item.endswith("\n")]

    async def check_store() -> None:
        async with ResponseStore(backend_factory.make_backend(shared_url), deadline_s=60) as store:
            await check(store, acknowledged)

    asyncio.run(check_store())


def test_reader_of_the_file_does_not_remove_its_log(tmp_path: Path) -> None:
    """SQLite's locks are the process's, not the descriptor's: closing any takes them all away.

    Whoever closes the file last deletes its log, and would find no lock that tells of us; what is
    written after that is in no file that has a name.
    """
    path = tmp_path / "r.db"
    look = f"import sqlite3; c = sqlite3.connect({str(path)!r}); "
    look += "c.execute('SELECT count(*) FROM vllmops_responses').fetchall(); c.close()"
    response = Response(id="a", owner=OWNER, model="m", status="completed", body=b"{}")

    async def write_while_other_reads() -> None:
        async with ResponseStore(backend_factory.make_backend(f"sqlite:///{path}")) as store:
            assert await store.create(response)
            assert await store.get(OWNER, "a")
            await asyncio.to_thread(subprocess.run, [sys.executable, "-c", look], check=True)
            assert await asyncio.to_thread(Path(f"{path}-wal").exists)

    asyncio.run(write_while_other_reads())


@pytest.mark.parametrize("kind", ["postgresql", "redis"])
def test_the_server_is_killed(kind: str, servers: Any) -> None:
    server = servers.add(kind)
    acknowledged: list[str] = []

    async def write(store: ResponseStore, name: str) -> None:
        number = 0
        while True:
            number += 1
            body = b'{"id":"%d","status":"in_progress"}' % number
            made = Response(
                id=f"{name}-{number}", owner=OWNER, model="m", status="in_progress", body=body
            )
            try:
                assert await store.create(made)
                assert await store.put(replace(made, status="completed"))
                assert await store.append_events(made, 0, [b'{"sequence_number":0}'])
            except StoreUnavailable as error:
                await asyncio.sleep(error.retry_after_s / 4)
            else:
                acknowledged.append(made.id)

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(server.url)) as store:
            writers = [asyncio.create_task(write(store, f"w{number}")) for number in range(4)]
            for _ in range(KILLS):
                wanted = len(acknowledged) + 50
                while len(acknowledged) < wanted:  # noqa: ASYNC110 - an event would say no more
                    await asyncio.sleep(0.01)
                server.kill()
                await asyncio.to_thread(server.start)
            for item in writers:
                item.cancel()
            ends = await asyncio.gather(*writers, return_exceptions=True)
            assert {type(item) for item in ends} == {asyncio.CancelledError}, ends
        async with ResponseStore(backend_factory.make_backend(server.url), deadline_s=60) as store:
            await check(store, acknowledged)

    asyncio.run(main())
    assert len(acknowledged) >= 50 * KILLS


def test_a_response_whose_server_was_killed_has_failed(
    shared_url: str, writer: Callable[..., Any]
) -> None:
    process = writer(shared_url, LEASE_S)

    async def main() -> None:
        backend = backend_factory.make_backend(shared_url, Limits(lease_s=LEASE_S))
        async with ResponseStore(backend, deadline_s=60) as store:
            made = Response(id="r", owner=OWNER, model="m", status="queued", body=b"{}")
            await store.create(made)
            leased = time.monotonic()  # at the earliest
            process.send(id="r", created_at=made.created_at, do=["progress", "append"])
            assert await asyncio.to_thread(process.read) == "[true, true]"
            process.kill()
            found = await store.get(OWNER, "r")
            assert found
            assert found.status == "in_progress" or time.monotonic() > leased + LEASE_S - 0.1
            while found and found.status == "in_progress":
                await asyncio.sleep(0.05)
                found = await store.get(OWNER, "r")
            assert found
            assert (found.status, found.error) == ("failed", GONE)
            assert time.monotonic() > leased + LEASE_S - 0.1
            # Whoever follows it comes to an end.
            assert len([item async for item in store.follow_events(OWNER, "r")]) == 1

    asyncio.run(main())


def test_a_killed_postgresql_of_a_test_leaves_nothing_in_shared_memory(servers: Servers) -> None:
    """The segments that it has are its folder's, which goes with it."""
    mapped = Path(f"/proc/{servers.postgres().process.pid}/maps").read_text()
    assert "/data/pg_dynshmem/" in mapped
    assert "/dev/shm/" not in mapped
