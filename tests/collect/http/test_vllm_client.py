"""A server's own HTTP API, with real servers that answer well, badly, late or not at all."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllmops.collect.http import vllm_client
from vllmops.collect.http.vllm_client import (
    fetch_health,
    fetch_health_status,
    fetch_metrics,
    is_healthy,
)
from vllmops.model.vllm_metrics import Metrics
from vllmops.observe import server_snapshot
from vllmops.servers.discovery import Server

from ...support.waiting import patiently

Serve = Callable[..., str]

# As vLLM 0.32 prints it, with two engines.
METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:mm_cache_hits counter
vllm:mm_cache_hits_total{engine="0",model_name="m"} 3.0
# TYPE python_gc_objects_collected counter
python_gc_objects_collected_total{generation="0"} 5.0
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers may take its time on a busy machine; the others get little."""
    monkeypatch.setattr(vllm_client, "TIMEOUT_S", 60.0)
    patiently(
        monkeypatch, "timeout_s", is_healthy, fetch_health, fetch_health_status, fetch_metrics
    )


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []
    over = threading.Event()

    def start(
        code: int = 200,
        body: bytes = b"",
        silent: bool = False,
        posts: Mapping[str, bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if silent:
                    over.wait()
                self.send_response(code)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                answer = (posts or {}).get(self.path)
                self.send_response(404 if answer is None else 200)
                self.end_headers()
                self.wfile.write(answer or b"")

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def test_health(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy for the outside is not for a server on this machine.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert is_healthy(serve())
    assert fetch_health_status(serve(503)) == 503
    assert not is_healthy(serve(503))
    drains = serve(503, headers={"Retry-After": "5"})
    assert (fetch_health(drains), fetch_health_status(drains)) == ((503, True), 503)
    assert fetch_health(serve(503)) == (503, False)
    assert fetch_health(serve(200, headers={"Retry-After": "5"})) == (200, False)


def test_a_server_that_drains_is_not_said_to_be_unhealthy(serve: Serve) -> None:
    def observe_health(url: str) -> int | None:
        port = int(url.rpartition(":")[2])
        server = Server(None, (), host="127.0.0.1", port=port)
        return server_snapshot.observe_server(server, 0.0).health

    assert observe_health(serve(503)) == 503
    assert observe_health(serve(503, headers={"Retry-After": "5"})) is None


@pytest.mark.parametrize(
    ("posts", "ids", "count"),
    [
        ({"/abort_requests": b'{"status": "aborted", "aborted": 7}'}, [], 7),
        ({"/abort_requests": b'{"status": "aborted", "aborted": 7}'}, ["a", "b"], 2),
        # Of a server that takes tokens: it answers nothing, and ends none without an id.
        ({"/abort_requests": b""}, [], None),
        ({"/abort_requests": b""}, ["a"], 1),
        ({"/inference/v1/abort_requests": b""}, ["a"], 1),
        ({"/inference/v1/abort_requests": b""}, [], None),
        ({}, ["a"], None),
    ],
)
def test_vllm_ends_requests_by_its_own_routes(
    serve: Serve, posts: dict[str, bytes], ids: list[str], count: int | None
) -> None:
    assert vllm_client.abort_requests_or_all(serve(posts=posts), ids) == count


def test_unreachable_server_has_no_health_or_metrics() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert fetch_health_status(url) is None
        assert not is_healthy(url)
        assert fetch_metrics(url) is None


def test_a_server_that_takes_too_long(serve: Serve) -> None:
    url = serve(silent=True)
    assert fetch_health_status(url, timeout_s=1) == 0
    assert fetch_metrics(url, timeout_s=1) is None


@pytest.mark.parametrize("words", ["HTTP/1.1 200 OK\r\nx: ", "HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_trickles_in(words: str) -> None:
    def trickle(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(words.encode())
            while True:
                time.sleep(0.1)
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=trickle, args=(server,), daemon=True).start()
        assert fetch_health_status(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=1) == 0


def test_an_answer_without_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_client, "SHORT_BYTES", 1000)
    assert fetch_health_status(serve(body=bytes(1000))) == 200
    assert fetch_health_status(serve(body=bytes(1001))) is None
    monkeypatch.setattr(vllm_client, "METRICS_BYTES", 1000)
    assert fetch_metrics(serve(body=b" " * 1000)) == Metrics()
    assert fetch_metrics(serve(body=b" " * 1001)) is None


def test_something_that_does_not_speak_http(listener: int) -> None:
    assert fetch_health_status(f"http://127.0.0.1:{listener}", timeout_s=1) == 0


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://exa mple:1", "nonsense", "http://x.invalid"]
)
def test_addresses_that_are_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # what a network says of it, and how late
    assert fetch_health_status(url) is None


def test_metrics_are_summed_over_the_engines(serve: Serve) -> None:
    assert fetch_metrics(serve(body=METRICS)) == Metrics(
        running=3.0, waiting=4.0, kv_cache_usage=0.25, prefix_queries=100.0, mm_hits=3.0
    )


def test_the_kv_cache_share_of_two_engines_is_still_a_share(serve: Serve) -> None:
    body = METRICS + b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.95\n'
    found = fetch_metrics(serve(body=body))
    assert found
    assert found.kv_cache_usage is not None
    assert 0 <= found.kv_cache_usage <= 1


def test_metrics_that_are_none(serve: Serve) -> None:
    assert fetch_metrics(serve(404)) is None
    assert fetch_metrics(serve(body=b"")) == Metrics()
    assert fetch_metrics(serve(body=b"<html>{ not metrics")) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308"])
def test_a_metric_that_is_no_figure_is_none(serve: Serve, value: str) -> None:
    body = (
        METRICS
        + (
            f'vllm:num_requests_running{{engine="2",model_name="m"}} {value}\n'
            f'vllm:kv_cache_usage_perc{{engine="2",model_name="m"}} {value}\n'
        ).encode()
    )
    found = fetch_metrics(serve(body=body))
    assert found
    assert found.running is None
    assert found.kv_cache_usage in {None, 0.25}
    assert found.waiting == 4.0


def test_an_answer_that_comes_by_the_byte_is_not_waited_for() -> None:
    """Each byte comes in time, the whole never."""

    class Dripping(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"#")
                    time.sleep(0.2)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert fetch_metrics(f"http://127.0.0.1:{server.server_port}", timeout_s=1) is None
    server.shutdown()
    server.server_close()
