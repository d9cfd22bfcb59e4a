"""Work in the background goes on whatever it raises, and says once what that was."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from vllmops.support import background
from vllmops.support.background import ErrorReporter

from .support.waiting import until, until_async


def test_a_task_goes_on_and_tells_of_each_kind_once() -> None:
    shown: list[str] = []
    rounds = 0

    async def raise_various_errors() -> None:
        nonlocal rounds
        rounds += 1
        if rounds % 3 == 0:
            raise TypeError(f"round {rounds}")
        if rounds % 3 == 1:
            raise OSError(24, "Too many open files")

    async def main() -> None:
        task = asyncio.create_task(
            background.repeat_forever(
                raise_various_errors, ErrorReporter("it rests", shown.append), 0.0, after_s=0.0
            )
        )
        await until_async(lambda: rounds >= 30)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(main())
    assert len(shown) == 2
    assert shown[0].startswith(
        "vllmops: it rests: OSError: [Errno 24] Too many open files (test_background.py:"
    )
    assert "TypeError: round 3" in shown[1]


def test_a_cancellation_that_nobody_asked_for_ends_no_task() -> None:
    """An inner task that was cancelled raises CancelledError in whoever waits for it."""
    shown: list[str] = []
    rounds = 0

    async def await_cancelled_task() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            inner = asyncio.ensure_future(asyncio.sleep(600))
            inner.cancel()
            await inner

    async def main() -> None:
        task = asyncio.create_task(
            background.repeat_forever(
                await_cancelled_task, ErrorReporter("w", shown.append), 0.0, after_s=0.0
            )
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert rounds > 2
    assert len(shown) == 1


def test_a_thread_goes_on_until_it_is_to_end() -> None:
    shown: list[str] = []
    stop = threading.Event()
    rounds = 0

    def raise_runtime_error() -> None:
        nonlocal rounds
        rounds += 1
        raise RuntimeError("can't start new thread")

    made = background.start_repeating_thread(
        "t", raise_runtime_error, ErrorReporter("w", shown.append), wait=stop.wait, after_s=0.001
    )
    until(lambda: rounds >= 5)
    stop.set()
    made.join(60)
    assert not made.is_alive()
    assert rounds >= 5
    assert len(shown) == 1


def test_the_same_error_is_reported_again_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    reporter = ErrorReporter("w", shown.append)
    times = iter((1000.0, 1001.0, 5000.0))
    # Nobody waits for an hour.
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: next(times)))
    for _ in range(3):
        reporter.report(KeyError("x"))
    assert len(shown) == 2


def test_a_report_that_cannot_be_made_raises_nothing() -> None:
    def raise_disk_full(_: str) -> None:
        raise OSError(28, "No space left on device")

    class OddError(Exception):
        def __str__(self) -> str:
            raise ValueError

    ErrorReporter("w", raise_disk_full).report(KeyError("x"))
    ErrorReporter("w", print).report(OddError())


def test_a_cancelled_call_in_a_thread_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    over, ended = threading.Event(), threading.Event()

    def wait_until_over() -> None:
        over.wait()
        ended.set()

    async def play() -> None:
        waiting = asyncio.wrap_future(background.call_in_thread(wait_until_over, "beside"))
        waiting.cancel()
        await asyncio.sleep(0.05)  # for the cancellation to reach the thread's future

    asyncio.run(play())
    over.set()
    assert ended.wait(60)
    for thread in threading.enumerate():
        if thread.name == "beside":
            thread.join(60)
    assert raised == []
