"""A server on another machine as a watch sees it; its answers, and the time, are made up here.

tests/commands/test_remote.py watches a real one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from vllmops.collect.http import remote_processes
from vllmops.collect.http.endpoint import Endpoint
from vllmops.collect.http.remote_processes import RemoteServer
from vllmops.model.admin_api import ServerProcess, ServerProcesses
from vllmops.servers.discovery import Server
from vllmops.support.errors import VllmopsError
from vllmops.watch.watch_target import ServerPhase, WatchedServer

API = ServerProcess(role="api", pid=10, create_time=1.0, state="S", start_ticks=1, boot="b")


class Admin:
    """Admin routes that answer, or do not."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("http://far", "far")
        self.code: Any = ""

    def send_request(self, *_: Any) -> httpx.Response:
        if self.code:
            raise VllmopsError(self.code, "no answer")
        members = ServerProcesses(vllmops="1", node="far", processes=(API,), heartbeats=())
        return httpx.Response(200, content=msgspec.json.encode(members))


def test_a_server_that_can_not_be_reached_has_ended_only_if_that_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(remote_processes, "time", SimpleNamespace(monotonic=lambda: now))
    admin = Admin()
    fleet = RemoteServer(admin)  # type: ignore[arg-type]
    watched = WatchedServer(Server(None, fleet.list_processes(), fleet=fleet))

    def phases(code: str, seconds: int) -> list[ServerPhase]:
        nonlocal now
        admin.code, found = code, []
        for _ in range(0, seconds, 2):
            now += 2
            watched.take_sample(ask=False)
            found.append(watched.read_phase())
        return found

    assert {*phases("admin.unreachable", 10)} == {ServerPhase.UP}
    assert {*phases("", 4)} == {ServerPhase.UP}
    assert {*phases("admin.unreachable", 10)} == {ServerPhase.UP}
    assert {*phases("admin.timeout", 20)} == {ServerPhase.UP}, "somebody took the connection"
    assert phases("admin.unreachable", 14)[-1] is ServerPhase.OVER
    assert phases("admin.unreachable", 4)[-1] is ServerPhase.OVER
