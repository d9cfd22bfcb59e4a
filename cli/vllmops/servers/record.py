"""What is on disk about one instance: the record, its directory, its lock.

One writer at a time: the supervisor, which holds the lock for as long as it lives. The kernel
drops the lock with its holder, so it shows whether a supervisor lives, whatever happened to
its pid.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from ..collect.machine.processes import Process
from ..collect.machine.server_address import make_unix_url
from ..model.agent_socket import PATH_BYTES
from ..model.targets import NAME
from ..support.errors import VllmopsError
from ..support.files import (
    lock_file,
    open_regular_file,
    read_private_file,
    run_lock_command,
    write_atomically,
)
from ..support.home import (
    create_folder,
    locate_home,
    require_safe_folder,
    resolve_home,
    suggest_home_assignment,
)

SCHEMA = 2
FAILED = "failed: "  # before why a hand-over did
RECORD_BYTES = 16 << 20  # a server has some thousand processes at most


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in {InstanceState.STOPPED, InstanceState.FAILED}


class Failure(msgspec.Struct, frozen=True):
    """Why an instance failed.

    Args:
        cause: the failing process's last error, in its own words.
        process: which process that was, as its log lines name it; empty if unknown.
        hint: how to correct it, if known.
    """

    cause: str
    process: str = ""
    hint: str = ""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One instance, as its supervisor last saw it. Times are seconds since the epoch.

    Args:
        command: what is executed, without the supervisor.
        environment: variables that are added for the server.
        detached: False where a foreground ``serve`` holds it.
        stage: how far the server came while it started.
        note: one line about what the supervisor is doing, such as draining.
        session: session id of every process of the tree, None before the start.
        processes: the tree, root first.
        segments: names in ``/dev/shm`` that processes of the tree have mapped.
        exit_code: of the root process, negative for a signal, None if unknown.
        watch: what `vllmops watch` is given that runs beside it; None if none does.
        port: that it listens on; None if it listens on a Unix socket, or is headless.
        uds: the Unix socket that it listens on, None for TCP.
        headless: whether it has no API server: its engines work for one on another node.
        ready_s: seconds that its last start took, by the monotonic clock; None before.
        run: names its last start; empty before.
        rerun: the start whose background responses the next one runs again; empty for none.
        hand_over: how far a hand-over is; empty if none is going on. Or `FAILED` and why.
        hand_over_run: names the start of the second server of the last hand-over; that of the
            server once the second one has taken over.
        hand_over_processes: processes of the other one of two servers during a hand-over.
        beside_session: their session.
    """

    schema: int = SCHEMA
    name: str
    model: str
    command: tuple[str, ...]
    environment: dict[str, str]
    directory: str
    host: str
    port: int | None
    scheme: str = "http"
    detached: bool
    created_at: float
    state: InstanceState = InstanceState.STARTING
    stage: str = "launching"
    stage_at: float = 0.0
    note: str = ""
    started_at: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    session: int | None = None
    processes: tuple[Process, ...] = ()
    segments: tuple[str, ...] = ()
    failure: Failure | None = None
    exit_code: int | None = None
    watch: tuple[str, ...] | None = None
    uds: str | None = None
    headless: bool = False
    ready_s: float | None = None
    run: str = ""
    rerun: str = ""
    hand_over: str = ""
    hand_over_run: str = ""
    hand_over_processes: tuple[Process, ...] = msgspec.field(default=(), name="beside")
    beside_session: int | None = None

    @property
    def url(self) -> str | None:
        return make_url(self.scheme, self.host, self.port, self.uds)


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
RECORDS = msgspec.json.Decoder(InstanceRecord)


def make_url(scheme: str, host: str | None, port: int | None, uds: str | None) -> str | None:
    """A server's URL, None if it listens on nothing that is known."""
    if uds:
        return make_unix_url(uds)
    return f"{scheme}://{get_client_host(host or '')}:{port}" if port else None


def get_client_host(host: str) -> str:
    """The address to connect to for a server that listens on ``host``."""
    if host in {"", "0.0.0.0"}:
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


class InstanceFolder:
    """The directory of one instance: record, lock, control socket and logs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = get_instances_root() / name

    @property
    def record_file(self) -> Path:
        return self.path / "instance.json"

    @property
    def control_socket(self) -> Path:
        return self.path / "control.sock"

    @property
    def server_log(self) -> Path:
        return self.path / "server.log"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"

    @property
    def watch_lock(self) -> Path:
        return self.path / "watch.lock"

    def has_watch(self) -> bool:
        """Whether `vllmops watch` runs beside it, as ``serve --watch`` has it."""
        return is_lock_held(self.watch_lock)

    def load_record(self) -> InstanceRecord | None:
        """The record, None if there is none.

        Raises:
            VllmopsError: ``registry.corrupt`` if it can't be understood, ``registry.unreadable``
                or ``home.unsafe`` (exit code 4) if it can't be read, or may belong to another user.
        """
        try:
            content = read_private_file(
                require_safe_folder(self.path) / self.record_file.name, None, RECORD_BYTES
            )
            record: InstanceRecord = RECORDS.decode(content)
            return record
        except FileNotFoundError:
            return None
        except OSError as error:
            raise VllmopsError(
                "registry.unreadable",
                f"{self.record_file}: {error.strerror}",
                "run vllmops as the user who started the server",
            ) from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            away = shlex.join(["mv", str(self.record_file), f"{self.record_file}.damaged"])
            raise VllmopsError(
                "registry.corrupt",
                f"{self.record_file} is not a record this vllmops can read: {error}",
                f"vllmops stop PID ends its server if one runs; then {away}",
            ) from error

    def save_record(self, record: InstanceRecord) -> None:
        """Replace the record; on an OSError, as with a full disk, the old one is intact."""
        write_atomically(self.record_file, msgspec.json.encode(record))

    def take_lock(self) -> int | None:
        """Take the lock; returns the open file that holds it, None if another has it."""
        require_safe_folder(self.path)
        return lock_file(self.lock_path)

    def is_supervised(self) -> bool:
        """Whether a supervisor (or a ``serve`` about to start one) is alive."""
        return is_lock_held(self.lock_path)


def is_lock_held(path: Path) -> bool:
    """Whether a process holds a lock."""
    import fcntl  # noqa: PLC0415 - Windows has none

    try:
        with open(open_regular_file(path), "rb") as file:
            return run_lock_command(file.fileno(), fcntl.F_OFD_GETLK) != fcntl.F_UNLCK
    except OSError:
        return False


def get_instances_root() -> Path:
    """The directory of all instances; raises as `home.require_safe_folder` does."""
    return require_safe_folder(resolve_home() / "instances")


def create_instances_root() -> Path:
    """Make the state directory, private to its owner.

    Raises:
        VllmopsError: ``home.unusable`` if it can't be written, ``home.unsafe`` (exit code 4).
    """
    try:
        made = create_folder(get_instances_root())
        tempfile.TemporaryFile(dir=made).close()
    except OSError as error:
        raise VllmopsError(
            "home.unusable",
            f"the state directory {locate_home()} can't be written: {error.strerror}",
            f"set VLLMOPS_HOME to a directory of your own, for example {suggest_home_assignment()}",
        ) from error
    return made


def list_instance_folders() -> Iterator[InstanceFolder]:
    """Every instance that has a directory, by name."""
    try:
        names = sorted(entry.name for entry in get_instances_root().iterdir() if entry.is_dir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise VllmopsError(
            "home.unusable",
            f"the state directory {get_instances_root()} can't be read: {error.strerror}",
            f"set VLLMOPS_HOME to a directory of your own, for example {suggest_home_assignment()}",
        ) from error
    for name in names:
        yield InstanceFolder(name)


def get_instance_folder(name: str) -> InstanceFolder:
    """The folder for a name that a person typed.

    Raises:
        VllmopsError: ``name.invalid``, or ``home.path-too-long`` for a Unix socket.
    """
    if not NAME.fullmatch(name):
        raise VllmopsError(
            "name.invalid", f"{name!r} is not a name: letters, digits, '.', '_' and '-', 63 at most"
        )
    folder = InstanceFolder(name)
    spare = PATH_BYTES - len(os.fsencode(folder.control_socket))
    if spare < 0:
        raise VllmopsError(
            "home.path-too-long",
            f"{folder.control_socket} is {-spare} bytes too long for a Unix socket (at most "
            f"{PATH_BYTES})",
            f"set VLLMOPS_HOME to a shorter path, for example {suggest_home_assignment('.vo')}",
        )
    return folder
