"""Plays ``vllm serve``, for faults and corner cases; tests/live does it with the real one.

It has vLLM's tree (API server, EngineCore below it, Worker below that), its titles, its log
lines, a segment in ``/dev/shm`` that engine and worker map, ``/health`` and ``/metrics``. The
environment's ``STANDIN``, a JSON object, tells what else happens; see `Play`.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Play:
    """What this server does.

    Args:
        ready_s: how long it loads.
        says: a file whose text it prints while it loads.
        exits: ends with that status instead of serving.
        api_servers: how many; with more than one, the root only launches them.
        stubborn: whether no process heeds SIGTERM.
        stray: whether the worker has a child that loses its parent.
    """

    ready_s: float = 0.1
    says: str | None = None
    exits: int | None = None
    api_servers: int = 1
    stubborn: bool = False
    stray: bool = False


play = Play(**json.loads(os.environ.get("STANDIN", "{}")))
PYTHON = os.readlink("/proc/self/exe")
UP = 9  # a pipe's writing end, by which the worker says that it is up
segment = f"/dev/shm/psm_{os.path.basename(os.environ['VLLMOPS_HOME'])}_{os.getsid(0)}"
children: list[subprocess.Popen[bytes]] = []
running = 0


def say(process: str, text: str) -> None:
    print(f"({process} pid={os.getpid()}) INFO 11-20 19:05:14 {text}", flush=True)


def child(title: str, *words: str) -> None:
    """Start one with a title in place of its command line, as setproctitle leaves it."""
    children.append(
        subprocess.Popen(
            [title, "-S", __file__, *words],
            executable=PYTHON,
            # Such a title hides its library from the interpreter, and its own path.
            env={**os.environ, "PYTHONHOME": sys.base_prefix},
            pass_fds=[UP],
        )
    )


def end(*_: Any) -> None:
    """End in order: those below first."""
    for one in children:
        one.terminate()
    for one in children:
        one.wait()
    os._exit(0)


def wait() -> None:
    while True:
        signal.pause()


def map_segment() -> mmap.mmap:
    descriptor = os.open(segment, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 4096)
    mapped = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    return mapped


def worker() -> None:
    say("Worker", "[cpu_model_runner.py:68] Starting to load model m...")
    kept = map_segment()
    if play.stray:
        nested = f"import subprocess; subprocess.Popen(['{PYTHON}', '-S', '-c', {WAIT!r}])"
        subprocess.run([PYTHON, "-S", "-c", nested], check=True)
    os.write(UP, b"!")
    wait()
    kept.close()


WAIT = "import signal; signal.pause()"


def engine() -> None:
    say("EngineCore", "[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'")
    kept = map_segment()
    child("VLLM::Worker", "worker")
    time.sleep(play.ready_s)
    say("EngineCore", "[core.py:402] init engine (profile, create kv cache) took 3.40 s")
    wait()
    kept.close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global running  # noqa: PLW0603 - a counter for one short program
        body = b""
        if self.path == "/metrics":
            body = b"# TYPE vllm:num_requests_running gauge\n"
            body += b'vllm:num_requests_running{engine="0"} %d.0\n' % running
        elif self.path.startswith("/slow/"):
            running += 1
            time.sleep(float(self.path.removeprefix("/slow/")))
            running -= 1
            body = b"done"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        print(f'INFO:     127.0.0.1:50000 - "GET {self.path} HTTP/1.1" 200 OK', flush=True)


def main() -> None:
    """The API server, or the launcher of several."""
    words = sys.argv[2:]
    model, host, port = words[0], "127.0.0.1", 8000
    uds = None
    for name, value in pairwise(words):  # the last one wins
        uds = value if name == "--uds" else uds
        host = value if name == "--host" else host
        port = int(value) if name == "--port" else port
    say("APIServer", f"[api_utils.py:286] non-default args: {{'model_tag': '{model}'}}")
    if play.says:
        with open(play.says) as file:
            print(file.read(), end="", flush=True)
    if play.exits is not None:
        time.sleep(play.ready_s)
        sys.exit(play.exits)
    up, theirs = os.pipe()
    os.dup2(theirs, UP)
    child("VLLM::EngineCore", "engine")
    os.read(up, 1)
    if "--headless" in words:
        wait()
    time.sleep(play.ready_s)
    say("APIServer", "[launcher.py:195] Route: /health, Methods: GET")
    if play.api_servers > 1:
        child("VLLM::APIServer_0", "serve", host, str(port))
        for number in range(1, play.api_servers):
            child(f"VLLM::APIServer_{number}", "idle")
        wait()
    serve(host, port, uds)


class UnixServer(ThreadingHTTPServer):
    """As vLLM's: it binds, and neither removes a socket that is there nor its own at the end."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)

    def get_request(self) -> Any:
        return self.socket.accept()[0], ("", 0)


def serve(host: str, port: int, uds: str | None = None) -> None:
    ThreadingHTTPServer.allow_reuse_address = True
    server = UnixServer(uds, Handler) if uds else ThreadingHTTPServer((host, port), Handler)  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say("APIServer", "[launcher.py:200] Application startup complete.")
    wait()


def on_signal(*_: object) -> None:
    """The root's end: it has the resource tracker, which removes the segment."""
    say("APIServer", "[launcher.py:254] [shutdown] API server: shutdown triggered")
    if os.path.exists(segment):
        os.unlink(segment)
    end()


signal.signal(signal.SIGTERM, signal.SIG_IGN if play.stubborn else end)
if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "serve":
        serve(rest[0], int(rest[1]))
    else:
        {"engine": engine, "worker": worker, "idle": wait}[what]()
elif not play.stubborn:  # imported as vllm.entrypoints.cli.main, to be the root
    signal.signal(signal.SIGTERM, on_signal)
