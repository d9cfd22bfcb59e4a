"""What a store takes does not grow with what went through it."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllmops_responses.store import backend_factory
from vllmops_responses.store.backend import Response
from vllmops_responses.store.backends.postgresql import Postgresql
from vllmops_responses.store.response_store import ResponseStore

from ...support.databases import Server
from ...support.extent import EVERYTHING, programs

pytestmark = programs

FILL = Path(__file__).with_name("fill.py")
MIB = 1 << 20


def fill(url: str, max_size: int, counts: list[int], events: int = 0) -> Any:
    words = [sys.executable, str(FILL), url, str(max_size), json.dumps(counts), str(events)]
    return json.loads(subprocess.run(words, check=True, capture_output=True).stdout)


def test_memory_stays_flat_as_old_responses_are_evicted() -> None:
    most = 10_000 if EVERYTHING else 2_000
    found = fill("memory://", most, [2 * most, 6 * most, 10 * most])
    assert found["count"] == most
    early, *_, late = found["grown"]
    assert late - early < 2 * MIB


def test_memory_per_response_is_near_its_json_size(tmp_path: Path) -> None:
    found = fill("memory://", 20_000, [20_000])
    assert found["count"] == 20_000
    assert found["grown"][0] < 1.5 * found["raw"]


def test_events_of_many_streams_leave_memory_flat() -> None:
    found = fill("memory://", 100, [300, 1200], events=500)
    early, late = found["grown"]
    assert found["count"] == 100
    assert late - early < 2 * MIB


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_elsewhere_there_are_no_more_than_may_be(kind: str, request: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/responses.db"
    if kind == "redis":
        url = request.getfixturevalue("shared_servers")["redis"].url + "?namespace=bounds"
    most = 1000 if EVERYTHING else 200
    found = fill(url, most, [2 * most, 6 * most])
    # Rows are counted once for a hundredth of them.
    assert abs(found["count"] - most) <= most // 100
    early, late = found["grown"]
    assert late - early < 4 * MIB
    if kind == "sqlite":
        assert (tmp_path / "responses.db").stat().st_size < 4 * MIB


def test_a_conversation_is_looked_up_by_its_ids(shared_servers: dict[str, Server]) -> None:
    """PostgreSQL chooses a plan by what it knows of a table, which is nothing of a new one."""
    url = f"{shared_servers['postgresql'].url}?namespace=plans"

    async def plan() -> str:
        backend = backend_factory.make_backend(url)
        assert isinstance(backend, Postgresql)
        async with ResponseStore(backend) as store:
            body = b'{"output":"%s"}' % secrets.token_hex(1000).encode()
            for number in range(200):
                made = Response(id=f"r{number}", owner="a", model="m", status="queued", body=body)
                assert await store.create(made)
            explain = f"EXPLAIN (ANALYZE) {backend.text['conversation']}"
            return "\n".join(row[0] for row in await backend.execute(explain, "r199", "a"))

    shown = asyncio.run(plan())
    assert shown.count("plans_responses_pkey") >= 2, shown
    assert "plans_by_owner" not in shown, shown
