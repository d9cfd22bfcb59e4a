"""Plays ``vllm serve``, for faults and corner cases; tests/live does it with the real one.

It has vLLM's tree (API server, EngineCore below it, Worker below that), its titles, its log
lines, a segment in ``/dev/shm`` that engine and worker map, ``/health`` and ``/metrics``. The
environment's ``STANDIN``, a JSON object, tells what else happens; see `Play`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket


class Play:
    """What this server does."""

    ready_s: float = 0.1  # how long it loads
    ready_with: str | None = None  # a file; it loads until that is there, too
    says: str | None = None  # a file whose text it prints while it loads
    exits: int | None = None  # ends with that status instead of serving
    api_servers: int = 1  # with more than one, the root only launches them
    stubborn: bool = False  # no process heeds SIGTERM
    stray: bool = False  # the worker has a child that loses its parent
    node: str = ""  # the worker is connected with another node, HOST:PORT


play = Play()
# Not by the module json: tests start hundreds of these processes.
JSON = {"true": True, "false": False, "null": None}
for name, value in eval(os.environ.get("STANDIN", "{}"), JSON).items():
    assert hasattr(play, name), name
    setattr(play, name, value)
PYTHON = os.readlink("/proc/self/exe")
UP = 9  # a pipe's writing end, by which the worker says that it is up
home = os.path.basename(os.environ["VLLMOPS_HOME"]).replace("-", "_")
segment = f"/dev/shm/psm_{home}_{os.getsid(0)}"
children: list[int] = []
running = 0


def say(process: str, text: str) -> None:
    print(f"({process} pid={os.getpid()}) INFO 11-20 19:05:14 {text}", flush=True)


def child(title: str, *words: str) -> None:
    """Start one with a title in place of its command line, as setproctitle leaves it."""
    # Such a title hides its library from the interpreter, and its own path.
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix}
    children.append(os.posix_spawn(PYTHON, [title, "-S", __file__, *words], environment))


def end(*_: object) -> None:
    """End in order: those below first."""
    for one in children:
        os.kill(one, signal.SIGTERM)
    for one in children:
        os.waitpid(one, 0)
    os._exit(0)


def wait() -> None:
    while True:
        signal.pause()


def map_segment() -> object:
    import mmap

    descriptor = os.open(segment, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 4096)
    mapped = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
    return mapped


def worker() -> None:
    say("Worker", "[cpu_model_runner.py:68] Starting to load model m...")
    kept = map_segment()
    if play.stray:
        import subprocess

        nested = f"import subprocess; subprocess.Popen(['{PYTHON}', '-S', '-c', {WAIT!r}])"
        subprocess.run([PYTHON, "-S", "-c", nested], check=True)
    if play.node:
        import socket

        host, port = play.node.split(":")
        connection = socket.create_connection((host, int(port)))  # noqa: F841 - it stays open
    os.write(UP, b"!")
    wait()
    del kept


WAIT = "import signal; signal.pause()"


def engine() -> None:
    say("EngineCore", "[core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'")
    kept = map_segment()
    child("VLLM::Worker", "worker")
    time.sleep(play.ready_s)
    say("EngineCore", "[core.py:402] init engine (profile, create kv cache) took 3.40 s")
    wait()
    del kept


def answer(connection: socket.socket) -> None:
    """Answer one request, and hang up."""
    global running  # noqa: PLW0603 - a counter for one short program
    with connection:
        words = b""
        while b"\r\n\r\n" not in words:
            if not (added := connection.recv(65536)):
                return
            words += added
        method, path = words.decode().split()[:2]
        status, body = "200 OK" if method == "GET" else "501 Not Implemented", ""
        if path == "/metrics":
            body = "# TYPE vllm:num_requests_running gauge\n"
            body += f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
        elif path.startswith("/slow/"):
            running += 1
            time.sleep(float(path.removeprefix("/slow/")))
            running -= 1
            body = "done"
        elif path.startswith("/until/"):  # a file is there
            running += 1
            while not os.path.exists(path.removeprefix("/until")):
                time.sleep(0.05)
            running -= 1
            body = "done"
        print(f'INFO:     127.0.0.1:50000 - "{method} {path} HTTP/1.1" {status}', flush=True)
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close"
        connection.sendall(f"{head}\r\n\r\n{body}".encode())


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
    while play.ready_with and not os.path.exists(play.ready_with):
        time.sleep(0.05)
    say("APIServer", "[launcher.py:195] Route: /health, Methods: GET")
    if play.api_servers > 1:
        child("VLLM::APIServer_0", "serve", host, str(port))
        for number in range(1, play.api_servers):
            child(f"VLLM::APIServer_{number}", "idle")
        wait()
    serve(host, port, uds)


def serve(host: str, port: int, uds: str | None = None) -> None:
    import socket
    import threading

    if (
        uds
    ):  # as vLLM's: it binds, and neither removes a socket that is there nor its own at the end
        server = socket.socket(socket.AF_UNIX)
        server.bind(uds)
        server.listen()
    elif handed := os.environ.get("VLLMOPS_LISTEN"):
        server = socket.socket(fileno=int(handed.split()[0]))
    else:
        server = socket.create_server((host, port))

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
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
