"""The backend ``sqlite:///path``: one file for all processes of one machine.

WAL, so readers wait for nobody. A commit reaches the operating system before it is acknowledged:
it survives the death of every process. ``synchronous=NORMAL``: a power cut may take the last ones.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

import msgspec

from ..errors import VllmopsError, usage
from .backend import FINISHED, Limits, Response
from .conversations import Addition, Outcome
from .sql import Sql, made
from .sql_conversations import Rows, Step, Steps, Undo

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
LEAST_VERSION = (3, 35)  # RETURNING
# Less than the time that the store gives a call.
BUSY_S = 1.5
# A commit takes a tenth of that; SQLite by itself would sleep up to 100 ms between two tries.
NAP_S = 0.0005
# Responses that are kept in memory, and the largest of them: 8 MiB in all.
KEPT, KEPT_BYTES = 512, 16_384


class Worker:
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
        self.done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self.telling = False
        self.thread = threading.Thread(target=self.work, name=name, daemon=True)
        self.thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Have a job done; one that nobody waits for any more is left out."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.jobs.put((job, future))
        return await future

    def stop(self) -> None:
        """End the thread once it has done what it was given."""
        self.jobs.put(None)

    def work(self) -> None:
        connection: sqlite3.Connection | None = None
        while item := self.jobs.get():
            job, future = item
            if future.cancelled():
                continue
            result, error = None, None
            try:
                connection = connection or patiently(self.connect)
                result = patiently(partial(job, connection))
            except BaseException as caught:
                error = caught
            self.done.append((future, result, error))
            if not self.telling:
                self.telling = True
                try:
                    future.get_loop().call_soon_threadsafe(self.tell)
                except RuntimeError:  # that loop is closed
                    self.telling = False
        if connection:
            connection.close()

    def tell(self) -> None:
        """Give what is done to whoever waits for it, on the event loop."""
        self.telling = False  # before the look: what comes after it needs another call
        while self.done:
            settle(*self.done.popleft())


def patiently(job: Callable[[], T]) -> T:
    """Do a job once nobody else holds the file; gives up after `BUSY_S`."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return job()
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(NAP_S)


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done() or future.get_loop().is_closed():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class Recent:
    """Responses that were written or read lately, which the event loop itself may read.

    What nobody has changed since is not read at all: SQLite tells so from memory that its
    connections share. Else the row is read again, from pages that the machine still has in its
    memory: that takes less than the way to another thread and back.

    Args:
        connection: for this alone.
        text: the statement that reads one.
    """

    def __init__(self, connection: sqlite3.Connection, text: str) -> None:
        self.connection = connection
        self.text = text
        # With what `look` gave before they were read; without a response where none was.
        self.kept: dict[tuple[str, str], tuple[object, Response | None]] = {}

    def look(self) -> object:
        """A value that is another one after each change of the file."""
        try:
            (version,) = self.connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:  # it can't be told, so all is read again
            version = object()
        return version

    def find(self, owner: str, response_id: str, version: object) -> Response | None:
        """A response as it is now; None where that is not to be told here.

        Args:
            owner: who asks.
            response_id: of the response.
            version: what `look` has just given.
        """
        known = self.kept.pop((owner, response_id), None)
        if known is None:
            return None
        if known[0] != version or known[1] is None:
            try:
                given = numbered((response_id, owner))
                rows = self.connection.execute(self.text, given).fetchall()
            except sqlite3.Error:
                rows = []
            if not rows or not fits(found := made(rows[0])):
                return None
            known = version, found
        self.note((owner, response_id), known)
        return known[1]

    def keep(self, owner: str, response: Response, version: object) -> None:
        """Keep a response that was read after `look` gave that value."""
        if fits(response):
            self.note((owner, response.id), (version, response))

    def written(self, response: Response) -> None:
        """Note what was written: its owner may read it next."""
        if fits(response):
            self.note((response.owner, response.id), (None, None))

    def note(self, key: tuple[str, str], known: tuple[object, Response | None]) -> None:
        self.kept.pop(key, None)
        self.kept[key] = known
        if len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]


def fits(response: Response) -> bool:
    """Whether a response has ended and is small; a damaged file may have values of any type."""
    parts = (response.body, response.input)
    sound = not response.running and all(isinstance(part, bytes) for part in parts)
    return sound and sum(map(len, parts)) <= KEPT_BYTES


class Sqlite(Sql):
    """A file; one thread writes, another reads."""

    unavailable: ClassVar[tuple[type[Exception], ...]] = (OSError, sqlite3.Error)

    def __init__(self, url: str, limits: Limits, name: str) -> None:
        super().__init__(url, limits, name, "sqlite.sql")
        self.path = path(url)
        with suppress(OSError):  # not there yet, or not to be looked at: opening it tells
            if not stat.S_ISREG(self.path.stat().st_mode):
                # SQLite would write its journal beside a device.
                raise usage(
                    f"{self.path} is not a regular file",
                    "for example sqlite:////var/lib/vllmops/responses.db",
                )
        self.reader: Worker | None = None
        self.writer: Worker | None = None
        self.recent: Recent | None = None

    async def there(self) -> bool:
        return self.path.exists()

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < LEAST_VERSION:
            raise VllmopsError(
                "store.sqlite",
                f"SQLite is {sqlite3.sqlite_version}; the store needs 3.35",
                "install a newer Python or SQLite, or use another --store",
            )
        self.writer = self.writer or Worker(self.connect, "responses-writer")
        self.reader = self.reader or Worker(self.connect, "responses-reader")
        await self.writer.run(self.upgrade)
        if self.recent is None:
            self.recent = Recent(await self.reader.run(self.another), self.text["get"])

    async def close(self) -> None:
        try:
            if self.writer:
                await super().close()
        finally:
            if self.recent:
                self.recent.connection.close()  # not the last one, whose end may take a while
                self.recent = None
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
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL, 0o600))
        # `Recent` uses its connection in another thread than the one that makes it.
        connection = sqlite3.connect(
            self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA busy_timeout = 0")  # `patiently` waits instead
        # As PostgreSQL tells the time, in seconds since the epoch.
        connection.create_function("statement_timestamp", 0, time.time)
        connection.create_function("date_part", 2, lambda _, at: at)
        return connection

    def another(self, _: sqlite3.Connection) -> sqlite3.Connection:
        connection = self.connect()
        # The event loop uses it, and waits for nobody.
        connection.execute("PRAGMA busy_timeout = 0")
        return connection

    def upgrade(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute(self.text["meta"])
            row = connection.execute(self.text["meta get"], numbered(("schema",))).fetchone()
            for statement in self.steps(row[0] if row else 0):
                connection.execute(statement)

    async def find(self, owner: str, response_id: str) -> Response | None:
        assert self.recent
        version = self.recent.look()
        if known := self.recent.find(owner, response_id, version):
            return known
        found = await super().find(owner, response_id)
        if found is not None and self.recent:
            self.recent.keep(owner, found, version)
        return found

    async def add(self, response: Response) -> bool:
        return self.noted(await super().add(response), response)

    async def put(self, response: Response, *, unless_status: Collection[str] = FINISHED) -> bool:
        return self.noted(await super().put(response, unless_status=unless_status), response)

    async def add_entries(
        self, addition: Addition, response: Response | None = None, *, new: bool = False
    ) -> Outcome:
        outcome = await super().add_entries(addition, response, new=new)
        if response:
            self.noted(outcome is Outcome.DONE, response)
        return outcome

    def noted(self, done: bool, response: Response) -> bool:
        """Whether a response was written, which is noted."""
        if done and self.recent:
            self.recent.written(response)
        return done

    async def run(self, statement: str, *values: Any) -> Sequence[Sequence[Any]]:
        assert self.reader
        assert self.writer
        worker = self.reader if statement.startswith(("SELECT", "WITH RECURSIVE")) else self.writer
        given = numbered(values)
        return await worker.run(lambda connection: connection.execute(statement, given).fetchall())

    async def many(self, name: str, values: list[tuple[Any, ...]]) -> None:
        def run(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.executemany(self.text[name], map(numbered, values))

        assert self.writer
        await self.writer.run(run)

    async def both(self, first: Step, then: Step) -> tuple[Rows, Rows]:
        def run(connection: sqlite3.Connection) -> tuple[Rows, Rows]:
            rows = self.taken(connection, first)
            return rows, (self.taken(connection, then) if rows else ())

        assert self.writer
        return await self.writer.run(run)

    async def transact(self, steps: Callable[[], Steps]) -> Outcome:
        def run(connection: sqlite3.Connection) -> Outcome:
            try:
                with transaction(connection):
                    return self.walked(connection, steps())
            except Undo as undone:
                return undone.outcome

        assert self.writer
        return await self.writer.run(run)

    def walked(self, connection: sqlite3.Connection, steps: Steps) -> Outcome:
        """Run steps; what came of them."""
        rows: Rows = ()
        try:
            step = next(steps)
            while True:
                rows = self.taken(connection, step)
                step = steps.send(rows)
        except StopIteration as done:
            outcome: Outcome = done.value
            return outcome

    def taken(self, connection: sqlite3.Connection, step: Step) -> Rows:
        """Run a step; its rows."""
        text = self.text[step.name]
        given = map(numbered, step.values if step.many else [step.values])
        return [row for one in given for row in connection.execute(text, one).fetchall()]


def numbered(values: Sequence[Any]) -> dict[str, Any]:
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


def path(url: str) -> Path:
    """The file of a URL: ``sqlite:///relative``, ``sqlite:////absolute``, ``sqlite:///~/home``.

    Raises:
        VllmopsError: ``usage``.
    """
    found = url.removeprefix("sqlite://")
    if not found.startswith("/") or found == "/":
        raise usage(f"{url} does not name a file", "for example sqlite:///responses.db")
    return Path(found[1:]).expanduser().absolute()
