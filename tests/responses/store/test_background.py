"""What runs beside the requests goes on, whatever a backend or a database raises."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sqlite3
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllmops_responses.server.background.event_writer import EventWriter
from vllmops_responses.store import backend_factory, response_store
from vllmops_responses.store.backend import EventChunk, Limits, Response, StoreUnavailable
from vllmops_responses.store.backends.batching import CallBatcher
from vllmops_responses.store.backends.memory import Memory
from vllmops_responses.store.backends.sqlite import ConnectionThread, Sqlite, transaction
from vllmops_responses.store.response_store import ResponseStore

from ...support.extent import sample_cases
from ...support.waiting import until_async

RUN = Response(id="resp_1", owner="", model="m", status="in_progress", body=b"{}")


class Faulty(Memory):
    """A class of a user's own with a defect that shows for a while."""

    error: BaseException = TypeError("unsupported operand")
    calls = 0
    broken = True

    async def select_running(self, ids: Collection[str], *, renew: bool) -> set[str]:
        self.calls += 1
        if self.broken:
            raise self.error
        return await super().select_running(ids, renew=renew)


@pytest.mark.parametrize(
    "error",
    sample_cases(
        [TypeError("None"), RuntimeError("again"), asyncio.CancelledError(), MemoryError()], 2
    ),
)
def test_the_heartbeat_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "AFTER_S", 0.05)
    monkeypatch.setattr(response_store, "SWEEP_S", 0.1)  # leases are renewed as often, at least

    async def play() -> None:
        backend = Faulty("memory://", Limits(lease_s=600))
        backend.error = error
        async with ResponseStore(backend) as store:
            await store.create(RUN)
            stopped = asyncio.Event()
            store.track_run(RUN, stopped.set)
            await until_async(lambda: backend.calls >= 4)
            lease = backend.leases[RUN.id]
            backend.broken = False
            await until_async(lambda: backend.leases[RUN.id] > lease)
            found = await store.get("", RUN.id)
            assert found
            assert found.status == "in_progress"
            await store.set_status("", RUN.id, "cancelled")
            await asyncio.wait_for(stopped.wait(), 60)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(play(), 60))
    (shown,) = [item.message for item in caplog.records if type(error).__name__ in item.message]
    assert "lease" in shown


def test_sweeping_goes_on_and_hinders_no_heartbeat(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "SWEEP_S", 0.1)
    monkeypatch.setattr(response_store, "AFTER_S", 0.05)

    class Sweeps(Memory):
        swept = 0

        async def sweep(self) -> Any:
            self.swept += 1
            raise KeyError("x")

    async def play() -> None:
        backend = Sweeps("memory://", Limits())
        async with ResponseStore(backend) as store:
            await store.create(RUN)
            stopped = asyncio.Event()
            store.track_run(RUN, stopped.set)
            await until_async(lambda: backend.swept >= 3)
            await store.delete("", RUN.id)
            await asyncio.wait_for(stopped.wait(), 60)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(play(), 60))
    assert sum("KeyError" in item.message for item in caplog.records) == 1


def test_error_raised_while_stopping_a_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def stop() -> None:
        raise ValueError("no such task")

    async def play() -> None:
        async with ResponseStore(Memory("memory://", Limits())) as store:
            await store.create(RUN)
            store.track_run(RUN, stop)
            await store.delete("", RUN.id)
            await until_async(lambda: not store.tracked_runs)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(play(), 60))
    assert any("no such task" in item.message for item in caplog.records)


def test_events_go_on_behind_those_that_can_not_be_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Picky(Memory):
        async def append_events(self, response: Response, chunk: EventChunk) -> bool:
            if chunk.first_number == 0:
                raise TypeError("not these")
            return await super().append_events(response, chunk)

    async def play() -> list[int]:
        async with ResponseStore(Picky("memory://", Limits())) as store:
            await store.create(RUN)
            async with EventWriter(store, RUN) as writer:
                writer.queue_event(0, b"{}")
                # At once, not only at the end.
                await until_async(lambda: any("not these" in r.message for r in caplog.records))
                for n in range(1, 4):
                    writer.queue_event(n, b"{}")
                    await asyncio.sleep(0.1)
            log = await store.read_events("", RUN.id, -1)
            assert log
            return [
                n for chunk in log.chunks for n in range(chunk.first_number, chunk.last_number + 1)
            ]

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(play()) == [1, 2, 3]


def test_a_database_that_answers_too_little_keeps_nobody_waiting() -> None:
    async def run(given: list[int]) -> Sequence[int]:
        return given[:1] if len(given) > 1 else given

    async def play() -> None:
        calling = CallBatcher(run, lambda _: 0)
        async with asyncio.timeout(60):
            first = await asyncio.gather(*(calling(n) for n in range(3)), return_exceptions=True)
            assert [isinstance(item, Exception) for item in first] == [True] * 3
            assert await calling(7) == 7  # and it goes on

    asyncio.run(play())


def test_a_thread_of_sqlite_serves_on_though_a_loop_that_it_told_is_closed(tmp_path: Path) -> None:
    worker = ConnectionThread(lambda: sqlite3.connect(tmp_path / "a.db"), "w")

    async def left_alone() -> None:
        task = asyncio.ensure_future(worker.run_job(lambda c: c.execute("SELECT 1").fetchone()))
        await asyncio.sleep(0)
        task.cancel()

    async def slow() -> None:
        asyncio.ensure_future(worker.run_job(lambda _: time.sleep(0.3)))  # noqa: RUF006
        await asyncio.sleep(0.05)

    asyncio.run(left_alone())
    # A loop that is closed, not cancelled, leaves a future that nobody can be told of.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(slow())
    loop.close()

    async def run_select() -> Any:
        async with asyncio.timeout(60):
            return await worker.run_job(lambda c: c.execute("SELECT 1").fetchone())

    try:
        assert asyncio.run(run_select()) == (1,)
    finally:
        worker.stop()


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path) -> None:
    """Deferred constraints fail at the COMMIT, as a full disk does."""
    connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("CREATE TABLE a (id PRIMARY KEY)")
    connection.execute("CREATE TABLE b (a REFERENCES a DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(sqlite3.IntegrityError), transaction(connection):
        connection.execute("INSERT INTO b VALUES (1)")
    with transaction(connection):
        connection.execute("INSERT INTO a VALUES (2)")
    other = sqlite3.connect(tmp_path / "a.db")
    assert other.execute("SELECT id FROM a").fetchall() == [(2,)]
    assert other.execute("SELECT a FROM b").fetchall() == []


def test_sqlite_is_back_once_there_are_files_again(tmp_path: Path) -> None:
    """Its connections are made when they are first needed, which takes file descriptors."""

    async def play() -> None:
        backend = Sqlite(f"sqlite:///{tmp_path}/a.db", Limits(), "vllmops")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        store = ResponseStore(backend)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await store.open()
            with pytest.raises(StoreUnavailable):
                await store.create(RUN)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await asyncio.sleep(1.1)
        assert await store.create(RUN)
        await store.close()

    asyncio.run(play())


@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
@pytest.mark.parametrize(
    "words",
    sample_cases(
        [
            b"",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"$9999\r\n",
            b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I" * 20,
            b"\xff" * 5000,
            b"*-5\r\n:x\r\n",
        ],
        3,
    ),
)
def test_server_that_is_no_database_makes_the_store_unavailable(scheme: str, words: bytes) -> None:
    """A proxy, or a server of another kind: each call says that the store is unavailable."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                writer.write(words)
                await writer.drain()
                if not words:
                    break
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        store = ResponseStore(
            backend_factory.make_backend(f"{scheme}://127.0.0.1:{port}/0"), deadline_s=0.5
        )
        await store.open()
        store.track_run(RUN, lambda: None)
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.create(RUN)
            await asyncio.sleep(0.3)
        assert not any(task.done() for task in store.background)
        await store.close()
        server.close()

    asyncio.run(asyncio.wait_for(play(), 60))
