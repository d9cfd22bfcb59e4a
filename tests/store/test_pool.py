"""Connections that are lent; tests of the backends have real ones."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from vllmops.store import pool
from vllmops.store.pool import Pool


class Numbers(Pool[int]):
    """A pool of numbers, which are as good as connections here."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(size)
        self.fresh = count()
        self.broken: set[int] = set()
        self.ended: list[int] = []

    async def connect(self) -> int:
        return next(self.fresh)

    async def fit(self, connection: int) -> bool:
        return connection not in self.broken

    async def end(self, connection: int) -> None:
        self.ended.append(connection)


async def taken(numbers: Numbers) -> int:
    async with numbers.lend() as number:
        return number


def test_the_one_that_was_used_last_is_lent_first() -> None:
    async def go() -> None:
        numbers = Numbers()
        async with numbers.lend() as first, numbers.lend() as second:
            assert (first, second) == (0, 1)
        assert [await taken(numbers), await taken(numbers)] == [0, 0]
        assert numbers.ended == []

    asyncio.run(go())


@pytest.mark.parametrize("silent_s", [0.01, 1.0])
def test_after_silence_the_others_are_not_trusted(
    silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SILENT_S", silent_s)

    async def go() -> None:
        numbers = Numbers(3)
        async with numbers.lend(), numbers.lend(), numbers.lend():
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), numbers.lend():
                await asyncio.sleep(1)
        assert sorted(numbers.ended) == ([0, 1, 2] if silent_s < 0.1 else [0])

    asyncio.run(go())


def test_after_trouble_it_is_ended() -> None:
    async def go() -> None:
        numbers = Numbers(1)
        with pytest.raises(ZeroDivisionError):
            async with numbers.lend():
                raise ZeroDivisionError
        assert numbers.ended == [0]
        assert await taken(numbers) == 1

    asyncio.run(go())


def test_who_cancels_ends_it_and_leaves_its_place() -> None:
    async def go() -> None:
        numbers = Numbers(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), numbers.lend():
                await asyncio.sleep(60)
        assert numbers.ended == [0]
        async with numbers.lend():
            with pytest.raises(TimeoutError):  # all are lent
                await asyncio.wait_for(taken(numbers), 0.01)
        assert await taken(numbers) == 1

    asyncio.run(go())


def test_what_broke_or_rested_for_long_is_not_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        numbers = Numbers()
        numbers.broken = {await taken(numbers)}
        assert await taken(numbers) == 1
        monkeypatch.setattr(pool, "IDLE_S", 0.0)
        assert await taken(numbers) == 2
        assert numbers.ended == [0, 1]

    asyncio.run(go())


def test_what_is_in_use_when_it_is_emptied_is_ended_after() -> None:
    async def go() -> None:
        numbers = Numbers()
        async with numbers.lend():
            await taken(numbers)
            await numbers.empty()
            assert numbers.ended == [1]
        assert numbers.ended == [1, 0]

    asyncio.run(go())
