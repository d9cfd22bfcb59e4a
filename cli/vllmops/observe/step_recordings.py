"""Finds the recordings of a server's engines: of one that runs, that crashed, or was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ..collect.agents import agent_client, agent_files
from ..collect.machine.processes import Process, is_alive
from ..model import step_recording
from ..model.agent_socket import DIRECTORY
from ..model.ranks import format_process
from ..model.roles import ROLES, Role
from ..model.server_snapshot import Gap
from ..model.step_recording import StepsHead, StepsRecording
from ..servers.discovery import Server, list_servers, resolve_server
from ..servers.record import InstanceRecord
from ..support.errors import VllmopsError
from ..support.files import read_private_file
from ..support.home import resolve_home

AWAY = Gap(
    "steps of engines that have ended",
    "remote",
    "the server is on another machine",
    "run vllmops doctor --history there",
)


class StepsHistory(NamedTuple):
    """The recordings of a server.

    Args:
        server: its name, or a pid.
        recordings: by data parallel rank.
        gaps: what could not be read.
    """

    server: str
    recordings: tuple[StepsRecording, ...]
    gaps: tuple[Gap, ...] = ()


def load_history(target: str | None) -> StepsHistory:
    """The recordings of a server that runs or has ended.

    Args:
        target: as `resolve_server` takes it; also the pid of a process that has ended.

    Raises:
        VllmopsError: as `resolve_server` does, or ``steps.none``.
    """
    try:
        history = collect_history(resolve_server(target))
    except VllmopsError as error:
        wanted = target or os.environ.get("VLLMOPS_TARGET") or ""
        if error.code == "target.over":
            history = collect_history(
                next(server for server in list_servers() if server.name == wanted)
            )
        elif error.code == "target.unknown" and (dead := find_recordings_by_pid(wanted)):
            history = StepsHistory(wanted, dead)
        else:
            raise
    if not history.recordings:
        why = "".join(f"; {part.part}: {part.reason}" for part in history.gaps)
        raise VllmopsError(
            "steps.none",
            f"there is no recording of the steps of {history.server}{why}",
            "vllmops help flight-recorder",
        )
    return history


def collect_history(server: Server) -> StepsHistory:
    """The recordings of a server's engines, those included that have ended."""
    if server.fleet:
        answers, silent = agent_client.collect_answers(
            server.select_processes(Role.ENGINE),
            lambda process: agent_client.open_agent(process).fetch_recording(),
        )
        missed = (
            Gap(f"steps of {format_process(one)}", one.code, one.reason, one.hint) for one in silent
        )
        # Nobody there reads the files of dead processes for an operator on another machine.
        return StepsHistory(server.label, sort_recordings(answers), (*missed, AWAY))
    recordings: list[StepsRecording] = []
    folders: dict[Path, int | None] = {resolve_home() / DIRECTORY: None}
    ids: set[str] = set()
    for process in server.select_processes(*ROLES):
        with suppress(VllmopsError, OSError):
            if pulse := agent_files.read_heartbeat(process):
                ids |= {*pulse.heartbeat.standing.servers}
            folders[agent_files.find_socket_path(process).parents[1]] = (
                agent_files.read_process_uid(process)
            )
            recordings.append(read_live_recording(process))
    known = {recording.head.identity for recording in recordings if recording.head}

    def belongs_to_server(head: StepsHead) -> bool:
        mine = server.record is not None and is_from_last_run(server.record, head)
        return head.identity not in known and (mine or not ids.isdisjoint(head.standing.servers))

    for folder, uid in folders.items():
        for recording in read_ended_recordings(folder, uid, belongs_to_server):
            assert recording.head
            known.add(recording.head.identity)
            recordings.append(recording)
    return StepsHistory(server.label, sort_recordings(recordings))


def read_live_recording(process: Process) -> StepsRecording:
    """The recording of a live process, without a head if there is none.

    Raises:
        VllmopsError: ``agent.gone``.
        OSError: it can't be read.
    """
    known = agent_files.read_namespace_identity(process)
    path = agent_files.find_socket_path(process).parents[1] / step_recording.make_recording_name(
        known
    )
    recording = step_recording.parse_recording(
        read_recording_file(path, agent_files.read_process_uid(process)), process.pid, process.role
    )
    same = recording.head is None or recording.head.identity == known
    return replace(
        recording, head=recording.head if same else None, **agent_client.get_process_fields(process)
    )


def read_recording_file(path: Path, uid: int | None) -> bytes:
    return read_private_file(path, uid, step_recording.FILE_BYTES)


def sort_recordings(recordings: Iterable[StepsRecording]) -> tuple[StepsRecording, ...]:
    """Those that are some, by rank."""
    recorded = (recording for recording in recordings if recording.head)
    return tuple(sorted(recorded, key=lambda one: (one.dp_rank or 0, one.read_at, one.pid)))


def find_recordings_by_pid(target: str) -> tuple[StepsRecording, ...]:
    """The recordings of the server that had this pid in one of its processes."""
    if not target.isdecimal():
        return ()
    return sort_recordings(
        read_ended_recordings(
            resolve_home() / DIRECTORY, None, lambda head: int(target) in head.related_pids
        )
    )


def is_from_last_run(record: InstanceRecord, head: StepsHead) -> bool:
    """Whether a recording is of the last run of an instance."""
    began = record.started_at or record.created_at
    return head.session == record.session and head.started_at >= began


def read_ended_recordings(
    folder: Path, uid: int | None, should_read: Callable[[StepsHead], bool]
) -> Iterator[StepsRecording]:
    """The wanted recordings of ended processes in a directory; only files of `uid` are read."""
    for path in folder.glob(f"*{step_recording.SUFFIX}"):
        with suppress(OSError):
            content = read_recording_file(path, uid)
            head = step_recording.parse_head(content)
            if head is None or path.name != step_recording.make_recording_name(head.identity):
                continue
            if should_read(head) and not is_process_alive(head):
                yield step_recording.parse_recording(content, head.pid, Role.ENGINE, alive=False)


def is_process_alive(head: StepsHead) -> bool:
    """Whether the process still runs."""
    try:
        return is_alive(Process(Role.ENGINE, head.pid, head.start_ticks, boot=head.boot))
    except OSError:
        return False
