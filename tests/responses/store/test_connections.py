"""When connections are used again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import Any

import pytest

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backends.redis import Redis, send_commands

from ...support.databases import Server
from ...support.waiting import until_async

KINDS = ["postgresql", "redis"]


async def name_of(connection: Any, kind: str) -> int:
    """What the server calls a connection."""
    if kind == "postgresql":
        return int(await connection.fetchval("SELECT pg_backend_pid()"))
    return int((await send_commands(connection, [("CLIENT", "ID")]))[0])


class Lender:
    """Lends connections of a backend, as it does for its calls."""

    def __init__(self, kind: str, servers: dict[str, Server]) -> None:
        self.kind = kind
        backend: Any = backend_factory.make_backend(
            f"{servers[kind].url}?namespace=t{time.time_ns()}"
        )
        self.backend = backend
        self.lend = (backend.source if kind == "redis" else backend.pool).lend

    async def two(self) -> set[int]:
        """Two at once, by their names."""
        async with self.lend() as one, self.lend() as other:
            return {await name_of(one, self.kind), await name_of(other, self.kind)}

    async def fail(self, after_s: float) -> None:
        """A call on one of them that is given up: once it has it, however long that takes."""
        with contextlib.suppress(asyncio.CancelledError):
            async with self.lend():
                await asyncio.sleep(after_s)
                raise asyncio.CancelledError

    def has_closed_connection(self) -> bool:
        """Whether it has heard that the server has closed one of those that rest."""
        pool = self.backend.source.pool if self.kind == "redis" else self.backend.pool
        rest = [connection for connection, _ in pool.resting]
        if self.kind == "redis":
            return any(one._reader.at_eof() for one in rest)
        return any(one.is_closed() for one in rest)

    def run(self, main: Any) -> None:
        async def run_with_backend() -> None:
            await self.backend.open()
            try:
                await main()
            finally:
                await self.backend.close()

        asyncio.run(run_with_backend())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("silent_s", [0.01, 600.0])
def test_connection_of_an_abandoned_call_is_not_reused(
    kind: str, silent_s: float, shared_servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any other, where that took long."""
    monkeypatch.setattr("vllmops_responses.store.backends.connection_pool.SILENT_S", silent_s)
    lender = Lender(kind, shared_servers)

    async def main() -> None:
        before = await lender.two()
        assert await lender.two() == before
        await lender.fail(after_s=0.1)
        assert len(await lender.two() & before) == (0 if silent_s < 0.1 else 1)

    lender.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_all_closes_a_lent_connection_after_its_use(kind: str, shared_servers: Any) -> None:
    lender = Lender(kind, shared_servers)

    async def main() -> None:
        before = await lender.two()
        async with lender.lend() as lent:
            if isinstance(lender.backend, Redis):
                await lender.backend.source.abandon_server()
            else:
                await lender.backend.pool.close_all()
            assert await name_of(lent, kind) in before
        assert not await lender.two() & before

    lender.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_connection_idle_for_too_long_is_not_reused(
    kind: str, shared_servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = Lender(kind, shared_servers)

    async def main() -> None:
        before = await lender.two()
        monkeypatch.setattr("vllmops_responses.store.backends.connection_pool.IDLE_S", 0.0)
        assert not await lender.two() & before

    lender.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_more_calls_than_connections_wait_for_one(kind: str, shared_servers: Any) -> None:
    lender = Lender(kind, shared_servers)

    async def main() -> None:
        most = 4 if kind == "redis" else 8
        all_in_use = asyncio.Barrier(most)

        async def use() -> int:
            async with lender.lend() as lent:
                name = await name_of(lent, kind)
                await all_in_use.wait()
                return name

        assert len(set(await asyncio.gather(*(use() for _ in range(3 * most))))) == most

    lender.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_connection_closed_by_the_server_is_not_reused(kind: str, shared_servers: Any) -> None:
    lender = Lender(kind, shared_servers)

    async def main() -> None:
        before = await lender.two()
        async with lender.lend() as one:
            (other,) = before - {await name_of(one, kind)}
            if kind == "redis":
                await send_commands(one, [("CLIENT", "KILL", "ID", other)])
            else:
                await one.execute(f"SELECT pg_terminate_backend({other})")
        await until_async(lender.has_closed_connection)
        assert len(await lender.two() & before) == 1

    lender.run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_calls_log_no_errors(
    kind: str, shared_servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lender = Lender(kind, shared_servers)

    async def use_connection() -> None:
        async with lender.lend() as connection:
            await name_of(connection, kind)

    async def main() -> None:
        for number in range(120):
            calls = [asyncio.create_task(use_connection()) for _ in range(3)]
            await asyncio.sleep(number % 40 * 0.00005)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await asyncio.sleep(0.3)

    lender.run(main)
    gc.collect()  # an error that nobody has asked for is told then
    assert not caplog.records
