"""Random histories on real stores are right; a seed replays what clients and faults did.

A store that fails over has acknowledged nothing that its next server does not have.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from vllmops.model.owners import derive_owner
from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Backend, Limits, Response
from vllmops_responses.store.response_store import ResponseStore

from ..support.databases import LOCAL, Servers
from ..support.extent import EVERYTHING, programs
from ..support.ports import free_port
from ..support.waiting import until
from .broken import BROKEN
from .checker import check
from .run import Client, Replicas, is_replica_up, run

pytestmark = programs

KINDS = (*["sqlite"] * 3, "postgresql", "redis", *["sqlite"] * 3, "a standby", "a replica")


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.end()


@pytest.fixture
def pairs(postgres_parts: tuple[Path, Path]) -> Iterator[Servers]:
    """Makes servers that a run may kill."""
    made = Servers(postgres_parts)
    yield made
    made.end()


def with_standby(servers: Servers) -> tuple[str, Callable[[], object]]:
    """PostgreSQL that waits for a standby, and what has that one take over."""
    primary = servers.postgres(None, "synchronous_standby_names=*", "fsync=off")
    standby = servers.postgres(primary, "synchronous_standby_names=", "fsync=off")

    def fail_over() -> None:
        primary.kill()
        standby.promote()

    hosts = f"{LOCAL}:{primary.port},{LOCAL}:{standby.port}"
    return f"postgresql://postgres@{hosts}/postgres", fail_over


def with_replica(servers: Servers) -> tuple[str, Callable[[], object]]:
    """Valkey that waits for a replica, and what has a Sentinel make that one the primary."""
    primary = servers.valkey()
    replica = servers.replica(primary)
    (sentinel,) = servers.sentinels(primary, 1)

    def fail_over() -> None:
        primary.kill()
        until(lambda: replica.execute_command("ROLE")[0] == "master")

    return f"redis+sentinel://{LOCAL}:{sentinel.port}/main", fail_over


PAIRS = {"a standby": with_standby, "a replica": with_replica}


@pytest.mark.parametrize("seed", range(200 if EVERYTHING else 10))
def test_a_random_history_is_right(
    seed: int, replicas: Replicas, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = KINDS[seed % len(KINDS)]
    url, fail_over = f"sqlite:///{tmp_path}/r.db", None
    if kind in PAIRS:
        url, fail_over = PAIRS[kind](request.getfixturevalue("pairs"))
    elif kind != "sqlite":
        server = request.getfixturevalue("shared_servers")[kind]
        url = f"{server.url}?namespace=h{time.time_ns()}"
    history = run(replicas, url, seed, fail_over=fail_over)
    assert check(history) == []
    assert {op.kind for op in history if op.ok} >= {"turn", "read", "respond", "get", "link"}


def test_reader_ahead_of_a_lost_run_gets_its_end(replicas: Replicas, tmp_path: Path) -> None:
    """A server of the database that takes over may lack the last events that somebody saw."""
    url, port = f"sqlite:///{tmp_path}/r.db", free_port()

    async def store_runs() -> None:
        backend = backend_factory.make_backend(url, Limits(lease_s=0.1))
        async with ResponseStore(backend) as store:
            for name in ("lost", "stopped", "over"):
                made = Response(
                    id=name, owner=derive_owner("ann"), model="m", status="in_progress", body=b"{}"
                )
                await store.create(made)
                await store.append_events(made, 0, [b'{"type":"response.created"}'] * 3)
            await store.set_status(made.owner, "over", "completed")
            await store.set_status(made.owner, "stopped", "cancelled")

    asyncio.run(store_runs())
    replicas.start(port, url)
    reader = Client(random.Random(), [port], [])
    until(partial(is_replica_up, port))
    path = "/v1/responses/{}?stream=true&starting_after={}".format
    for name, status in (("lost", "failed"), ("stopped", "cancelled")):
        for after in (2, 5):
            code, events, end = reader.events("GET", path(name, after), None, 9)
            assert (code, events, end.get("status")) == (200, [], status)
    assert reader.send_request("GET", path("over", 5))[0] == 400
    replicas.clear()


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_backend_is_found(kind: type[Backend], replicas: Replicas, tmp_path: Path) -> None:
    name = f"tests.histories.broken.{kind.__name__}"
    for seed in range(20):
        url = f"sqlite:///{tmp_path}/{seed}.db"
        if check(run(replicas, url, seed, name, faults=False)):
            return
    raise AssertionError("twenty histories look right")
