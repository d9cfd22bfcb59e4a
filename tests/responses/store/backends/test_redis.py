"""What is Redis' own: its script, and how often it writes."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
from msgspec.structs import replace

from vllmops.support.errors import VllmopsError
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Limits, Response
from vllmops_responses.store.backends.redis import Redis
from vllmops_responses.store.conformance.response_checks import make_response
from vllmops_responses.store.response_store import ResponseStore

from ....support.databases import Server, Servers


@pytest.fixture
def url(shared_servers: dict[str, Server]) -> str:
    return f"{shared_servers['redis'].url}?namespace=t{time.time_ns()}"


@pytest.fixture
def server(shared_servers: dict[str, Server]) -> redis.Redis:
    return redis.Redis.from_url(shared_servers["redis"].url)


def turns(count: int) -> list[Response]:
    """A conversation: r0, r1 and so on."""
    names = [f"r{number}" for number in range(count)]
    before = zip(names, [None, *names[:-1]], strict=True)
    return [make_response(name, owner="", previous_id=item) for name, item in before]


def test_to_read_writes_nothing(servers: Servers) -> None:
    """With appendfsync always each write waits for the disk."""
    alone = servers.valkey()  # others write to the one that tests share
    server = redis.Redis.from_url(alone.url)

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(alone.url)) as store:
            made = turns(3)
            for item in made:
                await store.create(item)
            written = server.info("persistence")["rdb_changes_since_last_save"]
            assert await store.get("", "r0") == made[0]
            assert [item.id for item in await store.list_turns("", "r2")] == ["r0", "r1", "r2"]
            assert server.info("persistence")["rdb_changes_since_last_save"] == written

    asyncio.run(main())


def test_a_store_that_was_emptied_is_there(servers: Servers) -> None:
    alone = servers.valkey()

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(alone.url)) as store:
            await store.create(make_response("r"))
            alone.execute_command("FLUSHALL")
            reader = backend_factory.make_backend(alone.url)
            assert not await reader.exists()
            await store.create(make_response("r"))
            assert await reader.exists()
            await reader.close()

    asyncio.run(main())


def test_uses_are_written_with_the_next_response(url: str) -> None:
    async def main() -> None:
        limits = Limits(max_size=3)
        async with ResponseStore(backend_factory.make_backend(url, limits)) as store:
            for item in turns(4)[:3]:
                await store.create(item)
            await store.get("", "r0")
            await store.create(turns(4)[3])
            assert await store.get("", "r1") is None
        async with ResponseStore(backend_factory.make_backend(url, limits)) as store:
            await store.get("", "r0")
        # What was left to write came with the end of that store.
        async with ResponseStore(backend_factory.make_backend(url, limits)) as store:
            for name in ("new", "newer"):
                await store.create(replace(turns(1)[0], id=name))
            assert await store.get("", "r0") is not None

    asyncio.run(main())


def test_uses_of_a_very_long_conversation(url: str) -> None:
    async def main() -> None:
        backend = backend_factory.make_backend(url)
        async with ResponseStore(backend) as store:
            await store.create(turns(1)[0])
            assert isinstance(backend, Redis)
            await backend.uses.mark_used(["r0", *(f"gone{number}" for number in range(10_000))])
            assert backend.uses.pending_uses == {}

    asyncio.run(main())


def test_a_use_is_not_set_back_and_not_lost(url: str) -> None:
    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(url, Limits(max_size=3))) as store:
            made = turns(4)
            for item in made[:3]:
                await store.create(item)
            for item in made[:3]:
                await store.get("", item.id)
            await store.touch("", ["r0"])
            assert not await store.create(made[2])
            await store.create(made[3])
            gone = [item.id for item in made if await store.get("", item.id) is None]
            assert gone == ["r1"]

    asyncio.run(main())


def test_slow_sweep_does_not_delay_other_calls(shared_servers: dict[str, Server], url: str) -> None:
    """A sweep has 30 s, and its connection may have gone silent."""
    port = shared_servers["redis"].port
    frozen: list[asyncio.Event] = []

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ice: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            if ice.is_set():
                return
            writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ice = asyncio.Event()
        frozen.append(ice)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, back, ice), forward(there, writer, ice))

    async def main() -> None:
        network = await asyncio.start_server(accept, "127.0.0.1", 0)
        here = network.sockets[0].getsockname()[1]
        async with ResponseStore(
            backend_factory.make_backend(url.replace(str(port), str(here)))
        ) as store:
            (made,) = turns(1)
            await store.create(made)
            for item in frozen:
                item.set()
            sweep = asyncio.create_task(store.sweep())
            await asyncio.sleep(0.1)
            assert await store.get("", "r0") == made
            assert not sweep.done()
            sweep.cancel()

    asyncio.run(main())


def test_an_old_server_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no package of one to install.
    monkeypatch.setattr("vllmops_responses.store.backends.redis.LEAST_VERSION", (99, 0))

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(url)):
            pass

    with pytest.raises(VllmopsError, match="the store needs") as told:
        asyncio.run(main())
    assert told.value.code == "store.redis"


def test_a_server_that_has_forgotten_the_script(url: str, server: redis.Redis) -> None:
    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            made = turns(20)
            for item in (made[:10], made[10:]):
                server.script_flush()
                assert all(await asyncio.gather(*(store.create(one) for one in item)))
            server.script_flush()
            assert await asyncio.gather(*(store.get("", item.id) for item in made)) == made

    asyncio.run(main())


def test_a_redis_that_may_write_late_is_told(servers: Servers) -> None:
    server = servers.add("redis")

    async def list_caveats() -> list[str]:
        backend = backend_factory.make_backend(server.url)
        try:
            return await backend.list_caveats()
        finally:
            await backend.close()

    assert asyncio.run(list_caveats()) == []
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "everysec")
    assert asyncio.run(list_caveats()) == [
        "appendfsync everysec: a crash while the disk is slow may lose the last 2 s"
    ]
