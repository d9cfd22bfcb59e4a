"""Stores for tests, some of them in database servers of the tests' own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmops_responses.client import HttpResponseSource
from vllmops_responses.store.backends import sqlite
from vllmops_responses.store.response_store import ResponseStore

from ..support.databases import Server, Servers
from ..support.waiting import PATIENCE_S, patiently

WRITER = Path(__file__).parent / "store/writer.py"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database, or a holder of a file, that stands still on a busy machine is not away.

    Tests of what is away give a deadline of their own.
    """
    patiently(monkeypatch, "deadline_s", ResponseStore.__init__)
    patiently(monkeypatch, "timeout_s", HttpResponseSource.__init__)
    monkeypatch.setattr(sqlite, "BUSY_S", PATIENCE_S)


@pytest.fixture
def servers(postgres_parts: tuple[Path, Path]) -> Iterator[Servers]:
    """For servers that a test may kill."""
    servers = Servers(postgres_parts)
    yield servers
    servers.end()


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with nothing in it."""
    if request.param == "memory":
        return "memory://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/responses.db"
    server: Server = request.getfixturevalue("shared_servers")[request.param]
    return f"{server.url}?namespace=t{time.time_ns()}"


class Writer:
    """A process with a store of its own."""

    def __init__(self, url: str, lease_s: float = 30) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), url, str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "ready"

    def send(self, **order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def kill(self) -> list[str]:
        """Kill -9; what it had said until then."""
        self.process.kill()
        assert self.process.stdout
        words = self.process.stdout.read()
        self.process.wait(60)
        return words.splitlines(keepends=True)


@pytest.fixture
def writer() -> Iterator[Callable[..., Writer]]:
    made: list[Writer] = []

    def make(*args: Any) -> Writer:
        made.append(Writer(*args))
        return made[-1]

    yield make
    for item in made:
        item.kill()
