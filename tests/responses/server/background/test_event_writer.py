"""How a run's events get into a store that comes and goes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from vllmops_responses.server.background import event_writer
from vllmops_responses.server.background.event_writer import EventWriter
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response
from vllmops_responses.store.response_store import ResponseStore

RUN = Response(id="resp_1", owner="", model="m", status="in_progress", body=b"{}")


async def read_event_numbers(store: ResponseStore) -> list[int]:
    """The numbers in the log."""
    log = await store.read_events("", RUN.id, -1)
    assert log
    return [n for chunk in log.chunks for n in range(chunk.first_number, chunk.last_number + 1)]


def test_all_events_are_stored_in_few_writes() -> None:
    async def play() -> tuple[list[int], int]:
        async with ResponseStore(backend_factory.make_backend("memory://")) as store:
            await store.create(RUN)
            async with EventWriter(store, RUN) as writer:
                for n in range(500):
                    writer.queue_event(n, b'{"n":%d}' % n)
                    if n % 100 == 0:
                        await asyncio.sleep(0.02)
            log = await store.read_events("", RUN.id, -1)
            assert log
            return await read_event_numbers(store), len(log.chunks)

    numbers, chunks = asyncio.run(play())
    assert numbers == list(range(500))
    assert chunks <= 6


def test_the_first_event_is_not_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "BATCH_S", 600.0)

    async def play() -> None:
        async with ResponseStore(backend_factory.make_backend("memory://")) as store:
            await store.create(RUN)
            async with EventWriter(store, RUN) as writer:
                writer.queue_event(0, b"{}")
                while await read_event_numbers(store) != [0]:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

    asyncio.run(play())


def test_a_store_that_is_down_for_a_while_gets_all_of_them(tmp_path: Path) -> None:
    async def play() -> list[int]:
        url = f"sqlite:///{tmp_path}/responses.db"
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            await store.create(RUN)
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=0.2) as store:
            blocker = sqlite3.connect(tmp_path / "responses.db", isolation_level=None)
            async with EventWriter(store, RUN) as writer:
                blocker.execute("BEGIN IMMEDIATE")
                for n in range(20):
                    writer.queue_event(n, b"{}")
                    await asyncio.sleep(0.02)
                blocker.execute("ROLLBACK")
                blocker.close()
            store.deadline_s = 60.0  # on a busy machine a look may take its time
            return await read_event_numbers(store)

    assert asyncio.run(play()) == list(range(20))


def test_a_run_that_is_gone_costs_nothing_more() -> None:
    async def play() -> None:
        async with ResponseStore(backend_factory.make_backend("memory://")) as store:
            await store.create(RUN)
            async with EventWriter(store, RUN) as writer:
                writer.queue_event(0, b"{}")
                await asyncio.sleep(0.03)
                await store.delete("", RUN.id)
                writer.queue_event(1, b"{}")
            assert writer.task.done()
            assert await store.read_events("", RUN.id, -1) is None

    asyncio.run(play())


def test_a_run_that_is_cancelled_waits_for_no_store(tmp_path: Path) -> None:
    async def write_until_cancelled(store: ResponseStore) -> None:
        async with EventWriter(store, RUN) as writer:
            writer.queue_event(0, b"{}")
            await asyncio.sleep(600)

    async def play() -> None:
        url = f"sqlite:///{tmp_path}/responses.db"
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=600) as store:
            await store.create(RUN)
            blocker = sqlite3.connect(tmp_path / "responses.db", isolation_level=None)
            blocker.execute("BEGIN IMMEDIATE")
            task = asyncio.create_task(write_until_cancelled(store))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            blocker.execute("ROLLBACK")
            blocker.close()

    asyncio.run(play())
