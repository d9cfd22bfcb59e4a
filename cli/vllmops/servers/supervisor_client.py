"""The supervisor's control socket, seen from a command.

A client sends one JSON line per request and gets the instance's record, one JSON line each time it
changes, until the supervisor ends. If a client that holds the instance
disconnects, for whatever reason, the supervisor takes the server down: so a server ends with its
foreground ``serve``.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Iterator

import msgspec

from ..support.errors import VllmopsError
from ..support.files import read_peer_uid
from ..support.home import format_user
from . import detached_process
from .record import RECORDS, InstanceFolder, InstanceRecord, InstanceState

STOP_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
LET_GO = "pkill -9 -f 'vllmops.supervision.supervisor {name} '"


class ControlRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to a supervisor.

    Args:
        hold: take the server down when this connection ends.
        stop: drain for that many seconds, then stop; 0 stops at once.
        restart: as ``stop``, and start again with the recorded command.
        rerun: whether the background responses that run then are run again after that.
        hand_over: start another server beside it, have that take over, and drain this one for that
            many seconds.
        run: names the start of that other server.

    Raises:
        ValueError: seconds that are not finite, which JSON would drop, or are
            below zero.
    """

    hold: bool = False
    stop: float | None = None
    restart: float | None = None
    rerun: bool = False
    hand_over: float | None = None
    run: str = ""

    def __post_init__(self) -> None:
        for seconds in (self.stop, self.restart, self.hand_over):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds} is not a number of seconds")


NOTHING = ControlRequest()


class ControlConnection:
    """A connection to a supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send_request(self, request: ControlRequest) -> None:
        # A supervisor that has gone is seen by who reads the records.
        with contextlib.suppress(OSError):
            self.connection.sendall(msgspec.json.encode(request) + b"\n")

    def follow_records(self, deadline: float | None = None) -> Iterator[InstanceRecord]:
        """Each state of the instance, until the supervisor ends.

        Args:
            deadline: when to give up, by the monotonic clock.

        Raises:
            TimeoutError: it was time to give up.
        """
        with self.connection.makefile("rb") as lines, contextlib.suppress(ConnectionError):
            while True:
                if deadline is not None:
                    self.connection.settimeout(max(deadline - time.monotonic(), 0.01))
                line = lines.readline()
                if not line.endswith(b"\n"):
                    return
                yield RECORDS.decode(line)

    def close(self) -> None:
        self.connection.close()


class ControlSession:
    """Follows an instance to its end: if its supervisor dies, another one is started.

    Args:
        folder: the instance.
        control: the connection to begin with.
        request: what to say to each successor: whether the client holds it.
    """

    def __init__(
        self, folder: InstanceFolder, control: ControlConnection, request: ControlRequest = NOTHING
    ) -> None:
        self.folder = folder
        self.control = control
        self.request = request
        self.pending_request = NOTHING  # what the supervisor has not begun to do

    def send_request(self, request: ControlRequest) -> None:
        self.pending_request = request
        self.control.send_request(request)

    def follow_records(self, deadline: float | None = None) -> Iterator[InstanceRecord]:
        """Each state until it is over.

        Args:
            deadline: when to give up, by the monotonic clock.

        Raises:
            VllmopsError: ``supervisor.unreachable``, or ``supervisor.silent``.
        """
        before, died_mute = None, False  # the last state; whether the last supervisor sent nothing
        while True:
            record = None
            try:
                for record in self.control.follow_records(deadline):
                    begun = before not in {None, record.state}
                    if run := self.pending_request.run:  # others may ask for a hand-over, too
                        begun = record.hand_over_run == run
                    if begun:
                        self.pending_request = NOTHING
                    before = record.state
                    yield record
            except TimeoutError:
                self.control.close()
                raise make_silent_error(self.folder) from None
            self.control.close()
            if record and record.state.is_over:
                return
            last = self.folder.load_record()
            if last and last.state.is_over:
                yield last
                return
            if died_mute and record is None:
                raise VllmopsError(
                    "supervisor.unreachable",
                    f"each supervisor of {self.folder.name!r} ends as soon as it is started",
                    f"{self.folder.supervisor_log} shows why",
                )
            died_mute = record is None
            self.control = connect_supervisor(self.folder, self.request)
            if self.pending_request != NOTHING:
                self.control.send_request(self.pending_request)

    def close(self) -> None:
        self.control.close()


def send_and_wait_until_begun(
    folder: InstanceFolder, request: ControlRequest, seconds: float
) -> None:
    """Tell the supervisor of a ready instance to end or to restart it, and wait until it begins.

    A Unix socket that is closed before all is read takes what it has sent with it.

    Args:
        folder: the instance.
        request: what to do.
        seconds: how long to wait at most.

    Raises:
        VllmopsError: ``supervisor.unreachable`` or ``supervisor.silent``.
    """
    session = ControlSession(folder, connect_supervisor(folder))
    session.send_request(request)
    records = session.follow_records(time.monotonic() + seconds)
    next((record for record in records if record.state is not InstanceState.READY), None)
    session.close()


def start_supervisor(
    folder: InstanceFolder,
    lock: int,
    request: ControlRequest,
    *,
    launch: bool,
    port: int | None = None,
) -> ControlConnection:
    """Start a supervisor that owns ``lock``; returns the connection it serves from birth.

    Args:
        folder: the instance, its record written.
        lock: an open file that holds the folder's lock; it is closed here.
        request: the first word to it: whether the connection holds the instance.
        launch: start the recorded command; otherwise take over what runs.
        port: an open file that holds the instance's port; it is closed here.
    """
    ours, theirs = socket.socketpair()
    words = [folder.name, "--lock", str(lock), "--client", str(theirs.fileno())]
    words += ["--launch"] if launch else []
    words += ["--port", str(port)] if port is not None else []
    keep = [lock, theirs.fileno(), *([port] if port is not None else [])]
    try:
        # Not blocked by a FIFO in its place.
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        log = os.open(folder.supervisor_log, how, 0o600)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    try:
        detached_process.start_detached("vllmops.supervision.supervisor", words, keep, log)
    finally:
        os.close(log)
        os.close(lock)
        if port is not None:
            os.close(port)
        theirs.close()
    control = ControlConnection(ours)
    control.send_request(request)
    return control


def make_silent_error(folder: InstanceFolder) -> VllmopsError:
    """The error of a supervisor that runs but does nothing, for example because it is stopped."""
    return VllmopsError(
        "supervisor.silent",
        f"the supervisor of {folder.name!r} does not stop",
        f"{LET_GO.format(name=folder.name)}; the next command starts another"
        " supervisor, which continues",
    )


def connect_supervisor(
    folder: InstanceFolder, request: ControlRequest = NOTHING
) -> ControlConnection:
    """A connection to the supervisor of an instance; starts one where it has died.

    Of an instance that is over and whose supervisor has gone, one that is at its end.

    Raises:
        VllmopsError: ``supervisor.unreachable``.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        if control := restart_dead_supervisor(folder, request):
            return control
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(folder.control_socket))
            if (uid := read_peer_uid(connection)) != os.geteuid():
                raise PermissionError(errno.EPERM, f"{format_user(uid)} answers at this address")
        except OSError as error:
            connection.close()
            if is_gone(folder):
                return make_closed_connection()
            if time.monotonic() < deadline:
                time.sleep(0.1)  # it may be about to listen, or to end
                continue
            raise VllmopsError(
                "supervisor.unreachable",
                f"the supervisor of {folder.name!r} does not answer at {folder.control_socket}:"
                f" {error.strerror}",
                "kill the supervisor and try again; the server keeps running: "
                f"{LET_GO.format(name=folder.name)}",
            ) from error
        control = ControlConnection(connection)
        control.send_request(request)
        return control


def restart_dead_supervisor(
    folder: InstanceFolder, request: ControlRequest = NOTHING
) -> ControlConnection | None:
    """Start a supervisor for an instance whose supervisor has died; None if it lives."""
    try:
        if is_over(folder) or (lock := folder.take_lock()) is None:
            return None
    except (VllmopsError, OSError):
        return None
    with contextlib.suppress(VllmopsError):
        if not is_over(folder):  # it may have ended in order, in the meantime
            return start_supervisor(folder, lock, request, launch=False)
    os.close(lock)
    return None


def make_closed_connection() -> ControlConnection:
    """A connection whose other side is closed."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return ControlConnection(ours)


def is_gone(folder: InstanceFolder) -> bool:
    """Whether an instance is over and nobody supervises it."""
    try:
        return is_over(folder) and not folder.is_supervised()
    except VllmopsError:
        return False


def is_over(folder: InstanceFolder) -> bool:
    """Whether an instance is over, or there is none; raises as `InstanceFolder.load_record`."""
    record = folder.load_record()
    return record is None or record.state.is_over


def read_supervised_record(folder: InstanceFolder) -> InstanceRecord | None:
    """The record, for whoever reads it again and again; a supervisor that died gets a successor.

    Raises:
        VllmopsError: as `InstanceFolder.load_record`.
    """
    if control := restart_dead_supervisor(folder):
        control.close()
    return folder.load_record()
