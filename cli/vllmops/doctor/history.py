"""Finds the recordings of a server's engines: of one that runs, that crashed, or was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ..errors import VllmopsError
from ..files import read_private
from ..home import home
from ..host.processes import ROLES, Process, alive
from ..host.roles import Role
from ..instances.record import Record
from ..instances.servers import Server, find, resolve
from ..protocol import steps
from ..protocol.place import who
from ..protocol.server import Unseen
from ..protocol.socket import DIRECTORY
from ..protocol.steps import StepsHead, StepsRecording
from ..rpc import agent

AWAY = Unseen(
    "steps of engines that have ended",
    "remote",
    "the server is on another machine",
    "run vllmops doctor --history there",
)


class History(NamedTuple):
    """The recordings of a server.

    Args:
        server: its name, or a pid.
        recordings: by data parallel rank.
        unseen: what could not be read.
    """

    server: str
    recordings: tuple[StepsRecording, ...]
    unseen: tuple[Unseen, ...] = ()


def take(target: str | None) -> History:
    """The recordings of a server that runs or has ended.

    Args:
        target: as `resolve` takes it; also the pid of a process that has ended.

    Raises:
        VllmopsError: as `resolve` does, or ``steps.none``.
    """
    try:
        history = of(resolve(target))
    except VllmopsError as error:
        wanted = target or os.environ.get("VLLMOPS_TARGET") or ""
        if error.code == "target.over":
            history = of(next(server for server in find() if server.name == wanted))
        elif error.code == "target.unknown" and (dead := by_pid(wanted)):
            history = History(wanted, dead)
        else:
            raise
    if not history.recordings:
        why = "".join(f"; {part.part}: {part.why}" for part in history.unseen)
        raise VllmopsError(
            "steps.none",
            f"there is no recording of the steps of {history.server}{why}",
            "vllmops help flight-recorder",
        )
    return history


def of(server: Server) -> History:
    """The recordings of a server's engines, those included that have ended."""
    if server.fleet:
        answers, silent = agent.side_by_side(
            server.of(Role.ENGINE), lambda process: agent.reach(process).steps()
        )
        missed = (Unseen(f"steps of {who(one)}", one.code, one.why, one.hint) for one in silent)
        # Nobody there reads the files of dead processes for an operator on another machine.
        return History(server.label, ordered(answers), (*missed, AWAY))
    recordings: list[StepsRecording] = []
    folders: dict[Path, int | None] = {home() / DIRECTORY: None}
    ids: set[str] = set()
    for process in server.of(*ROLES):
        with suppress(VllmopsError, OSError):
            if pulse := agent.beat(process):
                ids |= {*pulse.beat.standing.servers}
            folders[agent.socket_path(process).parents[1]] = agent.owner(process)
            recordings.append(own(process))
    known = {recording.head.identity for recording in recordings if recording.head}

    def belongs(head: StepsHead) -> bool:
        mine = server.record is not None and of_run(server.record, head)
        return head.identity not in known and (mine or not ids.isdisjoint(head.standing.servers))

    for folder, uid in folders.items():
        for recording in dead(folder, uid, belongs):
            assert recording.head
            known.add(recording.head.identity)
            recordings.append(recording)
    return History(server.label, ordered(recordings))


def own(process: Process) -> StepsRecording:
    """The recording of a live process, without a head if there is none.

    Raises:
        VllmopsError: ``agent.gone``.
        OSError: it can't be read.
    """
    known = agent.own_identity(process)
    path = agent.socket_path(process).parents[1] / steps.file_name(known)
    recording = steps.recording(read(path, agent.owner(process)), process.pid, process.role)
    same = recording.head is None or recording.head.identity == known
    return replace(recording, head=recording.head if same else None, **agent.shown(process))


def read(path: Path, uid: int | None) -> bytes:
    return read_private(path, uid, steps.FILE_BYTES)


def ordered(recordings: Iterable[StepsRecording]) -> tuple[StepsRecording, ...]:
    """Those that are some, by rank."""
    recorded = (recording for recording in recordings if recording.head)
    return tuple(sorted(recorded, key=lambda one: (one.dp_rank or 0, one.read_at, one.pid)))


def by_pid(target: str) -> tuple[StepsRecording, ...]:
    """The recordings of the server that had this pid in one of its processes."""
    if not target.isdecimal():
        return ()
    return ordered(dead(home() / DIRECTORY, None, lambda head: int(target) in head.family))


def of_run(record: Record, head: StepsHead) -> bool:
    """Whether a recording is of the last run of an instance."""
    began = record.started_at or record.created_at
    return head.session == record.session and head.started_at >= began


def dead(
    folder: Path, uid: int | None, wanted: Callable[[StepsHead], bool]
) -> Iterator[StepsRecording]:
    """The wanted recordings of ended processes in a directory; only files of `uid` are read."""
    for path in folder.glob(f"*{steps.SUFFIX}"):
        with suppress(OSError):
            content = read(path, uid)
            head = steps.head(content)
            if head is None or path.name != steps.file_name(head.identity):
                continue
            if wanted(head) and not lives(head):
                yield steps.recording(content, head.pid, Role.ENGINE, alive=False)


def lives(head: StepsHead) -> bool:
    """Whether the process still runs."""
    try:
        return alive(Process(Role.ENGINE, head.pid, head.start_ticks, boot=head.boot))
    except OSError:
        return False
