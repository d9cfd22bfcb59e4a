"""Calls that are made as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from vllmops_responses.store.backends import batching
from vllmops_responses.store.backends.batching import CallBatcher


class Doubling:
    """Doubles numbers once it may; of what it was asked at a time, the sizes."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.may = asyncio.Event()
        self.cancelled = 0
        self.double = CallBatcher(self.run, weigh=abs)

    async def run(self, given: list[int]) -> Sequence[int]:
        self.asked.append(given)
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if 13 in given:
            raise ZeroDivisionError
        return [2 * item for item in given]


async def start_calls(doubling: Doubling, *numbers: int) -> list[asyncio.Task[int]]:
    """Calls at once, which are under way where none was before."""
    tasks = [asyncio.create_task(doubling.double(item)) for item in numbers]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_calls_made_together_or_during_a_batch_form_one_batch() -> None:
    async def call_in_batches() -> None:
        doubling = Doubling()
        tasks = await start_calls(doubling, 1, 2)
        tasks += await start_calls(doubling, 3)
        tasks += await start_calls(doubling, 4, 5)
        assert doubling.asked == [[1, 2]]
        doubling.may.set()
        assert await asyncio.gather(*tasks) == [2, 4, 6, 8, 10]
        assert await doubling.double(6) == 12
        assert doubling.asked == [[1, 2], [3, 4, 5], [6]]

    asyncio.run(call_in_batches())


def test_single_call_can_fail_or_be_cancelled() -> None:
    async def cancel_and_fail_calls() -> None:
        doubling = Doubling()
        tasks = await start_calls(doubling, 1)
        tasks += await start_calls(doubling, 2, 3)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert doubling.cancelled == 1
        doubling.may.set()
        assert [await item for item in tasks[1:]] == [4, 6]
        with pytest.raises(ZeroDivisionError):
            await doubling.double(13)
        assert await doubling.double(5) == 10
        assert doubling.asked == [[1], [2, 3], [13], [5]]

    asyncio.run(cancel_and_fail_calls())


def test_not_more_than_so_many_and_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MOST", 3)
    monkeypatch.setattr(batching, "ROOM", 100)

    async def call_with_limits() -> None:
        doubling = Doubling()
        doubling.may.set()
        tasks = await start_calls(doubling, 1, 2, 3, 4, 500, 5)
        assert await asyncio.gather(*tasks) == [2, 4, 6, 8, 1000, 10]
        assert doubling.asked == [[1, 2, 3], [4, 500], [5]]

    asyncio.run(call_with_limits())


def test_an_error_is_told_to_those_that_went_together() -> None:
    async def fail_batch() -> None:
        doubling = Doubling()
        tasks = await start_calls(doubling, 1, 13)
        tasks += await start_calls(doubling, 2)
        doubling.may.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(item) for item in found] == [ZeroDivisionError, ZeroDivisionError, int]
        assert await doubling.double(3) == 6

    asyncio.run(fail_batch())


def test_cancelled_call_does_not_affect_others_in_its_batch() -> None:
    async def cancel_some_calls() -> None:
        doubling = Doubling()
        first, second = await start_calls(doubling, 1, 2)
        third, fourth = await start_calls(doubling, 3, 4)
        first.cancel()  # of two that go together
        third.cancel()  # while it waits
        await asyncio.wait([first, third])
        doubling.may.set()
        assert [await second, await fourth] == [4, 8]
        assert doubling.asked == [[1, 2], [4]]
        assert doubling.cancelled == 0

    asyncio.run(cancel_some_calls())


def test_batch_without_waiters_is_cancelled_and_later_ones_run() -> None:
    async def cancel_whole_batch() -> None:
        doubling = Doubling()
        gone = await start_calls(doubling, 1, 2)
        (last,) = await start_calls(doubling, 3)
        for item in gone:
            item.cancel()
        await asyncio.wait(gone)
        doubling.may.set()
        assert await last == 6
        assert doubling.asked == [[1, 2], [3]]
        assert doubling.cancelled == 1

    asyncio.run(cancel_whole_batch())


def test_calls_cancelled_before_their_batch_are_not_run() -> None:
    async def cancel_before_batch() -> None:
        doubling = Doubling()
        task = asyncio.create_task(doubling.double(1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        doubling.may.set()
        assert await doubling.double(2) == 4
        assert doubling.asked == [[2]]

    asyncio.run(cancel_before_batch())
