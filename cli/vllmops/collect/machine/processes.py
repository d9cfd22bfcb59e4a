"""The processes of this machine that belong to vLLM servers, and what each one does."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ...model import process_identity as identity
from ...model.process_identity import ProcessIdentity, compute_age_s, read_boot_id
from ...model.ranks import Placement, format_role_and_ranks, parse_title
from ...model.roles import Role, find_title_role
from ...support.errors import make_platform_error
from . import proc
from .server_address import parse_serving_mode

# When one of these dies the server is broken, whether or not the others notice.
VITAL = {Role.LAUNCHER, Role.API, Role.ENGINE, Role.WORKER, Role.COORDINATOR}
# Programs that take over processes whose parents have died.
REAPERS = ("systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "containerd-shim")
SESSION = 3  # of the fields of `process_identity.read_stat_fields`
# What `python -m` starts a server with; newer code of vLLM is below `frontend`.
ENTRIES = r"vllm\.(?:frontend\.)?entrypoints"
API_SERVER = re.compile(rf"{ENTRIES}\.(?:openai\.api_server|launchers\.api_server\.entry)")
COMMAND_LINE = re.compile(rf"{ENTRIES}\.cli\.main|vllmops\.agent\.launch")


@dataclass(frozen=True)
class Process:
    """One process of a server.

    Args:
        role: what it does.
        pid: process id.
        start_ticks: with the pid and the boot its `ProcessIdentity`.
        title: command line or title, for a person.
        rss_bytes: resident memory in bytes, None if it can't be read.
        boot: as in `ProcessIdentity`.
        place: its node and its ranks, by its title and by its agent.
        home: the state directory of its agent; empty for the one that its environment names.
    """

    role: Role
    pid: int
    start_ticks: int
    title: str = ""
    rss_bytes: int | None = None
    boot: str = field(default_factory=read_boot_id)
    place: Placement = field(default_factory=Placement)
    home: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.start_ticks, self.boot)

    @property
    def node(self) -> str:
        return self.place.node

    @property
    def create_time(self) -> float:
        """Seconds since the epoch, by the clock as it is set now: to be shown, not compared."""
        return time.time() - compute_age_s(self.start_ticks)


@dataclass(frozen=True)
class ProcessEntry:
    """One line of the process table."""

    pid: int
    ppid: int
    start_ticks: int
    arguments: tuple[str, ...]
    rss_bytes: int | None
    zombie: bool


Table = dict[int, ProcessEntry]


def read_process_table() -> Table:
    """The process table, one pass over it.

    Raises:
        VllmopsError: ``platform.linux``.
    """
    if not Path("/proc/self/stat").exists():
        raise make_platform_error("to look into processes")
    processes = {}
    # Supervisors and watches do this all the time: one look at `stat` has all but the words.
    for process in psutil.process_iter(["cmdline"]):
        with suppress(ProcessLookupError):  # gone meanwhile
            processes[process.pid] = read_process_entry(process.pid, process.info["cmdline"] or ())
    return processes


def read_process_entry(pid: int, arguments: Sequence[str] | None = None) -> ProcessEntry:
    """One process.

    Args:
        pid: its id.
        arguments: its command line, if that is known already.

    Raises:
        ProcessLookupError: it is gone.
        OSError: as `identity.read_identity` does.
    """
    fields = identity.read_stat_fields(pid)
    if arguments is None:
        try:
            arguments = psutil.Process(pid).cmdline()
        except psutil.Error:
            arguments = ()
    return ProcessEntry(
        pid=pid,
        ppid=int(fields[1]),
        start_ticks=int(fields[19]),
        arguments=tuple(arguments),
        rss_bytes=int(fields[21]) * mmap.PAGESIZE,
        zombie=fields[0] == "Z",
    )


def is_alive(process: Process) -> bool:
    """Whether this very process runs: same pid, same start, no zombie.

    Raises:
        OSError: it is unknown, for example because this process can open no file.
    """
    try:
        fields = identity.read_stat_fields(process.pid)
    except ProcessLookupError:
        return False
    same = process.identity == ProcessIdentity(process.pid, int(fields[19]), read_boot_id())
    return same and fields[0] not in {"Z", "X"}


def parse_serve_arguments(arguments: Sequence[str]) -> Sequence[str] | None:
    """What a vLLM server was given on its command line, None for any other process."""
    python = bool(arguments) and Path(arguments[0]).name.startswith("python")
    for index, word in enumerate(arguments[:6]):
        rest = arguments[index + 1 :]
        module = index and python and arguments[index - 1] == "-m"
        if module and API_SERVER.fullmatch(word):
            return rest
        script = index == 0 or (python and all(w.startswith("-") for w in arguments[1:index]))
        if (module and COMMAND_LINE.fullmatch(word)) or (script and Path(word).name == "vllm"):
            return rest[1:] if rest and rest[0] == "serve" else None
        if word == "-c":
            return None
    return None


def build_process_tree(table: Table, roots: Iterable[int]) -> tuple[Process, ...]:
    """The processes below some roots, the roots first, each with its role; no zombies."""
    children: dict[int, list[ProcessEntry]] = {}
    for seen in table.values():
        children.setdefault(seen.ppid, []).append(seen)
    by_pid: dict[int, ProcessEntry] = {}
    queue = [table[pid] for pid in roots if pid in table]
    while queue:
        seen = queue.pop(0)
        if seen.pid not in by_pid and not seen.zombie:
            by_pid[seen.pid] = seen
            queue += sorted(children.get(seen.pid, []), key=lambda child: child.start_ticks)
    many_api_servers = any(find_title_role(seen.arguments) is Role.API for seen in by_pid.values())
    return tuple(
        Process(
            role=infer_role(seen, by_pid.get(seen.ppid), many_api_servers=many_api_servers),
            pid=seen.pid,
            start_ticks=seen.start_ticks,
            title=" ".join(seen.arguments).rstrip(),
            rss_bytes=seen.rss_bytes,
            place=parse_title(seen.arguments[0])
            if find_title_role(seen.arguments)
            else Placement(),
        )
        for seen in by_pid.values()
    )


def retain_vital_processes(
    known_processes: Iterable[Process], current_processes: Sequence[Process]
) -> tuple[Process, ...]:
    """What was seen, with whatever is vital of what was known: until its death is noticed.

    A process that is being killed loses its command line, and so its role, before it is a zombie.
    """
    vital = {process.pid: process for process in known_processes if process.role in VITAL}
    now = [
        vital.get(process.pid, process) if process.role is Role.OTHER else process
        for process in current_processes
    ]
    pids = {process.pid for process in current_processes}
    return (*now, *(process for pid, process in vital.items() if pid not in pids))


def infer_role(
    process: ProcessEntry, parent: ProcessEntry | None, *, many_api_servers: bool
) -> Role:
    """What a process does, by its title or its command line.

    A fork looks like its parent until it executes something: it does not count as
    a process of the server.
    """
    if parent is not None and process.arguments == parent.arguments:
        return Role.OTHER
    if by_title := find_title_role(process.arguments):
        return by_title
    if (arguments := parse_serve_arguments(process.arguments)) is not None:
        return (
            Role.LAUNCHER
            if many_api_servers or parse_serving_mode(arguments).headless
            else Role.API
        )
    return Role.OTHER


def is_orphaned(pid: int) -> bool:
    """Whether the parent of a process with a title of vLLM's is gone, and a reaper has it now.

    vLLM's processes stay in their parent's session. The parent may have a title of its own, so its
    executable counts, too, where that can be read; and it may be a program that embeds Python.
    """
    above = proc.read_parent_pid(pid)
    paths = proc.read_command_line(above)[:1]
    with suppress(OSError):
        paths.append(proc.read_executable(above))
    names = [Path(path).name for path in paths]
    if any(name.startswith(("python", "raylet")) for name in names):
        return False
    try:
        first = proc.read_namespace_pid(above) == 1
        apart = identity.read_stat_fields(above)[SESSION] != identity.read_stat_fields(pid)[SESSION]
    except OSError:
        return True
    return first or apart or any(name.startswith(REAPERS) for name in names)


def try_resolve_path(pid: int, path: str) -> str:
    """A path of a process as seen from here; as it is where the process can't be looked into."""
    try:
        return str(proc.resolve_path(pid, path))
    except OSError:
        return path


def has_unix_socket(pid: int, path: str) -> bool:
    """Whether a process has a Unix socket of that path, False if it can't be looked into."""
    try:
        own = {str(s.laddr) for s in psutil.Process(pid).net_connections("unix") if s.laddr}
    except psutil.Error:
        return False
    return os.path.realpath(path) in {
        os.path.realpath(try_resolve_path(pid, address)) for address in own
    }


def list_listening_addresses(pid: int) -> list[tuple[str, int]]:
    """Where a process listens for TCP: address and port; nothing if it can't be looked into."""
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []
    return [(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN]


def find_listener_pids(port: int) -> set[int | None]:
    """Who listens on a TCP port: pids, and None for one that can't be looked into."""
    try:
        sockets = psutil.net_connections("tcp")
    except psutil.Error:
        return {None}
    return {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr[1:] == (port,)}


def list_listening_ports(pid: int) -> list[int]:
    """The TCP ports that a process listens on, none if it can't be looked into."""
    return sorted(port for _, port in list_listening_addresses(pid))


def format_process_name(process: Process) -> str:
    """How messages name a process."""
    return f"{format_role_and_ranks(process.role, process.place)} {process.pid}"
