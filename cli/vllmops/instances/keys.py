"""Asks the servers of this machine which keys they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import VllmopsError
from ..host import proc
from ..host.processes import Process
from ..host.roles import Role
from ..keys import file
from ..keys.file import PLACE
from ..keys.ring import CARRIER_TTL_S
from ..protocol.caches import Silent
from ..protocol.keys import ProcessKeys
from ..protocol.place import who
from ..rpc import agent
from ..store.settings import carriers
from .servers import Server, find

FEATURE = "keys"
# Processes without keys, or of others: no agent, one older than keys, another user.
KEYLESS = frozenset({"agent.absent", "agent.gone", "agent.stale", "agent.other-user"})


@dataclass(frozen=True)
class Holding:
    """What one process holds.

    Args:
        server: how messages name its server.
        keys: its own word.
        inside: where its ring is as seen from here, if it sees other files than we do, as in a
            container; else None.
    """

    server: str
    keys: ProcessKeys
    inside: Path | None = None

    @property
    def who(self) -> str:
        return f"{self.server} {who(self.keys)}"

    def follows(self, path: Path, primary: str) -> bool:
        """Whether it follows a ring.

        Args:
            path: of the ring.
            primary: the fingerprint of its primary key; empty without one.
        """
        if self.keys.keyring is None:
            return False
        if self.inside is None:
            return same(Path(self.keys.keyring), path)
        with suppress(OSError):
            if os.path.samefile(self.inside, path):
                return True
        # A file that is mounted alone stays the old one where ours is replaced.
        return primary in {key.fingerprint for key in self.keys.keys}


@dataclass(frozen=True)
class Holdings:
    """What the processes that serve HTTP hold, and those that did not answer.

    Args:
        reported: what those that have keys reported.
        silent: those that may hold some, and did not answer, each with its server's name.
    """

    reported: list[Holding]
    silent: list[tuple[str, Silent]]

    def of(self, path: Path) -> Holdings:
        """Those that follow one ring, and those that may."""
        mark = ""
        with suppress(VllmopsError):
            if primary := file.load(path).primary:
                mark = primary.fingerprint
        reported = [holding for holding in self.reported if holding.follows(path, mark)]
        return Holdings(reported, self.silent)


def ask(
    servers: Sequence[Server] | None = None, *, ring: Path | None = None, reload: bool = False
) -> Holdings:
    """Ask servers.

    Args:
        servers: None for every server of this machine.
        ring: leave those out, of the silent ones, that were started with another ring.
        reload: whether they are to read their file first.
    """
    asked: dict[Process, Server] = {
        process: server
        for server in (find() if servers is None else servers)
        for process in server.of(Role.API)
    }

    def ask_process(process: Process) -> Holding | None:
        reached = agent.reach(process)
        if FEATURE not in reached.hello().features:
            return None
        keys, inside = reached.keys(reload=reload), None
        with suppress(OSError):
            if keys.keyring and proc.elsewhere(process.pid):
                inside = proc.seen(process.pid, keys.keyring)
        return Holding(asked[process].label, keys, inside)

    answers, silent = agent.side_by_side(asked, ask_process)
    by_pid = {process.pid: server for process, server in asked.items()}
    return Holdings(
        [holding for holding in answers if holding and holding.keys.source != "none"],
        [
            (by_pid[process.pid].label, process)
            for process in silent
            if process.code not in KEYLESS
            and may_follow(by_pid[process.pid], ring)
            and may_read(process.pid, ring)
        ],
    )


def carriers_live(ring: Path) -> tuple[float, str]:
    """For how long servers accept carriers that they seal with a ring.

    Servers that don't run count, too: clients still hold their carriers.

    Args:
        ring: its file.

    Returns:
        Seconds, the default at least, and the instance that wants so many; empty for the default.
    """
    longest, whose = float(CARRIER_TTL_S), ""
    for server in find():
        # A time that is none has kept its server from starting.
        with suppress(VllmopsError):
            if server.record and may_follow(server, ring):
                seconds = carriers(server.record.environment).ttl_s
                if seconds > longest:
                    longest, whose = seconds, server.label
    return longest, whose


def may_follow(server: Server, path: Path | None) -> bool:
    """Whether a server may follow a ring, as far as is known from its start."""
    started = server.record.environment.get(PLACE) if server.record else None
    return started is None or path is None or same(Path(started), path)


def may_read(pid: int, path: Path | None) -> bool:
    """Whether a process has the rights to read a ring, as far as is known.

    A program of another user that looks like a server and never answers must not hold up anybody.
    """
    try:
        at, uid = os.stat(path or ""), proc.effective_uid(pid)
    except OSError:
        return True
    return uid in {0, at.st_uid} or bool(at.st_mode & 0o044)


def same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
