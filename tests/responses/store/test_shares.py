"""No owner's responses go for the sake of one who has more."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import EVERYBODY, Limits, Response, plan_evictions
from vllmops_responses.store.backends import sql
from vllmops_responses.store.backends.sqlite import Sqlite, bind_values
from vllmops_responses.store.response_store import ResponseStore

from ...support.databases import Server, Servers


def one_by_one(owners: dict[str, int], limits: Limits) -> dict[str, int]:
    """The same, by taking from the fullest again and again."""
    left = {owner: min(held, limits.owner_limit) for owner, held in owners.items()}
    while sum(left.values()) > limits.max_size:
        left[max(left, key=lambda item: left[item])] -= 1
    return {owner: held for owner, held in left.items() if held < owners[owner]}


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=9),
    st.integers(1, 40),
    st.sampled_from([None, 1, 3, 50]),
)
def test_planned_evictions_match_a_plain_model(
    held: list[int], max_size: int, per_key: int | None
) -> None:
    owners = {f"o{n}": many for n, many in enumerate(held)}
    limits = Limits(max_size=max_size, max_per_key=per_key)
    assert plan_evictions(owners, limits) == one_by_one(owners, limits)


OWNERS = [f"{n:064x}" for n in range(20)]


def make_response(number: int, owner: str, **fields: Any) -> Response:
    fields = {"status": "completed", "created_at": 1e9 + number, **fields}
    return Response(id=f"r{number}", owner=owner, model="m", body=b"{}", **fields)


async def count_by_owner(store: ResponseStore) -> dict[str, int]:
    return (await store.collect_stats(EVERYBODY)).owners


def test_one_key_can_not_evict_responses_of_another(url: str) -> None:
    """Whoever stores very many loses his own, whatever his are: finished, or running for ever."""

    async def main() -> None:
        limits = Limits(max_size=50)
        async with ResponseStore(backend_factory.make_backend(url, limits), deadline_s=10) as store:
            for number in range(10):
                await store.create(make_response(number, OWNERS[0], status="in_progress"))
                await store.create(make_response(100 + number, OWNERS[1]))
            for number in range(200, 500):
                status = "queued" if number % 2 else "completed"
                await store.create(make_response(number, OWNERS[2], status=status))
            await store.sweep()
            assert await count_by_owner(store) == {OWNERS[0]: 10, OWNERS[1]: 10, OWNERS[2]: 30}

    asyncio.run(main())


def test_many_with_one_each_take_turns(url: str) -> None:
    async def main() -> None:
        limits = Limits(max_size=5)
        async with ResponseStore(backend_factory.make_backend(url, limits), deadline_s=10) as store:
            for number, owner in enumerate(OWNERS):
                await store.create(make_response(number, owner))
            assert set(await count_by_owner(store)) == set(
                OWNERS[-5:]
            )  # who has stored something last

    asyncio.run(main())


async def fill(store: ResponseStore) -> None:
    """Ann's are 0 to 29, of which the odd run and 4 was used last; Bob's are 100 to 104."""
    for number in range(30):
        status = "in_progress" if number % 2 else "completed"
        await store.create(make_response(number, "ann", status=status))
    for number in range(100, 105):
        await store.create(make_response(number, "bob"))
    await store.touch("ann", ["r4"])


async def check_migrated_store(url: str) -> None:
    """What was stored before is all there, and its owners have shares."""
    limits = Limits(max_size=30)
    async with ResponseStore(backend_factory.make_backend(url), deadline_s=10) as store:
        assert await count_by_owner(store) == {"ann": 30, "bob": 5}
    async with ResponseStore(backend_factory.make_backend(url, limits), deadline_s=10) as store:
        await store.sweep()
        assert await count_by_owner(store) == {"ann": 25, "bob": 5}
        assert await store.get("ann", "r4")
        assert not await store.get("ann", "r0")
        assert await store.get("ann", "r1")  # it runs
    shares = Limits(max_size=30, max_per_key=3)
    async with ResponseStore(backend_factory.make_backend(url, shares), deadline_s=10) as store:
        await store.create(make_response(200, "ann"))
        await store.sweep()
        assert await count_by_owner(store) == {"ann": 3, "bob": 3}
        assert await store.get("ann", "r200")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_tables_of_an_older_version(
    kind: str, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    if kind == "postgresql":
        server = request.getfixturevalue("shared_servers")["postgresql"]
        url = f"{server.url}?namespace=t{time.time_ns()}"

    async def before() -> None:
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=10) as store:
            await fill(store)

    with monkeypatch.context() as patch:
        patch.setattr(sql, "SCHEMA", 2)
        asyncio.run(before())
    asyncio.run(check_migrated_store(url))


def test_keys_of_an_older_version(shared_servers: dict[str, Server]) -> None:
    """Schema 1 knew no owners' sets, and had one set of what runs."""
    name = f"t{time.time_ns()}"
    url = f"{shared_servers['redis'].url}?namespace={name}"
    client = redis.Redis.from_url(shared_servers["redis"].url, decode_responses=True)

    async def before() -> None:
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=10) as store:
            await fill(store)

    asyncio.run(before())
    for number in range(1, 30, 2):
        client.zadd(f"{{{name}}}:busy", {f"r{number}": time.time()})
    client.delete(*(f"{{{name}}}:{item}" for item in ("u:ann", "u:bob", "owners")))
    client.set(f"{{{name}}}:schema", 1)
    asyncio.run(check_migrated_store(url))
    assert client.get(f"{{{name}}}:schema") == "2"
    assert not client.exists(f"{{{name}}}:busy", f"{{{name}}}:built")


def test_size_limit_holds_beside_an_older_version(shared_servers: dict[str, Server]) -> None:
    """A replica that is not restarted yet fills no owner's set: what is in none goes last."""
    name = f"t{time.time_ns()}"
    url = f"{shared_servers['redis'].url}?namespace={name}"
    client = redis.Redis.from_url(shared_servers["redis"].url)

    async def main() -> None:
        async with ResponseStore(
            backend_factory.make_backend(url, Limits(max_size=8)), deadline_s=10
        ) as store:
            for number in range(8):
                await store.create(make_response(number, "ann"))
            client.delete(f"{{{name}}}:u:ann", f"{{{name}}}:owners")
            for number in range(8, 30):
                await store.create(make_response(number, "ann"))
            assert await count_by_owner(store) == {"ann": 8}
            assert await store.get("ann", "r29")

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_evictions_are_found_by_an_index(kind: str, request: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    if kind == "postgresql":
        server = request.getfixturevalue("shared_servers")["postgresql"]
        url = f"{server.url}?namespace=t{time.time_ns()}"

    async def plan(name: str, *values: Any) -> str:
        explain = "EXPLAIN" if kind == "postgresql" else "EXPLAIN QUERY PLAN"
        backend = backend_factory.make_backend(url)
        assert isinstance(backend, sql.SqlBackend)
        async with ResponseStore(backend) as store:
            await store.get("", "x")
            if kind == "sqlite":  # which tells its plan to who reads; SELECT is how it knows one
                assert isinstance(backend, Sqlite)
                assert backend.writer
                text = f"{explain} {backend.text[name]}"
                given = bind_values(values)
                rows = await backend.writer.run_job(lambda c: c.execute(text, given).fetchall())
            else:
                rows = list(await backend.execute(f"{explain} {backend.text[name]}", *values))
            return "\n".join(str(row[-1]) for row in rows)

    async def fill_store() -> None:
        async with ResponseStore(backend_factory.make_backend(url), deadline_s=30) as store:
            for first in range(0, 3000, 100):
                some = [make_response(first + n, OWNERS[n % 20]) for n in range(100)]
                await asyncio.gather(*map(store.create, some))

    asyncio.run(fill_store())
    shown = asyncio.run(plan("evict", OWNERS[0], 100, "x"))
    assert "_by_share" in shown, shown
    assert "TEMP B-TREE" not in shown, shown
    assert "Sort" not in shown, shown
    if kind == "sqlite":
        shown = asyncio.run(plan("shares", "*"))
        assert "COVERING INDEX" in shown, shown


def test_a_response_costs_redis_as_much_however_many_owners_there_are(
    servers: Servers,
) -> None:
    alone = servers.valkey()  # other tests call the one that they share
    client = redis.Redis.from_url(alone.url)

    def calls() -> int:
        return sum(item["calls"] for item in client.info("commandstats").values())

    async def cost(owners: int, size: int) -> float:
        url = f"{alone.url}?namespace=t{time.time_ns()}"
        async with ResponseStore(
            backend_factory.make_backend(url, Limits(max_size=size)), deadline_s=10
        ) as store:
            for number in range(size):
                await store.create(make_response(number, f"{number % owners}"))
            before = calls()
            for number in range(size, size + 100):
                await store.create(make_response(number, f"{number % owners}"))
            return (calls() - before) / 100

    few, many = asyncio.run(cost(2, 50)), asyncio.run(cost(400, 800))
    assert many < few + 3
    assert few < 60


def test_the_command_tells_who_has_most(tmp_path: Path, vllmops: Any) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"

    async def main() -> None:
        async with ResponseStore(backend_factory.make_backend(url)) as store:
            for number in range(30):
                await store.create(
                    make_response(number, OWNERS[number % 15] if number < 20 else "")
                )

    asyncio.run(main())
    answer = vllmops("responses", "stats", "--store", url, "--json")
    assert list(answer.data["owners"].values()) == [10, *[2] * 5, *[1] * 10]
    assert next(iter(answer.data["owners"])) == ""
    answer = vllmops("responses", "stats", "--store", url)
    assert f"{OWNERS[0][:8]}…" in answer.out
    assert "and 6 others" in answer.out
