"""Finds the socket of a process's agent, and reads the agent's last heartbeat from its file.

Both without asking the process, which may be stuck.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...model.agent_socket import get_socket_directory
from ...model.agent_state import BEAT_BYTES, SCHEMA, Heartbeat
from ...model.process_identity import ProcessIdentity
from ...model.snapshot_files import DAMAGE
from ...support.errors import VllmopsError
from ...support.files import read_private_file
from ...support.home import resolve_home
from ..machine import proc
from ..machine.processes import Process, format_process_name

# Beats come every second; this many seconds without one mean that Python no longer runs.
BEAT_LATE_S = 5.0
ANCESTORS = 4
BEATS = msgspec.json.Decoder(Heartbeat)


class ProxiedProcess(Process):
    """A process whose agent this machine can't ask over its Unix socket."""

    def send_request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Ask its agent one question; the status and the content of the answer.

        Args:
            method: of the request.
            path: of it.
            body: of it; None without one.
            timeout_s: seconds that it may take.

        Raises:
            VllmopsError: there is no answer of the agent.
        """
        raise NotImplementedError

    def fetch_heartbeat(self) -> TimedHeartbeat | None:
        """The last heartbeat of its agent; raises VllmopsError."""
        raise NotImplementedError


@dataclass(frozen=True)
class TimedHeartbeat:
    """A heartbeat as read from outside.

    Args:
        heartbeat: its content.
        age_s: seconds since it was written.
    """

    heartbeat: Heartbeat
    age_s: float

    @property
    def is_late(self) -> bool:
        """Whether the process seems to run no Python any more."""
        return self.age_s > BEAT_LATE_S


def read_heartbeat(process: Process) -> TimedHeartbeat | None:
    """The last heartbeat of a process, read from its file without asking the process.

    Returns:
        None if there is none that is readable, of this process, and of a known schema.
    """
    if isinstance(process, ProxiedProcess):
        return process.fetch_heartbeat()
    path, uid = find_socket_path(process).with_suffix(".beat"), read_process_uid(process)
    for _ in range(3):
        try:
            beat_ = BEATS.decode(read_private_file(path, uid, BEAT_BYTES))
        except OSError:
            return None
        except DAMAGE:
            time.sleep(0.005)  # caught in the middle of a write
            continue
        own = beat_.schema == SCHEMA and beat_.identity == read_namespace_identity(process)
        return TimedHeartbeat(beat_, max(time.monotonic() - beat_.monotonic, 0.0)) if own else None
    return None


def read_namespace_identity(process: Process) -> ProcessIdentity:
    """The identity of a process as it knows itself; raises ``agent.gone``."""
    try:
        return process.identity._replace(pid=proc.read_namespace_pid(process.pid))
    except OSError as error:
        raise make_gone_error(process) from error


def list_agent_pids(state_home: Path) -> set[int]:
    """The pids of the processes whose agents are, or were, in a state directory."""
    try:
        names = os.listdir(get_socket_directory(state_home))
    except OSError:
        return set()
    stems = (name.removesuffix(".beat") for name in names if name.endswith(".beat"))
    return {int(stem) for stem in stems if stem.isdecimal()}


def find_socket_path(process: Process) -> Path:
    """Where the process's agent listens, by the process's own environment, as seen from here."""
    path = (
        get_socket_directory(find_state_home(process))
        / f"{read_namespace_identity(process).pid}.sock"
    )
    try:
        return proc.resolve_path(process.pid, str(path))
    except OSError:
        return path


def find_state_home(process: Process) -> Path:
    """The state directory that the process's agent uses, by the process's own environment.

    Raises:
        VllmopsError: ``agent.gone``.
    """
    if process.home:
        return Path(process.home)
    uid, pid = read_process_uid(process), process.pid
    for _ in range(ANCESTORS):
        environment = proc.read_environment(pid)
        if environment.keys() & {"VLLMOPS_HOME", "HOME", "PATH"}:
            break
        # setproctitle writes over the environment that the kernel shows: ask the parent, whose
        # environment vLLM handed down.
        pid = proc.read_parent_pid(pid)
    else:
        return resolve_home()
    if chosen := environment.get("VLLMOPS_HOME"):
        # What may be read of a process need not include where it is.
        return Path(
            chosen
            if os.path.isabs(chosen)
            else os.path.join(proc.read_working_directory(pid), chosen)
        )
    state = environment.get("XDG_STATE_HOME")
    return (
        Path(state or Path(environment.get("HOME") or proc.find_user_home(uid)) / ".local/state")
        / "vllmops"
    )


def read_process_uid(process: Process) -> int:
    """The uid that the process runs as."""
    try:
        # The effective one, as the agent has it.
        return proc.read_effective_uid(process.pid)
    except OSError as error:
        raise make_gone_error(process) from error


def make_gone_error(process: Process) -> VllmopsError:
    return VllmopsError("agent.gone", f"{format_process_name(process)} is gone", "vllmops ps")
