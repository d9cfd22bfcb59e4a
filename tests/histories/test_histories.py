"""Random histories on real stores are right; a seed replays what clients and faults did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllmops.store.backend import Backend

from ..support.extent import EVERYTHING, programs
from .broken import BROKEN
from .checker import check
from .run import Replicas, run

pytestmark = programs

KINDS = ("sqlite", "sqlite", "sqlite", "postgresql", "redis")


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.end()


@pytest.mark.parametrize("seed", range(200 if EVERYTHING else 10))
def test_a_random_history_is_right(
    seed: int, replicas: Replicas, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = KINDS[seed % len(KINDS)]
    url = f"sqlite:///{tmp_path}/r.db"
    if kind != "sqlite":
        server = request.getfixturevalue("shared_servers")[kind]
        url = f"{server.url}?namespace=h{time.time_ns()}"
    history = run(replicas, url, seed)
    assert check(history) == []
    assert {op.kind for op in history if op.ok} >= {"turn", "read", "respond", "get"}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_backend_is_found(kind: type[Backend], replicas: Replicas, tmp_path: Path) -> None:
    name = f"tests.histories.broken.{kind.__name__}"
    for seed in range(20):
        url = f"sqlite:///{tmp_path}/{seed}.db"
        if check(run(replicas, url, seed, name, faults=False)):
            return
    raise AssertionError("twenty histories look right")
