"""What is Redis' own: its script, and how often it writes."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
from msgspec.structs import replace

from vllmops.responses import opening
from vllmops.responses.backend import Limits
from vllmops.responses.redis import Redis
from vllmops.responses.store import Response, ResponseStore

from .databases import Server


@pytest.fixture
def url(shared_servers: dict[str, Server]) -> str:
    return f"{shared_servers['redis'].url}?namespace=t{time.time_ns()}"


@pytest.fixture
def server(shared_servers: dict[str, Server]) -> redis.Redis:
    return redis.Redis.from_url(shared_servers["redis"].url)


def turns(count: int) -> list[Response]:
    made: list[Response] = []
    for number in range(count):
        previous = made[-1].id if made else None
        made.append(
            Response(
                id=f"r{number}",
                owner="",
                model="m",
                status="completed",
                previous_id=previous,
                body=b'{"output":[]}',
            )
        )
    return made


def test_to_read_writes_nothing(url: str, server: redis.Redis) -> None:
    """With appendfsync always each write waits for the disk."""

    async def main() -> None:
        async with ResponseStore(opening.backend(url)) as store:
            made = turns(3)
            for each in made:
                await store.create(each)
            written = server.info("persistence")["rdb_changes_since_last_save"]
            assert await store.get("", "r0") == made[0]
            assert [each.id for each in await store.conversation("", "r2")] == ["r0", "r1", "r2"]
            assert server.info("persistence")["rdb_changes_since_last_save"] == written

    asyncio.run(main())


def test_uses_are_written_with_the_next_response(url: str) -> None:
    async def main() -> None:
        limits = Limits(max_size=3)
        async with ResponseStore(opening.backend(url, limits)) as store:
            for each in turns(4)[:3]:
                await store.create(each)
            await store.get("", "r0")
            await store.create(turns(4)[3])
            assert await store.get("", "r1") is None
        async with ResponseStore(opening.backend(url, limits)) as store:
            await store.get("", "r0")
        # What was left to write came with the end of that store.
        async with ResponseStore(opening.backend(url, limits)) as store:
            for name in ("new", "newer"):
                await store.create(replace(turns(1)[0], id=name))
            assert await store.get("", "r0") is not None

    asyncio.run(main())


def test_uses_of_a_very_long_conversation(url: str) -> None:
    async def main() -> None:
        backend = opening.backend(url)
        async with ResponseStore(backend) as store:
            await store.create(turns(1)[0])
            assert isinstance(backend, Redis)
            await backend.note(["r0", *(f"gone{number}" for number in range(10_000))])
            assert backend.uses.noted == {}

    asyncio.run(main())


def test_a_server_that_has_forgotten_the_script(url: str, server: redis.Redis) -> None:
    async def main() -> None:
        async with ResponseStore(opening.backend(url)) as store:
            made = turns(20)
            for each in (made[:10], made[10:]):
                server.script_flush()
                assert all(await asyncio.gather(*(store.create(one) for one in each)))
            server.script_flush()
            assert await asyncio.gather(*(store.get("", each.id) for each in made)) == made

    asyncio.run(main())
