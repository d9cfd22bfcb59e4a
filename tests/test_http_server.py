"""No client of a command's HTTP server keeps another one out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from vllmops.metrics.http_listener import ScrapeHandler as Scraped
from vllmops.metrics.http_listener import make_metrics_server
from vllmops.model.probe import ProbeResult
from vllmops.support import http_server
from vllmops.watch.probe_server import ProbeServer

from .support.ports import free_port
from .support.waiting import until


def metrics(port: int) -> Any:
    registry = CollectorRegistry()
    Gauge("live", "Whether it lives", registry=registry).set(1)
    made = make_metrics_server("127.0.0.1", port, registry)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def probes(port: int) -> Any:
    return ProbeServer(
        ("127.0.0.1", port), lambda: ProbeResult(live=True, ready=True, started=True)
    )


@pytest.fixture(params=[metrics, probes])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    made: Callable[[int], Any] = request.param
    port = free_port()
    server = made(port)
    yield port
    server.shutdown()
    server.server_close()


def open_unfinished_request(port: int, held: ExitStack) -> socket.socket:
    """A connection of a client that never comes to the end of its request."""
    made = held.enter_context(socket.create_connection(("127.0.0.1", port)))
    made.sendall(b"GET /livez HTTP/1.0\r\nX: ")
    return made


def test_the_oldest_connections_end_when_there_are_too_many(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scraped, "timeout", 600.0)  # it is not their silence that ends them
    monkeypatch.setattr("vllmops.watch.probe_server.ProbeHandler.timeout", 600.0)
    before = threading.active_count()
    with ExitStack() as held:
        slow = [open_unfinished_request(port, held) for _ in range(http_server.MOST * 3)]
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/livez", timeout=60).status_code == 200
        until(lambda: threading.active_count() - before <= http_server.MOST)
        assert slow[0].recv(1) == b""
        slow[-1].sendall(b"a\r\n\r\n")
        assert slow[-1].recv(64).startswith(b"HTTP/1.0 200")
    until(lambda: threading.active_count() <= before)


def test_a_silent_client_is_disconnected(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Scraped, "timeout", 0.2)
    monkeypatch.setattr("vllmops.watch.probe_server.ProbeHandler.timeout", 0.2)
    with ExitStack() as held:
        assert open_unfinished_request(port, held).recv(1) == b""
    assert not capfd.readouterr().err
