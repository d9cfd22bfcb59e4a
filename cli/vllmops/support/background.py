"""Background work that survives exceptions: each is reported once, and the work continues.

The agent uses this inside a production engine, so it needs only the standard library.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

# The same exception is reported again after this time.
AGAIN_S = 3600.0


class ErrorReporter:
    """Reports exceptions of repeated work, each kind once an hour.

    A kind is an exception's type and the line that raised it. Thread-safe.

    Args:
        problem: what does not work, such as ``changes of the keyring are not noticed``.
        write_message: gets the text, a log method for example; its exceptions are dropped.

    Attributes:
        last_error: the text of the last exception, reported or not.
    """

    def __init__(self, problem: str, write_message: Callable[[str], object]) -> None:
        self.problem = problem
        self.write_message = write_message
        self.report_times: dict[tuple[type[BaseException], str], float] = {}
        self.last_error = ""

    def report(self, error: BaseException) -> None:
        """Report an exception, unless it was reported within the hour; never raises."""
        try:
            kind, now = (type(error), format_error_location(error)), time.monotonic()
            self.last_error = f"{type(error).__name__}: {error}"
            if now - self.report_times.get(kind, -AGAIN_S) < AGAIN_S:
                return
            self.report_times[kind] = now
            self.write_message(f"vllmops: {self.problem}: {self.last_error} ({kind[1]})")
        except Exception:  # noqa: S110 - there is nowhere left to report it
            pass


def format_error_location(error: BaseException) -> str:
    """The file and the line that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""


async def run_and_report(work: Callable[[], Awaitable[object]], reporter: ErrorReporter) -> bool:
    """Do something and report what it raises; whether it succeeded.

    A CancelledError is reported if this task itself is not being cancelled: then something that
    the work awaited was cancelled.
    """
    try:
        await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        reporter.report(error)
    except Exception as error:
        reporter.report(error)
    else:
        return True
    return False


async def repeat_forever(
    work: Callable[[], Awaitable[object]],
    reporter: ErrorReporter,
    pause_s: float = 0.0,
    *,
    after_s: float = 1.0,
) -> NoReturn:
    """Repeat something until this task is cancelled.

    Args:
        work: one round.
        reporter: reports what a round raises.
        pause_s: seconds before each round.
        after_s: the least pause after a failed round, in seconds.
    """
    succeeded = True
    while True:
        await asyncio.sleep(pause_s if succeeded else max(pause_s, after_s))
        succeeded = await run_and_report(work, reporter)


def start_task(work: Coroutine[object, object, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """A task that is among others until it is done; asyncio itself would not keep it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def start_repeating_thread(
    name: str,
    work: Callable[[], object],
    reporter: ErrorReporter,
    *,
    wait: Callable[[float], object] = time.sleep,
    pause_s: float = 0.0,
    after_s: float = 1.0,
) -> threading.Thread:
    """Start a daemon thread that repeats something.

    Args:
        name: the thread's name.
        work: one round.
        reporter: reports what a round raises.
        wait: waits for the given seconds before each round; when it returns True the thread ends.
        pause_s: seconds before each round.
        after_s: the least pause after a failed round, in seconds.
    """

    def run_rounds() -> None:
        pause = pause_s
        while not wait(pause):
            try:
                work()
                pause = pause_s
            except Exception as error:
                reporter.report(error)
                pause = max(pause_s, after_s)

    daemon = threading.Thread(target=run_rounds, name=name, daemon=True)
    daemon.start()
    return daemon


def call_in_thread(work: Callable[[], T], name: str | None = None) -> Future[T]:
    """Call something once in a daemon thread; what it gives or raises comes with the future.

    Args:
        work: what to call.
        name: the thread's.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # whoever stops waiting can't cancel what runs

    def complete_future() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=complete_future, name=name, daemon=True).start()
    return future
