"""The agent's socket: HTTP with JSON answers, from daemon threads, only for this user and root."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any

import msgspec

from .. import __version__, background
from ..background import ErrorReporter
from ..errors import VllmopsError
from ..files import peer
from ..home import home, make_missing
from ..protocol import packages
from ..protocol.compares import CompareRequest
from ..protocol.engine import Beat, Hello, Traffic
from ..protocol.heal import HealRequest
from ..protocol.repairs import RepairRequest
from ..protocol.requests import Abort, Reveal
from ..protocol.resets import ResetRequest
from ..protocol.socket import BODY_BYTES, DIRECTORY, PATH_BYTES, sockets
from ..protocol.text import encoded
from . import (
    caches,
    compare,
    engine,
    handover,
    keys,
    memory,
    nodes,
    objects,
    recorder,
    repair,
    requests,
    reset,
    stacks,
)
from .adapters import features
from .gate import gate
from .heal import event_loop, fatal
from .heal import table as healing
from .heartbeat import Heart
from .identity import own, role, standing
from .listening import Threads
from .log import log
from .patches import registry

OLD_S = 24 * 3600.0
CUT_S = 1.0  # for the event loop to answer what is cut off
FEATURES = (
    *("engine", "caches", "traffic", "requests", "abort", "drain", "heartbeat"),
    *("patches", "repair", "reset", "memory", "compare", "keys", "stacks", "steps", "heal"),
)


class OffError(Exception):
    """The agent can't run here; the message says why."""


class Server(Threads, UnixStreamServer):
    """The agent's socket."""

    def __init__(self, path: str, reporter: ErrorReporter) -> None:
        self.reporter = reporter
        super().__init__(path, Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        return peer(request) in (0, os.geteuid())


class Handler(BaseHTTPRequestHandler):
    """Answers a GET or a POST of one of `ROUTES`."""

    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds that a caller may stay silent
    wbufsize = 1 << 16  # headers and body in one write: each costs a wait for the GIL

    def do_GET(self) -> None:
        route = GETS.get(self.path)
        if route is None:
            self.answer(404, {"error": f"no such path: {self.path}"})
            return
        try:
            content = route()
        except Exception as error:
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.answer(200, content)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        route = POSTS.get(self.path)
        if route is None or length > BODY_BYTES:
            self.answer(404, {"error": f"no such path: {self.path}"})
            return
        decoder, act = route
        try:
            content = act(decoder.decode(self.rfile.read(length)))
        except msgspec.MsgspecError as error:
            self.answer(400, {"error": str(error)})
        except Exception as error:
            self.answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.answer(200, content)

    def answer(self, status: int, content: Any) -> None:
        body = encoded(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log requests."""


class Drain(msgspec.Struct, frozen=True):
    """The body of ``POST /drain``.

    Args:
        on: whether to refuse new requests.
        cut: whether to answer those in flight with 503, too.
        rerun: as in `Gate`.
        leave: whether to take no more connections: another process does.
    """

    on: bool
    cut: bool = False
    rerun: bool = False
    leave: bool = False


class Running:
    """The agent of one process: its socket and its heartbeat."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        directory = private(sockets(own_directory().parent))
        self.path = directory / f"{self.pid}.sock"
        if len(os.fsencode(self.path)) > PATH_BYTES:
            raise OffError(
                f"the socket's path is longer than {PATH_BYTES} bytes: {self.path}; "
                "set VLLMOPS_HOME to a shorter one"
            )
        sweep(directory)
        sweep_boots(directory)
        if answers(self.path):
            raise OffError(f"another process answers on {self.path}")
        self.path.unlink(missing_ok=True)
        reporter = ErrorReporter(
            f"the agent of pid {self.pid} does not answer: vllmops can't inspect this process",
            log.warning,
        )
        self.server = Server(os.fspath(self.path), reporter)
        self.path.chmod(0o600)
        self.heart = Heart(self.path.with_suffix(".beat"), beat)
        self.heart.start()
        # Nothing calls shutdown(), so a long poll interval is fine.
        background.thread("vllmops-agent", partial(self.server.serve_forever, 3600), reporter)

    def leave(self) -> None:
        """Remove the files, unless this is a forked child: they are its parent's."""
        if self.pid == os.getpid():
            self.heart.stop()
            recorder.beat()
            for path in (self.path, self.heart.path):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def forget(self) -> None:
        """In a forked child: close the inherited socket, so that callers reach only the parent."""
        with suppress(OSError):
            self.server.socket.close()
            os.close(self.heart.fd)


_running: Running | None = None
_starting = threading.Lock()
_forks_watched = False


def start() -> None:
    """Start the agent in this process, unless it runs; an error is reported, not raised."""
    global _running, _forks_watched  # noqa: PLW0603
    nodes.start()
    if _running is not None or not _starting.acquire(blocking=False):
        return
    try:
        if not _forks_watched:
            os.register_at_fork(after_in_child=forked)
            _forks_watched = True
        _running = Running()
        atexit.register(_running.leave)
        log.debug("vllmops: the agent of pid %d listens on %s", _running.pid, _running.path)
    except (OffError, OSError, RuntimeError, VllmopsError) as error:
        # RuntimeError: no thread can be started. VllmopsError: no home directory is known.
        objects.report(f"the agent does not start in pid {os.getpid()}: {error}")
    finally:
        _starting.release()


def running() -> bool:
    """Whether the agent answers in this process."""
    return _running is not None


def forked() -> None:
    """In a forked child: no thread survives, so the agent starts again with vLLM's next object."""
    global _running, _starting  # noqa: PLW0603
    _starting = threading.Lock()
    objects.forget()
    recorder.forget()
    nodes.forget()
    if _running is not None:
        _running.forget()
    _running = None


def own_directory() -> Path:
    """The directory of what agents leave behind; created if missing, and raises as `private`."""
    path = home() / DIRECTORY
    make_missing(path.parent)
    return private(path)


def private(path: Path) -> Path:
    """A directory for this user alone; created if missing.

    Raises:
        OffError: it belongs to or is open to other users, who could put their own socket there.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    at = path.lstat()
    if not stat.S_ISDIR(at.st_mode):
        raise OffError(f"{path} is not a directory")
    if at.st_uid != os.geteuid():
        raise OffError(
            f"{path} belongs to uid {at.st_uid}; this process runs as uid {os.geteuid()}"
        )
    if stat.S_IMODE(at.st_mode) & 0o077:
        run = shlex.join(["chmod", "700", str(path)])
        raise OffError(f"other users can access {path}; run: {run}")
    return path


def sweep(directory: Path) -> None:
    """Remove the files that killed processes left behind."""
    for path in directory.glob("*.*"):
        if not path.stem.isdecimal() or alive(int(path.stem)):
            continue
        # Containers may share the directory and not the pids; a live socket answers.
        if not answers(path.with_suffix(".sock")):
            with suppress(OSError):
                path.unlink()


def sweep_boots(directory: Path) -> None:
    """Remove the directories of other boots, of any machine, after a day without a heartbeat.

    Args:
        directory: of this boot.
    """
    for other in directory.parent.iterdir():
        if other == directory or other.is_symlink() or not other.is_dir():
            continue
        with suppress(OSError):
            paths = list(other.iterdir())
            if all(time.time() - path.lstat().st_mtime > OLD_S for path in (other, *paths)):
                for path in paths:
                    path.unlink()
                other.rmdir()


def alive(pid: int) -> bool:
    """Whether a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def answers(path: Path) -> bool:
    """Whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(os.fspath(path))
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


turns = engine.Turns()


def beat(sequence: int, now: float) -> Beat:
    """A heartbeat's content."""
    step, running, waiting, still_s = engine.progress.look(now)
    recorder.beat()
    return Beat(
        monotonic=now,
        sequence=sequence,
        **own()._asdict(),
        role=role(),
        standing=standing(),
        current_step=step,
        running=running,
        waiting=waiting,
        still_s=still_s,
        handed=engine.handed(),
        oldest=engine.oldest(),
        rendering_s=engine.rendering(now),
        loop_s=turns.look(now),
        interrupt=event_loop.number(),
        unready=engine.unready(),
    )


def hello() -> Hello:
    """``GET /hello``."""
    return Hello(
        agent=__version__,
        **own()._asdict(),
        role=role(),
        standing=standing(),
        vllm_version=features.version(),
        python=platform.python_version(),
        features=FEATURES,
        problems=tuple(objects.problems),
    )


def drain(request: Drain) -> Traffic:
    """``POST /drain``."""
    gate.draining, gate.rerun = request.on, request.rerun
    if request.leave:
        handover.leave()
    if request.cut:
        gate.cut(CUT_S)
    return engine.traffic()


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
POSTS: dict[str, tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]] = {
    "/abort": (msgspec.json.Decoder(Abort), requests.abort),
    "/compare": (msgspec.json.Decoder(CompareRequest), compare.compare),
    "/drain": (msgspec.json.Decoder(Drain), drain),
    "/heal": (msgspec.json.Decoder(HealRequest), healing.heal),
    "/prompt": (msgspec.json.Decoder(Reveal), requests.prompt),
    "/repair": (msgspec.json.Decoder(RepairRequest), repair.repair),
    "/reset": (msgspec.json.Decoder(ResetRequest), reset.reset),
}
GETS: dict[str, Callable[[], Any]] = {
    "/hello": hello,
    "/engine": engine.state,
    "/caches": caches.snapshot,
    "/caches?keys=1": partial(caches.snapshot, keys=True),
    "/keys": keys.state,
    "/keys?reload=1": partial(keys.state, reload=True),
    "/memory": memory.snapshot,
    "/messages": fatal.messages,
    "/packages": packages.of_this_process,
    "/requests": requests.snapshot,
    "/traffic": engine.traffic,
    "/stacks": stacks.snapshot,
    "/steps": recorder.snapshot,
    "/patches": registry.states,
    "/patches?verify=1": partial(registry.states, verify=True),
    "/heartbeat": lambda: beat(-1, time.monotonic()),
}
