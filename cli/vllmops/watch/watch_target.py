"""The server that is watched, over restarts: cheap checks first, then a close examination."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from ..actions import cache_repair, healing
from ..actions.healing import HealResult
from ..bundle import bundle_file, parts
from ..bundle.parts import STACKS, BundleCollector
from ..collect.agents import membership
from ..collect.machine import processes
from ..collect.machine.processes import VITAL
from ..model.server_snapshot import ServerSample, ServerSnapshot
from ..observe import server_snapshot
from ..rules.progress import DEAD, has_fatal_stall
from ..servers import supervisor_client
from ..servers.discovery import Server, list_servers
from ..servers.record import InstanceFolder, InstanceRecord, InstanceState
from ..servers.supervisor_client import ControlRequest
from ..support.errors import VllmopsError
from ..support.home import create_missing_folders

FIND_S = 10.0  # the process table takes long to read
RESTART_S = 30.0  # until its supervisor begins
CAPTURE_S = 12.0  # for evidence; it is judged and written in two more, on a busy machine in five
# vLLM's collect_env runs before there is a stall. One that begins sooner does not wait for it
# longer than this: somebody must be informed, and may restart.
COLLECT_ENV_S, PREPARED_S = 6.0, 60.0


class ServerPhase(StrEnum):
    """The phase of a server."""

    UP = "up"
    AWAY = "away"  # it stops, or starts
    OVER = "over"


class WatchedServer:
    """A server, started by vllmops or not.

    Args:
        server: as discovery found it.
        follow: whether to watch its successor, too: the next start of an instance, or
            the next server at the same address.
        rerun: whether a restart runs background responses again that it ends.
    """

    def __init__(self, server: Server, *, follow: bool = True, rerun: bool = False) -> None:
        self.server = server
        self.follow = follow
        self.rerun = rerun
        self.began = time.monotonic()
        self.folder = InstanceFolder(server.name) if server.name else None
        self.created_at = server.record.created_at if server.record else 0.0
        self.read_at = 0
        self.found_at = 0.0
        self.dead = not server.processes
        self.is_complete = False
        self.collecting: BundleCollector | None = None
        self.environment: parts.ThreadTask | None = None

    # -- where it is -------------------------------------------------------------------------

    def read_phase(self) -> ServerPhase:
        """Its phase, as far as a file or the last check shows."""
        return self.read_recorded_phase(self.folder) if self.folder else self.find_foreign_phase()

    def read_recorded_phase(self, folder: InstanceFolder) -> ServerPhase:
        try:
            at = folder.record_file.stat().st_mtime_ns
            if at != self.read_at and (record := folder.load_record()):
                self.apply_record(record)
                self.read_at = at
        except (OSError, VllmopsError):
            return ServerPhase.OVER if not folder.record_file.exists() else ServerPhase.AWAY
        record = self.server.record
        if record is None or record.state.is_over:
            return ServerPhase.OVER
        if record.created_at != self.created_at and not self.follow:
            return ServerPhase.OVER  # it was started anew, by somebody who may watch it, too
        if self.dead and self.is_scan_due() and not folder.is_supervised():
            # Nobody records its end; a supervisor that takes over does.
            with suppress(VllmopsError):
                if connection := supervisor_client.restart_dead_supervisor(folder):
                    connection.close()
        return ServerPhase.UP if record.state is InstanceState.READY else ServerPhase.AWAY

    def apply_record(self, record: InstanceRecord) -> None:
        self.server = dataclasses.replace(
            self.server,
            record=record,
            processes=record.processes,
            host=record.host,
            port=record.port,
            uds=record.uds,
            headless=record.headless,
            model=record.model,
            scheme=record.scheme,
        )
        self.dead = False

    def find_foreign_phase(self) -> ServerPhase:
        if not self.dead:
            return ServerPhase.UP
        if self.follow and self.is_scan_due():
            with suppress(VllmopsError):
                if found := self.find_successor():
                    self.server, self.dead, self.is_complete = found, False, False
                    return ServerPhase.UP
        return ServerPhase.OVER

    def find_successor(self) -> Server | None:
        """The foreign server at the same address now, None without one; raises VllmopsError."""
        if fleet := self.server.fleet:
            return dataclasses.replace(self.server, processes=fleet.list_processes())
        same = [s for s in list_servers() if s.url == self.server.url and s.processes]
        return same[0] if same and same[0].url and not same[0].record else None

    def is_scan_due(self) -> bool:
        """Whether the process table may be read again."""
        now = time.monotonic()
        if now - self.found_at < FIND_S:
            return False
        self.found_at = now
        return True

    @property
    def is_final(self) -> bool:
        """Whether nothing comes after its end."""
        return not self.follow

    @property
    def down_reason(self) -> str:
        """Why it has ended or is absent, as the supervisor recorded."""
        record = self.server.record
        if record is None:
            return "its processes are gone"
        if record.failure:
            return f"it failed: {record.failure.cause}"
        return record.note or str(record.state)

    @property
    def note(self) -> str:
        """Which of its nodes do not answer, while it serves."""
        record = self.server.record
        serves = record is None or record.state is InstanceState.READY
        return self.server.describe_silent_nodes() if serves else ""

    @property
    def has_failed(self) -> bool:
        """Whether it ended unexpectedly."""
        record = self.server.record
        return record is not None and record.state is InstanceState.FAILED

    # -- looking -----------------------------------------------------------------------------

    def take_sample(self, *, ask: bool) -> ServerSample:
        """The state at one moment.

        Args:
            ask: whether to ask the server itself, and to look for compilers; the rest costs next
                to nothing.
        """
        server = self.server
        if ask:
            look = server_snapshot.observe_server(server, self.began)
        else:
            seen = server_snapshot.observe_processes(server)
            look = ServerSample(
                at_s=time.monotonic() - self.began,
                heartbeats=seen.heartbeats,
                processes=seen.states,
            )
        vital = [process for process in look.processes if process.role in VITAL]
        self.dead = all(process.state in DEAD for process in vital)
        if not (self.folder or self.is_complete or self.dead):
            self.add_new_processes(look)
        return look

    def add_new_processes(self, sample: ServerSample) -> None:
        """Add the processes that a foreign server has started since; the last time once ready."""
        up = sample.health == 200 or any(
            pulse.heartbeat.loop_s is not None for pulse in sample.heartbeats
        )
        if not self.is_scan_due():
            return
        if fleet := self.server.fleet:
            with suppress(VllmopsError):
                self.server = dataclasses.replace(self.server, processes=fleet.list_processes())
                self.is_complete = up
            return
        table = processes.read_process_table()
        tree = processes.build_process_tree(table, [p.pid for p in self.server.processes])
        tree = membership.complete_tree(table, tree)
        known = {process.pid for process in self.server.processes}
        new = tuple(process for process in tree if process.pid not in known)
        self.server = dataclasses.replace(self.server, processes=self.server.processes + new)
        self.is_complete = up

    # -- doing -------------------------------------------------------------------------------

    def prepare_evidence(self) -> None:
        """Begin with what a bundle has that takes long and hardly changes."""
        server = self.server
        if not server.fleet:
            self.environment = parts.ThreadTask(lambda: parts.run_collect_env(server, PREPARED_S))

    def take_snapshot(
        self,
        samples: Sequence[ServerSample],
        patience_s: float,
        stop: threading.Event,
        *,
        needs_all_evidence: bool,
    ) -> ServerSnapshot:
        """A snapshot of it, whatever hangs; `save_evidence` takes the other evidence.

        Args:
            samples: that were taken before the snapshot.
            patience_s: how long a server may make no progress.
            stop: ends all waiting once it is set.
            needs_all_evidence: whether all evidence will be needed, and may be captured at the same
                time.
        """
        if self.collecting:
            self.collecting.stop_interpreters()
        options = parts.make_examination_options(
            parts.compute_snapshot_s(CAPTURE_S),
            patience_s,
            samples=1 if has_fatal_stall(samples) else STACKS,
        )
        looking = server_snapshot.Examination(
            self.server, options, parts.ignore_progress, samples, self.began
        )
        self.collecting = parts.BundleCollector(
            looking, CAPTURE_S, COLLECT_ENV_S, parts.ignore_progress, stop, self.environment
        )
        return self.collecting.take_snapshot(snapshot_only=not needs_all_evidence)

    def save_evidence(self, folder: Path) -> Path:
        """Write what was captured into a folder, which is made where it is missing.

        Raises:
            VllmopsError: ``bundle.not-written``.
        """
        assert self.collecting
        path = folder / bundle_file.make_bundle_name(self.server.label, self.collecting.made_at)
        try:
            create_missing_folders(folder)
        except OSError as error:
            self.collecting.stop_interpreters()
            raise bundle_file.make_not_written_error(path, error) from error
        return bundle_file.write_bundle(self.collecting.collect_contents(), path)[0]

    def repair_caches(self) -> cache_repair.RepairReport:
        """Repair its caches; raises as `cache_repair.repair_caches` does."""
        return cache_repair.repair_caches(self.server)

    def heal_server(self, *, only_without_stall: bool = False) -> HealResult:
        """Heal what is proven; nothing that somebody may have wanted.

        Args:
            only_without_stall: only what no stall shows, since other requests go on.

        Raises:
            VllmopsError: as `heal.heal_server`.
        """
        actions = [action for action in healing.ACTIONS if action.unseen or not only_without_stall]
        return healing.heal_server(self.server, actions, initiator="vllmops watch --heal")

    def restart(self) -> None:
        """Have its supervisor take it down at once and start it again.

        Raises:
            VllmopsError: ``restart.stranger``, ``supervisor.unreachable`` or ``supervisor.silent``.
        """
        if self.folder is None:
            raise make_foreign_error(self.server)
        supervisor_client.send_and_wait_until_begun(
            self.folder, ControlRequest(restart=0.0, rerun=self.rerun), RESTART_S
        )


def make_foreign_error(server: Server) -> VllmopsError:
    return VllmopsError(
        "restart.stranger",
        f"vllmops did not start {server.label}, so it does not know the command to start it",
        "vllmops watch without --restart; --exec runs your own command",
    )
