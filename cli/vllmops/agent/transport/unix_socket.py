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

from ... import __version__
from ...model import package_versions
from ...model.agent_socket import BODY_BYTES, DIRECTORY, PATH_BYTES, get_socket_directory
from ...model.agent_state import Heartbeat, Hello, Traffic
from ...model.cache_comparison import CompareRequest
from ...model.cache_repairs import RepairRequest
from ...model.cache_resets import ResetRequest
from ...model.healing import HealRequest
from ...model.json_text import encode_json
from ...model.keys import ProcessKeys
from ...model.requests import AbortRequest, PromptRequest
from ...support import background
from ...support.background import ErrorReporter
from ...support.errors import VllmopsError
from ...support.files import read_peer_uid
from ...support.home import create_missing_folders, resolve_home
from ..actions import action_table, blocked_event_loop, cache_repair, cache_reset, request_abort
from ..hooks import socket_handover, vllm_objects
from ..hooks.request_gate import gate
from ..identity import detect_role, find_standing, make_process_fields, read_own_identity
from ..log import log
from ..patches import registry
from ..recording import step_recorder
from ..recording.heartbeat import HeartbeatWriter
from ..state import cache_comparison, caches, engine, fatal_messages, memory, requests, stacks
from ..versions import features
from . import node_channel
from .threaded_server import DaemonThreadingMixIn

OLD_S = 24 * 3600.0
CUT_S = 1.0  # for the event loop to answer what is cut off
FEATURES = (
    *("engine", "caches", "traffic", "requests", "abort", "drain", "heartbeat"),
    *("patches", "repair", "reset", "memory", "compare", "keys", "stacks", "steps", "heal"),
)


class AgentStartError(Exception):
    """The agent can't run here; the message says why."""


class AgentServer(DaemonThreadingMixIn, UnixStreamServer):
    """The agent's socket."""

    def __init__(self, path: str, reporter: ErrorReporter) -> None:
        self.reporter = reporter
        super().__init__(path, AgentHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        return read_peer_uid(request) in (0, os.geteuid())


class AgentHandler(BaseHTTPRequestHandler):
    """Answers a GET or a POST of one of `GETS` and `POSTS`."""

    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds that a caller may stay silent
    wbufsize = 1 << 16  # headers and body in one write: each costs a wait for the GIL

    def do_GET(self) -> None:
        route = GETS.get(self.path)
        if route is None:
            self.send_json(404, {"error": f"no such path: {self.path}"})
            return
        try:
            content = route()
        except Exception as error:
            self.send_json(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.send_json(200, content)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        route = POSTS.get(self.path)
        if route is None or length > BODY_BYTES:
            self.send_json(404, {"error": f"no such path: {self.path}"})
            return
        decoder, act = route
        try:
            content = act(decoder.decode(self.rfile.read(length)))
        except msgspec.MsgspecError as error:
            self.send_json(400, {"error": str(error)})
        except Exception as error:
            self.send_json(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self.send_json(200, content)

    def send_json(self, status: int, content: Any) -> None:
        body = encode_json(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log requests."""


class DrainRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /drain``.

    Args:
        should_drain: whether to refuse new requests.
        cut: whether to answer those in flight with 503, too.
        rerun: as in `Gate`.
        leave: whether to take no more connections: another process does.
    """

    should_drain: bool = msgspec.field(name="on")
    cut: bool = False
    rerun: bool = False
    leave: bool = False


class RunningAgent:
    """The agent of one process: its socket and its heartbeat."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        directory = make_private_directory(get_socket_directory(make_agent_directory().parent))
        self.path = directory / f"{self.pid}.sock"
        if len(os.fsencode(self.path)) > PATH_BYTES:
            raise AgentStartError(
                f"the socket's path is longer than {PATH_BYTES} bytes: {self.path}; "
                "set VLLMOPS_HOME to a shorter one"
            )
        remove_stale_files(directory)
        remove_old_boots(directory)
        if has_listener(self.path):
            raise AgentStartError(f"another process answers on {self.path}")
        self.path.unlink(missing_ok=True)
        reporter = ErrorReporter(
            f"the agent of pid {self.pid} does not answer: vllmops can't inspect this process",
            log.warning,
        )
        self.server = AgentServer(os.fspath(self.path), reporter)
        self.path.chmod(0o600)
        self.heartbeat_writer = HeartbeatWriter(self.path.with_suffix(".beat"), make_heartbeat)
        self.heartbeat_writer.start()
        # Nothing calls shutdown(), so a long poll interval is fine.
        background.start_repeating_thread(
            "vllmops-agent", partial(self.server.serve_forever, 3600), reporter
        )

    def remove_files(self) -> None:
        """Remove the files, unless this is a forked child: they are its parent's."""
        if self.pid == os.getpid():
            self.heartbeat_writer.stop()
            step_recorder.flush_recording()
            for path in (self.path, self.heartbeat_writer.path):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def close_inherited_socket(self) -> None:
        """In a forked child: close the inherited socket, so that callers reach only the parent."""
        with suppress(OSError):
            self.server.socket.close()
            os.close(self.heartbeat_writer.fd)


_running: RunningAgent | None = None
_starting = threading.Lock()
_forks_watched = False


def start_agent() -> None:
    """Start the agent in this process, unless it runs; an error is reported, not raised."""
    global _running, _forks_watched  # noqa: PLW0603
    node_channel.start_listening()
    if _running is not None or not _starting.acquire(blocking=False):
        return
    try:
        if not _forks_watched:
            os.register_at_fork(after_in_child=reset_after_fork)
            _forks_watched = True
        _running = RunningAgent()
        atexit.register(_running.remove_files)
        log.debug("vllmops: the agent of pid %d listens on %s", _running.pid, _running.path)
    except (AgentStartError, OSError, RuntimeError, VllmopsError) as error:
        # RuntimeError: no thread can be started. VllmopsError: no home directory is known.
        vllm_objects.report_problem(f"the agent does not start in pid {os.getpid()}: {error}")
    finally:
        _starting.release()


def is_running() -> bool:
    """Whether the agent answers in this process."""
    return _running is not None


def reset_after_fork() -> None:
    """In a forked child: no thread survives, so the agent starts again with vLLM's next object."""
    global _running, _starting  # noqa: PLW0603
    _starting = threading.Lock()
    vllm_objects.reset_after_fork()
    step_recorder.reset_after_fork()
    node_channel.reset_after_fork()
    if _running is not None:
        _running.close_inherited_socket()
    _running = None


def make_agent_directory() -> Path:
    """The directory of what agents leave behind; raises as `make_private_directory`."""
    path = resolve_home() / DIRECTORY
    create_missing_folders(path.parent)
    return make_private_directory(path)


def make_private_directory(path: Path) -> Path:
    """A directory for this user alone; created if missing.

    Raises:
        AgentStartError: it belongs to or is open to other users, who could put their own socket
            there.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    at = path.lstat()
    if not stat.S_ISDIR(at.st_mode):
        raise AgentStartError(f"{path} is not a directory")
    if at.st_uid != os.geteuid():
        raise AgentStartError(
            f"{path} belongs to uid {at.st_uid}; this process runs as uid {os.geteuid()}"
        )
    if stat.S_IMODE(at.st_mode) & 0o077:
        run = shlex.join(["chmod", "700", str(path)])
        raise AgentStartError(f"other users can access {path}; run: {run}")
    return path


def remove_stale_files(directory: Path) -> None:
    """Remove the files that killed processes left behind."""
    for path in directory.glob("*.*"):
        if not path.stem.isdecimal() or is_pid_alive(int(path.stem)):
            continue
        # Containers may share the directory and not the pids; a live socket answers.
        if not has_listener(path.with_suffix(".sock")):
            with suppress(OSError):
                path.unlink()


def remove_old_boots(directory: Path) -> None:
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


def is_pid_alive(pid: int) -> bool:
    """Whether a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def has_listener(path: Path) -> bool:
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


turns = engine.EventLoopMonitor()


def make_heartbeat(sequence: int, now: float) -> Heartbeat:
    """A heartbeat's content."""
    step, running, waiting, still_s = engine.progress.observe_scheduler(now)
    step_recorder.flush_recording()
    return Heartbeat(
        monotonic=now,
        sequence=sequence,
        **read_own_identity()._asdict(),
        role=detect_role(),
        standing=find_standing(),
        current_step=step,
        running=running,
        waiting=waiting,
        still_s=still_s,
        engine_requests=engine.count_handed_requests(),
        oldest_request_id=engine.find_oldest_request_id(),
        rendering_s=engine.measure_rendering_s(now),
        loop_s=turns.measure_blocked_s(now),
        interrupt=blocked_event_loop.find_interrupt_signal(),
        unready=engine.explain_unreadiness(),
    )


def answer_hello() -> Hello:
    """``GET /hello``."""
    return Hello(
        agent=__version__,
        **read_own_identity()._asdict(),
        role=detect_role(),
        standing=find_standing(),
        vllm_version=features.find_vllm_version(),
        python=platform.python_version(),
        features=FEATURES,
        problems=tuple(vllm_objects.problems),
    )


def answer_no_keys() -> ProcessKeys:
    """``GET /keys``, unless an extension has the keys of this process."""
    return ProcessKeys(pid=os.getpid(), **make_process_fields())


def set_draining(request: DrainRequest) -> Traffic:
    """``POST /drain``."""
    gate.draining, gate.rerun = request.should_drain, request.rerun
    if request.leave:
        socket_handover.stop_accepting_connections()
    if request.cut:
        gate.cut_off_requests(CUT_S)
    return engine.observe_traffic()


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
POSTS: dict[str, tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]] = {
    "/abort": (msgspec.json.Decoder(AbortRequest), request_abort.abort_requests),
    "/compare": (msgspec.json.Decoder(CompareRequest), cache_comparison.compare_caches),
    "/drain": (msgspec.json.Decoder(DrainRequest), set_draining),
    "/heal": (msgspec.json.Decoder(HealRequest), action_table.answer_heal),
    "/prompt": (msgspec.json.Decoder(PromptRequest), requests.reveal_prompt),
    "/repair": (msgspec.json.Decoder(RepairRequest), cache_repair.repair_caches),
    "/reset": (msgspec.json.Decoder(ResetRequest), cache_reset.reset_caches),
}
GETS: dict[str, Callable[[], Any]] = {
    "/hello": answer_hello,
    "/engine": engine.observe_engine,
    "/caches": caches.observe_caches,
    "/caches?keys=1": partial(caches.observe_caches, keys=True),
    "/keys": answer_no_keys,
    "/keys?reload=1": answer_no_keys,
    "/memory": memory.observe_memory,
    "/messages": fatal_messages.list_fatal_messages,
    "/packages": package_versions.collect_own_packages,
    "/requests": requests.observe_requests,
    "/traffic": engine.observe_traffic,
    "/stacks": stacks.observe_stacks,
    "/steps": step_recorder.read_recording,
    "/patches": registry.observe_patches,
    "/patches?verify=1": partial(registry.observe_patches, verify=True),
    "/heartbeat": lambda: make_heartbeat(-1, time.monotonic()),
}
