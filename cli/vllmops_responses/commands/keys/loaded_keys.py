"""Asks the servers of this machine which keys they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllmops.collect.agents import agent_client
from vllmops.collect.machine import proc
from vllmops.collect.machine.processes import Process
from vllmops.model.caches import ProcessGap
from vllmops.model.environment import KEYRING
from vllmops.model.keys import ProcessKeys
from vllmops.model.ranks import format_process
from vllmops.model.roles import Role
from vllmops.servers.discovery import Server, list_servers
from vllmops.support.errors import VllmopsError

from ...keys import keyring_file
from ...keys.keyring import CARRIER_TTL_S
from ...store.settings import parse_carrier_settings

FEATURE = "keys"
# Processes without keys, or of others: no agent, one older than keys, another user.
KEYLESS = frozenset({"agent.absent", "agent.gone", "agent.stale", "agent.other-user"})


@dataclass(frozen=True)
class KeyringUser:
    """What one process holds.

    Args:
        server: how messages name its server.
        keys: its own word.
        visible_path: where its ring is as seen from here, if it sees other files than we do, as in
            a container; else None.
    """

    server: str
    keys: ProcessKeys
    visible_path: Path | None = None

    @property
    def display_name(self) -> str:
        return f"{self.server} {format_process(self.keys)}"

    def is_using_keyring(self, path: Path, primary: str) -> bool:
        """Whether it follows a ring.

        Args:
            path: of the ring.
            primary: the fingerprint of its primary key; empty without one.
        """
        if self.keys.keyring is None:
            return False
        if self.visible_path is None:
            return is_same_path(Path(self.keys.keyring), path)
        with suppress(OSError):
            if os.path.samefile(self.visible_path, path):
                return True
        # A file that is mounted alone stays the old one where ours is replaced.
        return primary in {key.fingerprint for key in self.keys.keys}


@dataclass(frozen=True)
class KeyringUsers:
    """What the processes that serve HTTP hold, and those that did not answer.

    Args:
        users: what those that have keys reported.
        gaps: those that may hold some, and did not answer, each with its server's name.
    """

    users: list[KeyringUser]
    gaps: list[tuple[str, ProcessGap]]

    def select_by_keyring(self, path: Path) -> KeyringUsers:
        """Those that follow one ring, and those that may."""
        mark = ""
        with suppress(VllmopsError):
            if primary := keyring_file.load_keyring(path).primary:
                mark = primary.fingerprint
        reported = [holding for holding in self.users if holding.is_using_keyring(path, mark)]
        return KeyringUsers(reported, self.gaps)


def collect_keyring_users(
    servers: Sequence[Server] | None = None,
    *,
    keyring_path: Path | None = None,
    reload: bool = False,
) -> KeyringUsers:
    """Ask servers.

    Args:
        servers: None for every server of this machine.
        keyring_path: leave those out, of the silent ones, that were started with another ring.
        reload: whether they are to read their file first.
    """
    asked: dict[Process, Server] = {
        process: server
        for server in (list_servers() if servers is None else servers)
        for process in server.select_processes(Role.API)
    }

    def fetch_keyring_user(process: Process) -> KeyringUser | None:
        reached = agent_client.open_agent(process)
        if FEATURE not in reached.fetch_hello().features:
            return None
        keys, inside = reached.fetch_keys(reload=reload), None
        with suppress(OSError):
            if keys.keyring and proc.has_separate_filesystem(process.pid):
                inside = proc.resolve_path(process.pid, keys.keyring)
        return KeyringUser(asked[process].label, keys, inside)

    answers, silent = agent_client.collect_answers(asked, fetch_keyring_user)
    by_pid = {process.pid: server for process, server in asked.items()}
    return KeyringUsers(
        [holding for holding in answers if holding and holding.keys.source != "none"],
        [
            (by_pid[process.pid].label, process)
            for process in silent
            if process.code not in KEYLESS
            and can_use_keyring(by_pid[process.pid], keyring_path)
            and can_read_keyring(process.pid, keyring_path)
        ],
    )


def find_longest_carrier_ttl(keyring_path: Path) -> tuple[float, str]:
    """For how long servers accept carriers that they seal with a ring.

    Servers that don't run count, too: clients still hold their carriers.

    Args:
        keyring_path: its file.

    Returns:
        Seconds, the default at least, and the instance that wants so many; empty for the default.
    """
    longest, whose = float(CARRIER_TTL_S), ""
    for server in list_servers():
        # A time that is none has kept its server from starting.
        with suppress(VllmopsError):
            if server.record and can_use_keyring(server, keyring_path):
                seconds = parse_carrier_settings(server.record.environment).ttl_s
                if seconds > longest:
                    longest, whose = seconds, server.label
    return longest, whose


def can_use_keyring(server: Server, path: Path | None) -> bool:
    """Whether a server may follow a ring, as far as is known from its start."""
    started = server.record.environment.get(KEYRING) if server.record else None
    return started is None or path is None or is_same_path(Path(started), path)


def can_read_keyring(pid: int, path: Path | None) -> bool:
    """Whether a process has the rights to read a ring, as far as is known.

    A program of another user that looks like a server and never answers must not hold up anybody.
    """
    try:
        at, uid = os.stat(path or ""), proc.read_effective_uid(pid)
    except OSError:
        return True
    return uid in {0, at.st_uid} or bool(at.st_mode & 0o044)


def is_same_path(path: Path, other_path: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other_path)
