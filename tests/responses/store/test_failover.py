"""Another server takes over under load: what was acknowledged is there, and calls succeed again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count, pairwise
from typing import Any

import asyncpg
import pytest
import redis

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response, StoreUnavailable
from vllmops_responses.store.response_store import ResponseStore

from ...support.databases import LOCAL, Server, Servers
from ...support.extent import EVERYTHING
from ...support.waiting import until

OWNER = "ann"


def response(name: str) -> Response:
    return Response(id=name, owner=OWNER, model="m", status="completed", body=b"{}")


class Load:
    """Writers and readers on a store, each in a `ResponseStore` of its own.

    Args:
        url: of the store.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.acknowledged: list[str] = []
        self.written = [time.monotonic()]
        self.read = [time.monotonic()]
        self.slowest = 0.0

    async def write(self, name: str) -> None:
        async with ResponseStore(backend_factory.make_backend(self.url)) as store:
            number = 0
            while True:
                number += 1
                made = response(f"{name}-{number}")
                if await self.call_or_none(lambda: store.create(made)):  # noqa: B023 - awaited at once
                    self.acknowledged.append(made.id)
                    self.written.append(time.monotonic())
                await asyncio.sleep(0.02)

    async def read_repeatedly(self) -> None:
        """What is read is an answer, of the server that takes writes."""
        async with ResponseStore(backend_factory.make_backend(self.url)) as store:
            while True:
                if await self.call_or_none(lambda: store.get(OWNER, "first")):
                    self.read.append(time.monotonic())
                await asyncio.sleep(0.02)

    async def call_or_none(self, call: Callable[[], Any]) -> Any:
        """What a call gives, None where the store was unavailable; other errors are raised."""
        began = time.monotonic()
        try:
            return await call()
        except StoreUnavailable as error:
            await asyncio.sleep(error.retry_after_s / 10)
            return None
        finally:
            self.slowest = max(self.slowest, time.monotonic() - began)

    @asynccontextmanager
    async def run_in_background(self) -> AsyncIterator[None]:
        async with ResponseStore(backend_factory.make_backend(self.url), deadline_s=60) as store:
            assert await store.create(response("first"))
        tasks = [asyncio.create_task(self.write(f"w{number}")) for number in range(4)]
        tasks += [asyncio.create_task(self.read_repeatedly()) for _ in range(2)]
        try:
            yield
        finally:
            left = set(tasks)
            while left:  # wait_for, in which redis-py sends, may lose one up to Python 3.11
                for item in left:
                    item.cancel()
                _, left = await asyncio.wait(left, timeout=5)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(item) for item in ends} == {asyncio.CancelledError}, ends

    async def wait_for_progress(self, count: int = 30) -> None:
        """Wait for more to be written and read."""
        wanted = len(self.acknowledged) + count, len(self.read) + count
        while len(self.acknowledged) < wanted[0] or len(self.read) < wanted[1]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def check(self) -> None:
        """All that was acknowledged is there."""
        async with ResponseStore(backend_factory.make_backend(self.url), deadline_s=60) as store:
            for item in self.acknowledged:
                assert await store.get(OWNER, item), item
        for times in (self.written, self.read):
            gaps = [after - before for before, after in pairwise(times)]
            print(f"{len(times)} times, the longest gap {max(gaps):.2f} s")  # for whoever measures
        print(f"{len(self.acknowledged)} acknowledged, the slowest call {self.slowest:.2f} s")


async def through(load: Load, *changes: Callable[[], object]) -> None:
    async with load.run_in_background():
        await load.wait_for_progress()
        for change in changes:
            await asyncio.to_thread(change)
            await load.wait_for_progress()
    await load.check()


# One case for each kind of deployment; the long form has all of them.
@pytest.mark.parametrize("way", ["killed", "frozen", "told"] if EVERYTHING else ["frozen"])
def test_sentinels_promote_a_replica(way: str, servers: Servers) -> None:
    primary = servers.valkey()
    replica = servers.replica(primary)
    sentinels = servers.sentinels(primary, 3)

    def change() -> None:
        if way == "killed":
            primary.kill()
        elif way == "frozen":
            primary.signal(signal.SIGSTOP)
        else:
            sentinels[1].execute_command("SENTINEL", "FAILOVER", "main")
        began = time.monotonic()
        until(lambda: replica.execute_command("ROLE")[0] == "master")
        print(f"promoted after {time.monotonic() - began:.2f} s")
        until(
            lambda: (
                int(sentinels[0].execute_command("SENTINEL", "MASTER", "main")["port"])
                == replica.port
            )
        )
        print(f"told after {time.monotonic() - began:.2f} s")

    hosts = ",".join(f"{LOCAL}:{item.port}" for item in sentinels)
    asyncio.run(through(Load(f"redis+sentinel://{hosts}/main"), change))
    assert replica.execute_command("ROLE")[0] == "master"


@pytest.mark.parametrize("way", ["killed", "told"] if EVERYTHING else ["killed"])
def test_a_replica_of_a_cluster_takes_over(way: str, servers: Servers) -> None:
    nodes = servers.cluster()
    port = nodes[1].port
    load = Load(f"valkey+cluster://{LOCAL}:{nodes[0].port},{LOCAL}:{port}?namespace=x")
    here = nodes[0].execute_command("CLUSTER", "KEYSLOT", "{x}:") * 3 // 16384
    primary, replica = nodes[here], nodes[here + 3]
    change = (
        primary.kill if way == "killed" else partial(replica.execute_command, "CLUSTER", "FAILOVER")
    )
    asyncio.run(through(load, change))
    assert replica.execute_command("ROLE")[0] == "master"


@pytest.mark.parametrize("way", ["killed", "frozen", "shut down"] if EVERYTHING else ["killed"])
@pytest.mark.parametrize("attrs", ["", "?target_session_attrs=read-write"] if EVERYTHING else [""])
def test_a_standby_of_postgresql_is_promoted(way: str, attrs: str, servers: Servers) -> None:
    primary = servers.postgres(None, "synchronous_standby_names=*")
    standby = servers.postgres(primary, "synchronous_standby_names=")

    def change() -> None:
        if way == "shut down":
            primary.signal(signal.SIGINT)
        else:
            primary.signal(signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        standby.promote()

    hosts = ",".join(f"{LOCAL}:{item.port}" for item in (primary, standby))
    asyncio.run(through(Load(f"postgresql://postgres@{hosts}/postgres{attrs}"), change))


def test_postgresql_becomes_read_only_and_writable_again(servers: Servers) -> None:
    """As it is behind a load balancer, which may lead to a standby for a while."""
    server = servers.postgres()

    async def fill(store: ResponseStore) -> None:
        """Write until that is refused: its processes hear of a change after a while."""
        for number in count():
            assert await store.create(response(f"b{number}"))
            await asyncio.sleep(0.02)

    async def try_create(store: ResponseStore) -> bool:
        with suppress(StoreUnavailable):
            return await store.create(response("c"))
        return False

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(server.url)) as store:
            assert await store.create(response("a"))
            for value in ("on", "off"):
                change = await asyncpg.connect(server.url)
                await change.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
                await change.execute("SELECT pg_reload_conf()")
                await change.close()
                if value == "on":
                    with pytest.raises(StoreUnavailable, match="read-only"):
                        await fill(store)
            while not await try_create(store):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.1)

    asyncio.run(main())


class Switch:
    """A load balancer: new connections go to another server once it is turned."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(LOCAL, self.port)
        await asyncio.gather(forward(reader, back), forward(there, writer))

    @asynccontextmanager
    async def open_listener(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self.accept, LOCAL, 0)
        yield server.sockets[0].getsockname()[1]
        server.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


def test_the_server_behind_an_address_becomes_a_replica(servers: Servers) -> None:
    """Nobody ends the connections: each call there is refused, also those that only read."""
    primary = servers.valkey()
    replica = servers.replica(primary)
    switch = Switch(primary.port)

    def change() -> None:
        # No write is on its way between the two: this is about connections.
        primary.execute_command("CLIENT", "PAUSE", 500, "WRITE")
        time.sleep(0.2)
        replica.execute_command("REPLICAOF", "NO", "ONE")
        switch.port = replica.port
        primary.execute_command("REPLICAOF", LOCAL, replica.port)

    async def main() -> None:
        async with switch.open_listener() as port:
            await through(Load(f"redis://{LOCAL}:{port}/0"), change)

    asyncio.run(main())


@pytest.mark.parametrize(
    "refusal", ["READONLY x", "LOADING x", "CLUSTERDOWN x", "MASTERDOWN x", "TRYAGAIN x"]
)
def test_temporary_redis_refusals_are_retried(
    refusal: str, shared_servers: dict[str, Server]
) -> None:
    """A server that loads its data takes too long to be had in a test, so one is played."""
    server = shared_servers["redis"]
    refused = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        there, back = await asyncio.open_connection(LOCAL, server.port)
        answers = asyncio.create_task(forward(there, writer))
        while data := await reader.read(1 << 16):
            if b"\r\ncreate\r\n" in data and refused < 2:
                refused += 1
                writer.write(f"-{refusal}\r\n".encode())
            else:
                back.write(data)
        back.close()
        await answers

    async def main() -> None:
        front = await asyncio.start_server(accept, LOCAL, 0)
        port = front.sockets[0].getsockname()[1]
        url = f"redis://{LOCAL}:{port}/0?namespace=t{time.time_ns()}"
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            assert await store.create(response("a"))
        front.close()

    asyncio.run(main())
    assert refused == 2


def test_write_on_too_few_replicas_is_not_acknowledged(servers: Servers) -> None:
    primary = servers.valkey()
    replica = servers.replica(primary)

    async def main() -> None:
        url = f"{primary.url}?wait_replicas=1"
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            assert await store.create(response("a"))
            replica.kill()
            with pytest.raises(StoreUnavailable, match="too few replicas"):
                await store.create(response("b"))
            await asyncio.sleep(1.1)
            assert await store.get(OWNER, "a")  # to read waits for nobody

    asyncio.run(main())


def test_a_replica_that_is_there_and_silent_is_waited_for(servers: Servers) -> None:
    primary = servers.valkey()
    replica = servers.replica(primary)
    (sentinel,) = servers.sentinels(primary, 1)

    async def main() -> None:
        async with ResponseStore(
            backend_factory.make_backend(f"redis+sentinel://{LOCAL}:{sentinel.port}/main")
        ) as store:
            assert await store.create(response("a"))
            replica.signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable, match="too few replicas"):
                await store.create(response("b"))
            replica.signal(signal.SIGCONT)
            await asyncio.sleep(1.1)
            assert await store.create(response("c"))
            replica.kill()
            await asyncio.sleep(0.2)
            # None is there that could have it, and the Sentinel knows of no other primary.
            assert await store.create(response("d"))
            replica.start()
            until(replica.is_in_sync)
            await asyncio.sleep(0.5)  # until its primary knows that it is up to date
            assert await store.create(response("e"))
            assert not store.backend.source.has_no_replica  # type: ignore[attr-defined]

    asyncio.run(main())
    assert isinstance(replica.execute_command("DBSIZE"), int)
    assert redis.Redis(port=replica.port).exists("{vllmops}:r:e")
