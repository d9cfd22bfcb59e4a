"""Loads against a real HTTP server, and commands."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vllmops.observe.memory import load_generators
from vllmops.servers.discovery import Server
from vllmops.support.errors import ExitCode, VllmopsError

from ...support.waiting import until


@dataclass
class Api:
    """A server that answers as vLLM would, and keeps what it was sent."""

    port: int = 0
    status: int = 200
    models: bytes = b'{"data":[{"id":"m"}]}'
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    heard: Callable[[], object] = lambda: None  # called for each request

    @property
    def server(self) -> Server:
        return Server(name="s", processes=(), host="127.0.0.1", port=self.port, model="org/m")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(load_generators, "MODELS_TIMEOUT_S", 60.0)  # a busy machine is no failure
    found = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, found.models)

        def do_POST(self) -> None:
            found.paths.append(self.path)
            found.keys.add(self.headers.get("authorization"))
            found.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            found.heard()
            message = {"error": {"message": "At most 0 image(s) may be provided"}}
            self.answer(found.status, json.dumps(message).encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        # With five, as by default, the kernel resets some of those that connect at once.
        request_queue_size = load_generators.CONNECTIONS

    server = Listening(("127.0.0.1", 0), Handler)
    found.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def prepare(
    request: str, api: Api, *, requests: int = 6, seed: int = 1 << 40
) -> load_generators.Load:
    return load_generators.build_load(request, api.server, requests=requests, inputs=2, seed=seed)


def refusal(load: load_generators.Load) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        load.run_round(1, threading.Event())
    return caught.value


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("images", "/v1/chat/completions"),
        ("audio", "/v1/audio/transcriptions"),
        ("text", "/v1/completions"),
        ("responses", "/v1/responses"),
    ],
)
def test_no_input_comes_twice(api: Api, kind: str, path: str) -> None:
    load = prepare(kind, api)
    load.run_round(1, threading.Event())
    load.run_round(2, threading.Event())
    assert api.paths == [path] * 12
    if kind == "images":
        parts = [json.loads(body)["messages"][0]["content"] for body in api.bodies]
        inputs = [part["image_url"]["url"] for some in parts for part in some[:-1]]
        assert len(set(inputs)) == len(inputs) == 24
    elif kind == "audio":
        sounds = [
            body.partition(b"audio/wav\r\n\r\n")[2].split(b"\r\n--")[0] for body in api.bodies
        ]
        assert len(set(sounds)) == 12
        assert all(sound.startswith(b"RIFF") for sound in sounds)
    else:
        assert len(set(api.bodies)) == 12
        assert {json.loads(body)["model"] for body in api.bodies} == {"m"}


def test_a_seed_brings_the_same_again(api: Api) -> None:
    for _ in range(2):
        prepare("text", api, seed=5).run_round(1, threading.Event())
    assert sorted(api.bodies[:6]) == sorted(api.bodies[6:])


def test_load_reports_a_request_that_the_server_rejects(api: Api) -> None:
    api.status = 400
    error = refusal(prepare("images", api))
    assert (error.code, error.exit_code) == ("load.failed", ExitCode.FAILED)
    assert "--load images: the server answered 400: At most 0 image(s)" in error.message
    assert len(api.paths) <= load_generators.CONNECTIONS


def test_the_api_key(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    prepare("text", api).run_round(1, threading.Event())
    assert api.keys == {"Bearer sk-1"}
    api.status = 401
    error = refusal(prepare("text", api))
    assert (error.code, error.exit_code) == ("load.not-authorised", ExitCode.NOT_AUTHORISED)
    assert "sk-1" not in error.message + error.hint


def test_a_server_that_is_gone_or_names_no_model(api: Api) -> None:
    api.models = b"{}"
    with pytest.raises(VllmopsError, match="lists no model"):
        prepare("text", api)
    with pytest.raises(VllmopsError) as caught:
        load_generators.build_load(
            "text", Server(name="s", processes=()), requests=1, inputs=1, seed=1
        )
    assert caught.value.code == "load.no-url"
    gone = Api(port=1)
    with pytest.raises(VllmopsError, match="connection attempts failed"):
        prepare("text", gone)


def test_it_stops_when_told(api: Api) -> None:
    stop = threading.Event()

    def stop_at_full_load() -> None:
        if len(api.paths) >= load_generators.CONNECTIONS:
            stop.set()

    api.heard = stop_at_full_load
    prepare("text", api, requests=1000).run_round(1, stop)
    assert len(api.paths) <= 3 * load_generators.CONNECTIONS


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_a_command_gets_to_know_the_server(api: Api, tmp_path: Path) -> None:
    names = ["VLLMOPS_URL", "VLLMOPS_MODEL", "VLLMOPS_ROUND"]
    path = tmp_path / "told"
    code = f"import os; open({str(path)!r}, 'w').write(' '.join(os.environ[n] for n in {names}))"
    prepare(python(code), api).run_round(3, threading.Event())
    assert path.read_text() == f"http://127.0.0.1:{api.port} m 3"
    # One that does not say its models is named as it was started.
    load_generators.build_load(
        python(code), Api(port=1).server, requests=1, inputs=1, seed=1
    ).run_round(1, threading.Event())
    assert path.read_text() == "http://127.0.0.1:1 org/m 1"


def test_a_command_that_fails(api: Api) -> None:
    error = refusal(prepare(python("import sys; print('a'); sys.exit('no such luck')"), api))
    assert error.code == "load.failed"
    assert error.message.endswith("ended with exit code 1: no such luck")


def test_a_command_is_ended_when_told(api: Api, tmp_path: Path) -> None:
    stop, began = threading.Event(), tmp_path / "began"

    def tell() -> None:
        until(began.exists)
        stop.set()

    threading.Thread(target=tell).start()
    code = f"import time; open({str(began)!r}, 'w').close(); time.sleep(600)"
    prepare(python(code), api).run_round(1, stop)


@pytest.mark.parametrize("command", ["", "no-such-program-here -x", "sh -c 'x"])
def test_no_command(api: Api, command: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        prepare(command, api)
    assert (caught.value.code, caught.value.exit_code) == ("load.no-command", ExitCode.USAGE)
    assert "images" in caught.value.hint
