"""The backend ``sqlite:///path``: one file for all processes of one machine.

WAL, so readers wait for nobody. A commit reaches the operating system before it is acknowledged:
it survives the death of every process. ``synchronous=NORMAL``: a power cut may take the last ones.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote

import msgspec

from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.urls import redact_url

from ..backend import GONE, Limits, Response
from ..conversation_backend import ConversationResult
from .sql import SqlBackend
from .sql_conversations import Rollback, Rows, Steps, TransactionStep

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
LEAST_VERSION = (3, 35)  # RETURNING
# Less than the time that the store gives a call.
BUSY_S = 1.5
# A commit takes a tenth of that; SQLite by itself would sleep up to 100 ms between two tries.
NAP_S = 0.0005
# Responses that are kept in memory, and the largest of them: 8 MiB in all.
KEPT, KEPT_BYTES = 512, 16_384
# Statements that change no response which has ended by itself.
SPARING = (
    *("create", "append", "trim", "touch", "renew", "hold", "release", "renew hold"),
    *("create conversation", "set metadata", "delete conversation", "touch conversation"),
)
# Bytes of a WAL index's header, as SQLite documents it.
HEADER = 48


class ConnectionThread:
    """A thread with a connection of its own, which runs one job after the other.

    A whole statement, fetching included, is one job: one way there and back for each.

    Args:
        connect: makes the connection, in the thread.
        name: the thread's.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], name: str) -> None:
        self.connect = connect
        self.jobs: SimpleQueue[tuple[Job, asyncio.Future[Any]] | None] = SimpleQueue()
        # Results not yet handed over: while the event loop is busy, one call is enough for many.
        self.results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self.is_delivery_scheduled = False
        self.thread = threading.Thread(target=self.process_jobs, name=name, daemon=True)
        self.thread.start()

    async def run_job(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Have a job done; one that nobody waits for any more is left out."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.jobs.put((job, future))
        return await future

    def stop(self) -> None:
        """End the thread once it has done what it was given."""
        self.jobs.put(None)

    def process_jobs(self) -> None:
        connection: sqlite3.Connection | None = None
        while item := self.jobs.get():
            job, future = item
            if future.cancelled():
                continue
            result, error = None, None
            try:
                connection = connection or retry_while_busy(self.connect)
                result = retry_while_busy(partial(job, connection), should_stop=future.cancelled)
            except BaseException as caught:
                error = caught
            self.results.append((future, result, error))
            if not self.is_delivery_scheduled:
                self.is_delivery_scheduled = True
                try:
                    future.get_loop().call_soon_threadsafe(self.deliver_results)
                except RuntimeError:  # that loop is closed
                    self.is_delivery_scheduled = False
        if connection:
            connection.close()

    def deliver_results(self) -> None:
        """Give what is done to whoever waits for it, on the event loop."""
        self.is_delivery_scheduled = (
            False  # before the look: what comes after it needs another call
        )
        while self.results:
            resolve_future(*self.results.popleft())


def retry_while_busy(job: Callable[[], T], should_stop: Callable[[], bool] = lambda: False) -> T:
    """Do a job once nobody else holds the file.

    Args:
        job: what to do; it is given up after `BUSY_S`.
        should_stop: whether it is given up sooner.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return job()
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline or should_stop():
                raise
        time.sleep(NAP_S)


def resolve_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done() or future.get_loop().is_closed():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class RecentResponses:
    """Responses that were read or stored lately, which the event loop may tell again.

    It asks no connection, because any statement may wait for the disk. What is kept is as it was
    at one version of the file, and is told as long as the file has that version. A commit of this
    process that changes none of it is counted, so it lasts until another one commits.

    Args:
        header: of what all connections to the file share in memory; another one after each commit.
    """

    def __init__(self, header: mmap) -> None:
        self.header = header
        self.version = b""
        self.responses: dict[tuple[str, str], Response] = {}

    def read_version(self) -> bytes:
        """The version of the file."""
        return self.header[:]

    def find_response(self, owner: str, response_id: str) -> Response | None:
        """A response as it is now; None where that is not to be told here.

        Args:
            owner: who asks.
            response_id: of the response.
        """
        if self.version != self.read_version():
            return None
        known = self.responses.pop((owner, response_id), None)
        if known is not None:
            self.responses[owner, response_id] = known
        return known

    def find_turns(self, owner: str, response_id: str) -> list[Response] | None:
        """A turn after all before it, the oldest first; None where one of them is not kept."""
        turns, turn = list[Response](), response_id
        while (known := self.find_response(owner, turn)) and len(turns) < KEPT:
            turns.append(known)
            if known.previous_id is None:
                return turns[::-1]
            turn = known.previous_id
        return None

    def add_if_current(self, owner: str, response: Response, version: bytes) -> None:
        """Keep a response that was read when the file had that version, or a later one."""
        if version != self.read_version():
            return
        if version != self.version:
            self.responses.clear()
            self.version = version
        self.add_response(owner, response)

    def add_response(self, owner: str, response: Response) -> None:
        """Keep a response as it is in the file at this version."""
        if not is_cacheable(response):
            return
        self.responses.pop((owner, response.id), None)
        self.responses[owner, response.id] = response
        if len(self.responses) > KEPT:
            del self.responses[next(iter(self.responses))]

    def accept_commit(self, old_version: bytes, new_version: bytes) -> bool:
        """Count a commit that has changed nothing that is kept; False where that is not certain.

        Args:
            old_version: the version before it.
            new_version: the version after it; of others' commits between these nothing is known.
        """
        known = (
            old_version == self.version
            and count_commits(new_version) - count_commits(old_version) == 1
        )
        if known:
            self.version = new_version
        return known


def count_commits(version: bytes) -> int:
    """How many commits a version counts."""
    return int.from_bytes(version[8:12], sys.byteorder)


# By device and inode. None is closed: that would drop every lock of this process on the file.
CHANGES: dict[tuple[int, int], mmap] = {}


def map_wal_header(connection: sqlite3.Connection) -> mmap | None:
    """The header of what the connections to a file share in memory; each commit counts in it.

    Returns:
        None where there is no such memory, because some file systems have none.
    """
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        return None
    # Where the path leads to, if it is a link.
    (_, _, path), *_ = connection.execute("PRAGMA database_list").fetchall()
    shared = Path(f"{path}-shm")
    found = shared.stat()
    name = found.st_dev, found.st_ino
    if name not in CHANGES:
        CHANGES[name] = mmap(os.open(shared, os.O_RDONLY), HEADER, access=ACCESS_READ)
    return CHANGES[name]


def is_cacheable(response: Response) -> bool:
    """Whether a response has ended and is small; a damaged file may have values of any type."""
    parts = (response.body, response.input)
    ended = not response.is_running and response.error != GONE
    sound = ended and all(isinstance(part, bytes) for part in parts)
    return sound and sum(map(len, parts)) <= KEPT_BYTES


class Sqlite(SqlBackend):
    """A file; one thread writes, another reads."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = (OSError, sqlite3.Error)
    hint: ClassVar[str] = (
        "check the file, the owner of it and of its directory, and the space on its disk"
    )

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        super().__init__(url, limits, name, "sqlite.sql")
        self.path = parse_file_path(url)
        self.meta = f"{name}_meta"
        with suppress(OSError):  # not there yet, or not to be looked at: opening it tells
            if not stat.S_ISREG(self.path.stat().st_mode):
                # SQLite would write its journal beside a device.
                raise make_usage_error(
                    f"{self.path} is not a regular file",
                    "for example sqlite:////var/lib/vllmops/responses.db",
                )
        self.reader: ConnectionThread | None = None
        self.writer: ConnectionThread | None = None
        self.recent_responses: RecentResponses | None = None
        self.sparing_statements = {self.text[name] for name in SPARING}

    async def exists(self) -> bool:
        return self.path.exists() and await asyncio.to_thread(self.has_tables)

    def has_tables(self) -> bool:
        """Whether the file is a store, and not somebody else's database; it is not changed.

        True where that can't be read: opening it tells why.
        """
        try:
            with closing(
                sqlite3.connect(f"file:{quote(os.fsencode(self.path))}?mode=ro", uri=True)
            ) as file:
                found = file.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (self.meta,))
                return found.fetchone() is not None
        except sqlite3.Error:
            return True

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < LEAST_VERSION:
            raise VllmopsError(
                "store.sqlite",
                f"SQLite is {sqlite3.sqlite_version}; the store needs 3.35",
                "install a newer Python or SQLite, or use another --store",
            )
        self.writer = self.writer or ConnectionThread(self.connect, "responses-writer")
        self.reader = self.reader or ConnectionThread(self.connect, "responses-reader")
        await self.writer.run_job(self.upgrade_schema)
        if header := await self.reader.run_job(map_wal_header):
            self.recent_responses = RecentResponses(header)

    async def close(self) -> None:
        try:
            if self.writer:
                await super().close()
        finally:
            self.recent_responses = None
            workers = [worker for worker in (self.writer, self.reader) if worker]
            self.writer = self.reader = None
            for worker in workers:  # also where the time is over before they have ended
                worker.stop()
            for worker in workers:
                await asyncio.to_thread(worker.thread.join)

    def connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What people say to a model is theirs; the files beside it get the same mode.
        # Only where there is none: closing a file drops all locks that the process has on it.
        # Where a link leads: it is made there.
        with suppress(FileExistsError):
            os.close(os.open(os.path.realpath(self.path), os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA busy_timeout = 0")  # `retry_while_busy` waits instead
        # As PostgreSQL tells the time, in seconds since the epoch.
        connection.create_function("statement_timestamp", 0, time.time)
        connection.create_function("date_part", 2, lambda _, at: at)
        return connection

    def upgrade_schema(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute(self.text["meta"])
            row = connection.execute(self.text["meta get"], bind_values(("schema",))).fetchone()
            for statement in self.list_migrations(row[0] if row else 0):
                connection.execute(statement)

    async def find_response(self, owner: str, response_id: str) -> Response | None:
        recent = self.recent_responses
        if recent is None:
            return await super().find_response(owner, response_id)
        if known := recent.find_response(owner, response_id):
            return known
        version = recent.read_version()
        if found := await super().find_response(owner, response_id):
            recent.add_if_current(owner, found, version)
        return found

    async def find_turns(self, owner: str, response_id: str) -> list[Response]:
        recent = self.recent_responses
        if recent is None:
            return await super().find_turns(owner, response_id)
        if known := recent.find_turns(owner, response_id):
            return known
        version = recent.read_version()
        found = await super().find_turns(owner, response_id)
        for turn in found:
            recent.add_if_current(owner, turn, version)
        return found

    async def execute(self, statement: str, *values: Any) -> Rows:
        given = bind_values(values)

        def execute_job(connection: sqlite3.Connection) -> Rows:
            return connection.execute(statement, given).fetchall()

        if statement.startswith(("SELECT", "WITH RECURSIVE")):
            assert self.reader
            return await self.reader.run_job(execute_job)
        return await self.run_on_writer(execute_job, spares=statement in self.sparing_statements)

    async def insert_responses(self, responses: list[Response]) -> list[bool]:
        text, rows = (
            self.text["create"],
            [bind_values(self.build_create_args(one)) for one in responses],
        )

        def insert_job(connection: sqlite3.Connection) -> list[bool]:
            if len(rows) == 1:
                return [bool(connection.execute(text, rows[0]).fetchall())]
            with transaction(connection):
                return [bool(connection.execute(text, row).fetchall()) for row in rows]

        def cache_added(recent_responses: RecentResponses, added_flags: list[bool]) -> None:
            for one, new in zip(responses, added_flags, strict=True):
                if new:
                    recent_responses.add_response(one.owner, one)

        return await self.run_on_writer(insert_job, spares=True, keep=cache_added)

    async def run_on_writer(
        self,
        job: Callable[[sqlite3.Connection], T],
        *,
        spares: bool,
        keep: Callable[[RecentResponses, T], None] | None = None,
    ) -> T:
        """Have the writer do something.

        Args:
            job: what; it commits once at most.
            spares: whether it changes no response that has ended by itself.
            keep: keeps what it has stored.
        """
        assert self.writer
        recent = self.recent_responses
        if not spares or recent is None:
            return await self.writer.run_job(job)

        def run_versioned(connection: sqlite3.Connection) -> tuple[T, bytes, bytes]:
            count, before = connection.total_changes, recent.read_version()
            done = job(connection)
            # It may have found nothing to change.
            return (
                done,
                before,
                recent.read_version() if connection.total_changes > count else before,
            )

        done, before, after = await self.writer.run_job(run_versioned)
        if recent.accept_commit(before, after) and keep:
            keep(recent, done)
        return done

    async def execute_batch(self, name: str, values: list[tuple[Any, ...]]) -> None:
        def batch_job(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.executemany(self.text[name], map(bind_values, values))

        await self.run_on_writer(batch_job, spares=name in SPARING)

    async def take_hold(self, *given: Any) -> Rows | None:
        def hold_job(connection: sqlite3.Connection) -> Rows | None:
            if not self.run_step(connection, TransactionStep("hold", given)):
                return None
            return self.run_step(connection, TransactionStep("entries", given[:1]))

        return await self.run_on_writer(hold_job, spares=True)

    async def run_transaction(self, steps: Callable[[], Steps]) -> ConversationResult:
        def run_in_transaction(connection: sqlite3.Connection) -> ConversationResult:
            with transaction(connection):
                return self.run_steps(connection, steps())

        try:
            return await self.run_on_writer(
                run_in_transaction, spares=True
            )  # a run at most, which ends
        except Rollback as undone:
            return undone.outcome

    def run_steps(self, connection: sqlite3.Connection, steps: Steps) -> ConversationResult:
        """Run steps; what came of them."""
        rows: Rows = ()
        try:
            step = next(steps)
            while True:
                rows = self.run_step(connection, step)
                step = steps.send(rows)
        except StopIteration as done:
            outcome: ConversationResult = done.value
            return outcome

    def run_step(self, connection: sqlite3.Connection, step: TransactionStep) -> Rows:
        """Run a step; its rows."""
        text = self.text[step.name]
        given = map(bind_values, step.values if step.is_batch else [step.values])
        return [row for one in given for row in connection.execute(text, one).fetchall()]


def bind_values(values: Sequence[Any]) -> dict[str, Any]:
    """Values of ``$1`` and so on, which are names in SQLite; a list becomes JSON."""
    return {
        str(number): msgspec.json.encode(value).decode() if isinstance(value, list) else value
        for number, value in enumerate(values, 1)
    }


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors have ended it
            connection.execute("ROLLBACK")
        raise


def parse_file_path(url: str) -> Path:
    """The file of a URL: ``sqlite:///relative``, ``sqlite:////absolute``, ``sqlite:///~/home``.

    Raises:
        VllmopsError: ``usage``.
    """
    hint = "for example sqlite:////var/lib/vllmops/responses.db"
    found = unquote(url.removeprefix("sqlite://"), errors="surrogateescape")
    if not found.startswith("/") or found == "/" or "\0" in found:
        raise make_usage_error(f"{redact_url(url)} does not name a file", hint)
    try:
        return Path(found[1:]).expanduser().absolute()
    except RuntimeError as error:
        raise make_usage_error(
            f"{redact_url(url)} is in the home directory of a user who has none", hint
        ) from error
