"""The file of responses that are stored on SQLite."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllmops.support.errors import VllmopsError
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import EVERYBODY, Limits, Response
from vllmops_responses.store.backends import sqlite
from vllmops_responses.store.backends.sqlite import ConnectionThread, Sqlite
from vllmops_responses.store.conversation_backend import (
    Conversation,
    ConversationItem,
    ItemAddition,
)
from vllmops_responses.store.response_store import ResponseStore

FILES, AT_ONCE = 100, 4


def test_a_device_is_no_file_for_a_store(tmp_path: Path) -> None:
    """SQLite would write its journal beside it, and root may do so in /dev."""
    os.mkfifo(tmp_path / "fifo")
    for place in ("/dev/null", tmp_path / "fifo", tmp_path):
        with pytest.raises(VllmopsError, match="is not a regular file"):
            backend_factory.make_backend(f"sqlite:///{place}")
    backend_factory.make_backend(f"sqlite:///{tmp_path}/new.db")


def test_connections_that_open_a_new_file_wait_for_each_other(tmp_path: Path) -> None:
    """SQLite itself does not wait where a file changes to WAL."""

    async def open_file_at_once(number: int) -> None:
        store = Sqlite(f"sqlite:///{tmp_path}/{number}.db", Limits(), "test")
        workers = [ConnectionThread(store.connect, f"worker-{one}") for one in range(AT_ONCE)]
        try:
            await asyncio.gather(
                *(
                    worker.run_job(lambda file: file.execute("SELECT 1").fetchone())
                    for worker in workers
                )
            )
        finally:
            for worker in workers:
                worker.stop()
                worker.thread.join()

    async def all_of_them() -> None:
        for number in range(FILES):
            await open_file_at_once(number)

    asyncio.run(all_of_them())


def response(name: str, **fields: Any) -> Response:
    given = {"owner": "me", "status": "completed", "body": b"body", "input": b"input", **fields}
    return Response(id=name, model="", created_at=1.0, **given)


def test_a_close_that_takes_too_long_leaves_no_thread(tmp_path: Path) -> None:
    busy, over = threading.Event(), threading.Event()

    def wait(_: sqlite3.Connection) -> None:
        busy.set()
        over.wait()

    async def play() -> list[threading.Thread]:
        store = Sqlite(f"sqlite:///{tmp_path}/responses.db", Limits(), "test")
        await store.open()
        assert store.writer
        assert store.reader
        threads = [store.writer.thread, store.reader.thread]
        work = asyncio.create_task(store.writer.run_job(wait))
        await asyncio.to_thread(busy.wait, 60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.close()
        over.set()
        await work
        return threads

    for thread in asyncio.run(play()):
        thread.join(60)
        assert not thread.is_alive()


async def queries(store: Sqlite, work: Awaitable[Any]) -> tuple[Any, int]:
    """What comes of something, and how often it read the file."""
    return await count_jobs(store.reader, work)


async def count_jobs(worker: ConnectionThread | None, work: Awaitable[Any]) -> tuple[Any, int]:
    """What comes of something, and how many jobs a worker had of it."""
    assert worker
    count, run = 0, worker.run_job

    async def one_more(job: Callable[[sqlite3.Connection], Any]) -> Any:
        nonlocal count
        count += 1
        return await run(job)

    worker.run_job = one_more  # type: ignore[method-assign]
    try:
        return await work, count
    finally:
        worker.run_job = run  # type: ignore[method-assign]


def with_store(path: Path, work: Callable[[Sqlite], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Sqlite(f"sqlite:///{path}", Limits(), "vllmops")
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(run())


def test_unchanged_response_is_read_once(tmp_path: Path) -> None:
    async def read_unchanged_response(store: Sqlite) -> None:
        made = response("resp_a")
        await store.create(made)
        assert await queries(store, store.get("me", "resp_a")) == (made, 1)
        assert await queries(store, store.get("me", "resp_a")) == (made, 0)
        # Whose it is is part of the question.
        assert await queries(store, store.get("you", "resp_a")) == (None, 1)
        assert await queries(store, store.get(EVERYBODY, "resp_a")) == (made, 1)

    with_store(tmp_path / "a.db", read_unchanged_response)


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    """SQLite keeps what its connections share beside the file, not beside the link."""
    file, link = tmp_path / "disk" / "a.db", tmp_path / "link.db"
    file.parent.mkdir()
    link.symlink_to(file)
    (tmp_path / "link.db-shm").write_bytes(bytes(32_768))  # of a file that was here before

    async def change_linked_file(store: Sqlite) -> None:
        made = response("resp_a")
        await store.create(made)
        assert await store.get("me", "resp_a") == made
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("DELETE FROM vllmops_responses")
        assert await store.get("me", "resp_a") is None

    with_store(link, change_linked_file)


def test_own_additions_do_not_invalidate_the_cache(tmp_path: Path) -> None:
    async def add_and_read(store: Sqlite) -> None:
        made = response("resp_a")
        await store.create(made)
        assert await queries(store, store.get("me", "resp_a")) == (made, 1)
        await store.create_conversation(Conversation(id="conv_a", owner="me"), [])
        await store.hold_conversation("me", "conv_a", "h")
        await store.add_items(addition, response("resp_b"), is_new=True)
        await store.create(response("resp_c"))
        await store.sweep()
        assert await queries(store, store.get("me", "resp_a")) == (made, 0)
        await store.delete("me", "resp_b")
        assert await queries(store, store.get("me", "resp_a")) == (made, 1)

    addition = ItemAddition(conversation_id="conv_a", owner="me", entries=[], holder="h")
    with_store(tmp_path / "a.db", add_and_read)


def test_responses_that_come_together_are_committed_together(tmp_path: Path) -> None:
    async def create_together(store: Sqlite) -> None:
        await store.create(response("resp_2"))
        names = [f"resp_{number}" for number in range(8)]
        together = asyncio.gather(*(store.create(response(name)) for name in names))
        done = [name != "resp_2" for name in names]
        assert await count_jobs(store.writer, together) == (done, 1)
        for name in names:
            assert await store.get("me", name) == response(name)

    with_store(tmp_path / "a.db", create_together)


def test_commits_of_another_process_between_calls_are_seen(tmp_path: Path) -> None:
    """Before, within and after what this one does."""
    path = tmp_path / "a.db"

    async def change_between_calls(store: Sqlite) -> None:
        def change(error: str) -> None:
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("UPDATE vllmops_responses SET error = ?", [error])

        def change_within_job(connection: sqlite3.Connection) -> None:
            change("within")

        def release_and_change(connection: sqlite3.Connection) -> None:
            connection.execute(store.text["release"], {"1": "conv_a", "2": "h"}).fetchall()
            change("after")

        await store.create(response("resp_a"))
        await store.create_conversation(Conversation(id="conv_a", owner="me"), [])
        await store.get("me", "resp_a")
        change("before")
        await store.create(response("resp_b"))
        assert await errors(store) == "before"
        await store.run_on_writer(change_within_job, spares=True)
        assert await errors(store) == "within"
        await store.hold_conversation("me", "conv_a", "h")
        await store.run_on_writer(release_and_change, spares=True)
        assert await errors(store) == "after"

    async def errors(store: Sqlite) -> str:
        found = await store.get("me", "resp_a")
        assert found
        return found.error

    with_store(path, change_between_calls)


def test_a_file_without_a_wal_is_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is shared in memory tells of its changes."""
    connect = sqlite3.connect
    other = partial(connect, f"file:{tmp_path}/a.db?vfs=unix-dotfile", uri=True)
    monkeypatch.setattr(sqlite3, "connect", lambda _, **given: other(**given))
    (tmp_path / "a.db-shm").write_bytes(bytes(sqlite.HEADER))  # of another time

    async def read_twice(store: Sqlite) -> None:
        made = response("resp_a")
        await store.create(made)
        for _ in range(2):
            assert await queries(store, store.get("me", "resp_a")) == (made, 1)

    with_store(tmp_path / "a.db", read_twice)


CHANGES = {
    "DELETE FROM vllmops_responses WHERE id = 'resp_a'": None,
    "UPDATE vllmops_responses SET status = 'failed'": response("resp_a", status="failed"),
    "UPDATE vllmops_responses SET owner = 'you'": None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_response_changed_by_another_process_is_read_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.db"

    async def change_and_read(store: Sqlite) -> None:
        await store.create(response("resp_a"))
        await store.get("me", "resp_a")
        with sqlite3.connect(path) as other:
            other.execute(change)
        other.close()
        assert await store.get("me", "resp_a") == CHANGES[change]

    with_store(path, change_and_read)


def test_a_change_while_it_is_read_is_not_missed(tmp_path: Path) -> None:
    async def delete_while_reading(store: Sqlite) -> None:
        await store.create(response("resp_a"))
        assert store.reader
        run = store.reader.run_job

        async def slowly(job: Callable[[sqlite3.Connection], Any]) -> Any:
            found = await run(job)
            await store.delete("me", "resp_a")
            return found

        store.reader.run_job = slowly  # type: ignore[method-assign]
        assert await store.get("me", "resp_a")
        assert await store.get("me", "resp_a") is None

    with_store(tmp_path / "a.db", delete_while_reading)


def test_running_large_or_damaged_responses_are_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def read_each_twice(store: Sqlite) -> None:
        await store.create(response("resp_runs", status="in_progress"))
        await store.create(response("resp_large", body=b"." * sqlite.KEPT_BYTES))
        await store.create(response("resp_damaged"))
        with sqlite3.connect(path) as other:
            other.execute("UPDATE vllmops_responses SET body = 5 WHERE id = 'resp_damaged'")
        other.close()
        for name in ("resp_runs", "resp_large", "resp_damaged"):
            for _ in range(2):
                found, count = await queries(store, store.get("me", name))
                assert (found.id, count) == (name, 1)

    with_store(path, read_each_twice)


def test_little_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "KEPT", 3)

    async def fill_cache(store: Sqlite) -> None:
        names = [f"resp_{number}" for number in range(10)]
        for name in names:
            await store.create(response(name))
        for name in names:
            await store.get("me", name)
            assert store.recent_responses
            assert len(store.recent_responses.responses) <= sqlite.KEPT

    with_store(tmp_path / "a.db", fill_cache)


def test_the_turns_of_this_process_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    async def turn(store: Sqlite, number: int) -> int:
        """Have one after the one before it; how often SQLite was asked for the turns until then."""
        before, count = f"resp_{number - 1}" if number else None, 0
        if before:
            found, count = await queries(store, store.list_turns("me", before))
            assert [each.id for each in found] == [f"resp_{each}" for each in range(number)]
            earlier = f"resp_{number - 2}" if number > 1 else None
            assert found[-1] == response(before, previous_id=earlier)
        together = [store.create(response(f"resp_{number}", previous_id=before))]
        together += [store.create(response(f"resp_{number}_{each}")) for each in range(3)]
        assert await asyncio.gather(*together) == [True] * 4
        return count

    async def add_turns(store: Sqlite) -> None:
        assert [await turn(store, number) for number in range(6)] == [0, 1, 0, 0, 0, 0]
        with sqlite3.connect(path) as other:
            other.execute("UPDATE vllmops_responses SET owner = 'you' WHERE id = 'resp_0_1'")
        other.close()
        assert [await turn(store, number) for number in range(6, 9)] == [1, 0, 0]
        assert await store.delete("me", "resp_4")
        found, count = await queries(store, store.list_turns("me", "resp_8"))
        assert ([each.id for each in found], count) == ([f"resp_{n}" for n in range(5, 9)], 1)
        assert await store.list_turns("you", "resp_8") == []

    with_store(path, add_turns)


def test_turns_that_bite_their_tail_end(tmp_path: Path) -> None:
    async def create_cycle(store: Sqlite) -> None:
        for name, before in (("resp_a", "resp_b"), ("resp_b", "resp_a")):
            await store.create(response(name, previous_id=before))
        for _ in range(2):
            found = await asyncio.wait_for(store.list_turns("me", "resp_a"), 60)
            assert {each.id for each in found} == {"resp_a", "resp_b"}

    with_store(tmp_path / "a.db", create_cycle)


def test_a_conversation_that_is_deleted_while_it_is_read_is_not_empty(tmp_path: Path) -> None:
    class Late(Sqlite):
        async def execute_named(self, name: str, *values: Any) -> Any:
            if name.startswith("entries "):
                assert await self.delete_conversation("me", "conv_a")
            return await super().execute_named(name, *values)

    async def run() -> None:
        store = Late(f"sqlite:///{tmp_path}/a.db", Limits(), "test")
        await store.open()
        try:
            made = Conversation(id="conv_a", owner="me")
            await store.create_conversation(made, [ConversationItem("a", b"{}")])
            page = await store.list_items("me", "conv_a", after_id=None, limit=9, descending=False)
            assert page is None
        finally:
            await store.close()

    asyncio.run(run())


def test_a_file_behind_a_link_is_private_too(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    before = os.umask(0o022)
    try:

        async def main() -> None:
            async with ResponseStore(backend_factory.make_backend(f"sqlite:///{tmp_path}/link.db")):
                pass

        asyncio.run(main())
    finally:
        os.umask(before)
    assert (tmp_path / "real.db").stat().st_mode & 0o777 == 0o600
