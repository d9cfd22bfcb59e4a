"""Supervises one instance: starts it, watches all its processes, and takes it down completely.

One process per instance, in a session of its own. If it dies, the server keeps running, because
its output goes to a file and not through the supervisor. The next command starts another
supervisor, which takes over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psutil

from ..collect.agents import membership
from ..collect.machine import processes, server_address, shared_memory
from ..collect.machine.processes import VITAL, Process, is_alive
from ..model import process_identity
from ..model.environment import RERUN, RUN
from ..model.process_identity import read_boot_id
from ..model.ranks import format_role_and_ranks
from ..model.roles import Role
from ..model.socket_handover import LISTEN
from ..servers import logs, readiness
from ..servers.record import (
    FAILED,
    Failure,
    InstanceFolder,
    InstanceRecord,
    InstanceState,
    list_instance_folders,
)
from ..servers.supervisor_client import ControlRequest, send_and_wait_until_begun
from ..support.background import ErrorReporter, repeat_forever, run_and_report
from ..support.errors import VllmopsError
from ..support.files import read_peer_uid
from ..support.home import resolve_home
from . import claimed_ports, handover, shutdown, watch_process
from .node_status import PeerNodes

TICK_S = 0.25
SCAN_STARTING_S = 0.5
SCAN_READY_S = 5.0
PEERS_S = 1.0  # between two questions to other nodes
WATCH_S = 10.0  # between two starts of a watch
GOODBYE_S = 2.0
CLIENTS = 100  # each costs a file descriptor
UNREAD_BYTES = 2**20  # of a client that does not read
OTHERS_S = 5.0  # for another supervisor on this machine to begin what it is told
HOUSE_S = 1.0  # between two checks of the files it needs
RETRY_S = 1.0
HOLDER_GRACE_S = 10.0
LOGS_KEPT = 3
OWN_LOG_LIMIT_BYTES = 2**20
LAST_WORDS_S = 10.0
RECENT_LINES, RECENT_LETTERS = 4000, 4096  # a client may have its prompt logged
OWN = {RERUN, LISTEN}  # of one start
PR_SET_CHILD_SUBREAPER = 36


def write_log(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        print(text, file=sys.stderr, flush=True)


def read_log_limit() -> int:
    """Bytes that the server's log may have; of a wrong limit `serve_client` tells."""
    try:
        return logs.read_size_limit()
    except VllmopsError:
        return logs.LIMIT_BYTES


def is_trusted_client(writer: asyncio.StreamWriter) -> bool:
    """Whether the client belongs to this user or to root."""
    connection = writer.get_extra_info("socket")
    return read_peer_uid(connection) in {0, os.geteuid()}


@dataclass(frozen=True)
class TakedownPlan:
    """How the server is to be taken down."""

    drain_s: float = 0.0
    should_restart: bool = False
    rerun: bool = False


class Supervisor:
    """Holds one instance.

    Args:
        folder: the instance's.
        record: as it is there.
        lock: an open file that holds its lock.
        port: one that holds its port, None if another instance does.
    """

    def __init__(
        self, folder: InstanceFolder, record: InstanceRecord, lock: int, port: int | None
    ) -> None:
        self.lock = lock
        self.port = port
        self.folder = folder
        self.record = record
        self.clients: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self.holders: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server | None = None
        self.serving: set[asyncio.Task[Any]] = set()
        self.requests: asyncio.Queue[TakedownPlan] = asyncio.Queue()
        self.hand_overs: dict[str, float] = {}  # by run, how long to drain
        self.child: subprocess.Popen[bytes] | None = None
        self.rotations = (
            logs.LogRotation(folder.server_log, limit=read_log_limit(), keep=LOGS_KEPT),
            logs.LogRotation(folder.supervisor_log, limit=OWN_LOG_LIMIT_BYTES, keep=1),
        )
        self.tail = logs.LogTail(folder.server_log)
        self.recent_lines: deque[tuple[float, str]] = deque(maxlen=RECENT_LINES)
        self.scanned_at = 0.0
        self.watch_due = 0.0
        self.has_unsaved_record = False
        self.reporter = ErrorReporter(
            "the supervisor continues after an unexpected error", write_log
        )
        self.ready_pids: set[int] = set()
        self.raylets: dict[Process, str] = {}  # below which it has actors, with their nodes' names
        self.peers = PeerNodes()
        self.socket: int | None = None  # the inode of the control socket
        self.housekept = 0.0

    # -- clients -----------------------------------------------------------------------------

    async def open_control_socket(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.control_socket.unlink()
        try:
            self.server = await asyncio.start_unix_server(
                self.serve_client, self.folder.control_socket
            )
            self.folder.control_socket.chmod(0o600)
            self.socket = self.folder.control_socket.lstat().st_ino
        except OSError as error:  # a full disk: what was asked for at birth still works
            write_log(f"the control socket can't be created: {error}")

    async def serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not is_trusted_client(writer):
            writer.close()
            return
        task = asyncio.current_task()
        assert task
        if len(self.clients) >= CLIENTS:  # one that only listens connects again
            for listener in [client for client in self.clients if client not in self.holders][:1]:
                del self.clients[listener]
                listener.close()
        self.serving.add(task)
        self.clients[writer] = None
        try:
            self.send_record(writer)
            while await self.handle_request(reader, writer):
                pass
        except (OSError, ValueError):  # it has gone, or speaks another language
            pass
        except Exception as error:
            self.reporter.report(error)
        finally:
            self.clients.pop(writer, None)
            if writer in self.holders:
                self.holders.discard(writer)
                self.requests.put_nowait(TakedownPlan())
            writer.close()
            self.serving.discard(task)

    async def handle_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Take in one request; False where the client has gone."""
        line = await reader.readline()
        if not line:
            return False
        request = msgspec.json.decode(line, type=ControlRequest)
        if request.hold:
            self.holders.add(writer)
        if request.stop is not None:
            self.requests.put_nowait(TakedownPlan(request.stop))
        if request.restart is not None:
            self.requests.put_nowait(
                TakedownPlan(request.restart, should_restart=True, rerun=request.rerun)
            )
        if request.hand_over is not None and request.run != self.record.hand_over_run:
            self.hand_overs[request.run] = request.hand_over
        return True

    def send_record(self, writer: asyncio.StreamWriter) -> None:
        if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
            writer.transport.abort()
        if not writer.is_closing():
            writer.write(msgspec.json.encode(self.record) + b"\n")

    def update_record(self, **changes: Any) -> None:
        """Change the record, tell the clients, and save it; a full disk can't stop any of it."""
        changed = msgspec.structs.replace(self.record, **changes)
        if changed == self.record and not self.has_unsaved_record:
            return
        differs, self.record = changed != self.record, changed
        try:
            self.folder.save_record(self.record)
            self.has_unsaved_record = False
        except OSError as error:
            if not self.has_unsaved_record:
                write_log(f"the record is not saved, trying again: {error}")
            self.has_unsaved_record = True
        for writer in list(self.clients) if differs else ():
            self.send_record(writer)

    # -- life --------------------------------------------------------------------------------

    async def run(self, *, launch: bool, client: socket.socket) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        await self.open_control_socket()
        reader, writer = await asyncio.open_unix_connection(sock=client)
        # Whether it holds the instance; one that has gone meanwhile does not.
        with contextlib.suppress(OSError, ValueError):
            await self.handle_request(reader, writer)
        self.serving.add(asyncio.create_task(self.serve_client(reader, writer)))
        if not launch:
            while not await run_and_report(self.take_over, self.reporter):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(TICK_S)
        else:
            self.launch_server()
        # While a hand-over or a drain takes its time, too.
        beside = [
            asyncio.create_task(repeat_forever(self.check_nodes, self.reporter, PEERS_S)),
            asyncio.create_task(repeat_forever(self.rotate_logs, self.reporter, TICK_S)),
        ]
        while not self.record.state.is_over:
            # A server must not lose its supervisor because one check fails.
            if not await run_and_report(self.tick, self.reporter):
                await asyncio.sleep(RETRY_S)
        for task in beside:
            task.cancel()
        await self.release_instance()

    def launch_server(self) -> None:
        """Start the server; where that fails, it is over, and nothing runs."""
        self.child = None
        try:
            self.start_server()
        except Exception as error:
            if self.child:
                self.child.kill()  # it has no children yet
                self.child.wait()
            why = f"vLLM can't be started: {error}"
            if isinstance(error, OSError) and error.strerror:
                why = f"{error.filename or 'vLLM'}: {error.strerror}"
            self.reporter.report(error)
            self.record_end(InstanceState.FAILED, Failure(why))

    def start_server(self) -> None:
        """Start the server; raises OSError, or ValueError for a NUL in an argument, say."""
        self.recent_lines.clear()
        self.ready_pids.clear()
        self.raylets.clear()
        self.peers = PeerNodes()
        run, rerun = uuid4().hex, self.record.rerun
        if self.record.uds:
            server_address.remove_stale_socket(self.record.uds)
        logs.start_new_log(self.folder.server_log)
        self.tail = logs.LogTail(self.folder.server_log)
        self.child = self.spawn_server(
            self.folder.server_log, {RUN: run, **({RERUN: rerun} if rerun else {})}
        )
        self.update_record(
            state=InstanceState.STARTING,
            stage="launched",
            stage_at=time.time(),
            started_at=time.time(),
            ready_at=None,
            ready_s=None,
            ended_at=None,
            failure=None,
            exit_code=None,
            note="",
            run=run,
            rerun="",
            session=self.child.pid,
            processes=processes.build_process_tree(
                processes.read_process_table(), [self.child.pid]
            ),
        )

    def spawn_server(
        self, path: Path, extra_environment: Mapping[str, str], files: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Run the recorded command; raises OSError or ValueError.

        Args:
            path: of its log.
            extra_environment: to its environment.
            files: open ones that it gets.
        """
        # Of another server that this one was started from, say.
        inherited = {name: value for name, value in os.environ.items() if name not in OWN}
        with path.open("ab") as log:
            return subprocess.Popen(
                self.record.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.record.directory,
                env={**inherited, **self.record.environment, **extra_environment},
                start_new_session=True,
                pass_fds=files,
            )

    async def take_over(self) -> None:
        """Continue where a supervisor died; take the server down if its holder is gone."""
        record = self.record
        if record.hand_over_processes:
            if is_session_reused(record.hand_over_processes, record.beside_session):
                self.update_record(beside_session=None)
            await self.take_down_other_server()
        if record.hand_over and not record.hand_over.startswith(FAILED):
            taken = record.run == record.hand_over_run
            self.update_record(hand_over="" if taken else f"{FAILED}its supervisor died")
        for line in self.tail.read_new_lines():  # only for the processes that are up
            self.note_ready_process(line)
        left = [process for process in self.record.processes if is_alive(process)]
        write_log(f"taking over {self.record.name}: {len(left)} processes")
        if is_session_reused(record.processes, record.session):
            self.update_record(session=None)
        if self.record.state is InstanceState.STOPPING:
            await self.take_down()
            self.record_end(InstanceState.STOPPED)
        elif not left:
            await self.take_down()
            self.record_end(
                InstanceState.FAILED, Failure("the server died while it had no supervisor")
            )
        elif not await self.wait_for_holder():
            await self.take_down()
            self.record_end(InstanceState.FAILED, Failure("the foreground serve died"))

    async def wait_for_holder(self) -> bool:
        """Whether a client holds it; a foreground ``serve`` that lives connects again at once."""
        deadline = time.monotonic() + HOLDER_GRACE_S
        while not self.record.detached and not self.holders and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        return self.record.detached or bool(self.holders)

    async def tick(self) -> None:
        self.refresh_record()
        dead = [p for p in self.record.processes if p.role in VITAL and not is_alive(p)]
        nodes_died = not all(map(is_alive, self.raylets))
        if dead or nodes_died or (self.child and self.child.poll() is not None):
            await self.handle_process_death(dead)
            return
        if self.record.state is InstanceState.STARTING and await asyncio.to_thread(self.is_ready):
            now = time.time()
            self.scan_processes()
            took = min(self.record.processes, key=lambda process: process.start_ticks)
            self.update_record(
                state=InstanceState.READY,
                stage="ready",
                stage_at=now,
                ready_at=now,
                ready_s=process_identity.compute_age_s(took.start_ticks),
            )
        await self.restore_files()
        if self.has_unsaved_record:
            self.update_record()
        if self.record.state is InstanceState.READY or "--listen" in (self.record.watch or ()):
            self.ensure_watch()
        if self.hand_overs:
            run = next(iter(self.hand_overs))
            await self.run_hand_over(run, self.hand_overs.pop(run))
        with contextlib.suppress(TimeoutError):
            await self.stop_or_restart(await asyncio.wait_for(self.requests.get(), TICK_S))

    async def check_nodes(self) -> None:
        """Ask the other nodes, and say which of them have ceased to answer."""
        if self.record.state is InstanceState.READY:
            await self.peers.check_nodes(self.record.processes, self.record.port)
        # Beside another server the note is about that one.
        if self.record.state is InstanceState.READY and not self.record.hand_over_processes:
            self.update_record(
                note=", ".join(f"node {name} does not answer" for name in self.peers.lost_addresses)
            )

    async def restore_files(self) -> None:
        """Create again what was deleted: the folder, record, lock and control socket."""
        now = time.monotonic()
        if now - self.housekept < HOUSE_S:
            return
        self.housekept = now
        folder = self.folder
        try:
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if read_inode(folder.lock_path) != os.fstat(self.lock).st_ino:
                lock = folder.take_lock()
                if lock is None:
                    write_log("another supervisor has taken over")
                    raise SystemExit(0)
                os.close(self.lock)
                self.lock = lock
            self.has_unsaved_record |= not folder.record_file.exists()
            if self.socket is None or read_inode(folder.control_socket) != self.socket:
                if self.server:
                    self.server.close()
                await self.open_control_socket()
        except OSError as error:  # a full disk, no descriptor left: the next try may succeed
            write_log(f"{error.filename or folder.path}: {error.strerror}")

    async def rotate_logs(self) -> None:
        for rotation in self.rotations:
            if hindrance := rotation.rotate_if_due():
                write_log(hindrance)

    def ensure_watch(self) -> None:
        """Start a watch if the record asks for one and none runs."""
        now = time.monotonic()
        if self.record.watch is None or now < self.watch_due:
            return
        self.watch_due = now + WATCH_S
        self.reap_children()
        try:
            watch_process.start_watch(self.folder, self.record.directory)
        except OSError as error:
            write_log(f"the watch can't be started: {error}")

    def is_ready(self) -> bool:
        """Whether the server is ready."""
        record = self.record
        if record.headless:
            return readiness.are_engines_up(record.processes, self.ready_pids)
        return readiness.is_serving(record.processes, record.url, port=record.port, uds=record.uds)

    def refresh_record(self, *, ended: bool = False) -> None:
        """Bring the record up to date: processes, segments, stage.

        Args:
            ended: whether nothing more is written to the log.
        """
        starting = self.record.state is InstanceState.STARTING
        now = time.monotonic()
        if now - self.scanned_at >= (SCAN_STARTING_S if starting else SCAN_READY_S):
            self.scanned_at = now
            self.scan_processes()
        for line in self.tail.read_new_lines(ended=ended):
            self.recent_lines.append((now, line[:RECENT_LETTERS]))
            self.note_ready_process(line)
            stage = logs.parse_stage(line) if starting else None
            if stage and logs.STAGES.index(stage) > logs.STAGES.index(self.record.stage):
                self.update_record(stage=stage, stage_at=time.time())

    def note_ready_process(self, line: str) -> None:
        if self.record.state is InstanceState.STARTING and (up := readiness.parse_ready_pid(line)):
            self.ready_pids.add(up)

    def scan_processes(self) -> tuple[Process, ...]:
        """Take stock of the tree; a dead process stays listed until its death is handled."""
        known = self.record.processes
        table = processes.read_process_table()
        roots = [process.pid for process in known if is_alive(process)]
        roots += shutdown.find_session_members(table, self.record.session)
        seen = membership.complete_tree(
            table, processes.build_process_tree(table, dict.fromkeys(roots))
        )
        seen = tuple(dataclasses.replace(process, rss_bytes=None) for process in seen)
        self.raylets |= membership.find_raylets(table, seen)
        pids = {process.pid for process in seen}
        segments = set(self.record.segments).union(
            *(shared_memory.find_used_segments(pid) for pid in pids)
        )
        self.update_record(
            processes=processes.retain_vital_processes(known, seen),
            segments=tuple(sorted(segments)),
        )
        return seen

    # -- endings -----------------------------------------------------------------------------

    async def handle_process_death(self, dead_processes: Sequence[Process]) -> None:
        """A process has died unasked: nothing of the server may be left behind."""
        starting = self.record.state is InstanceState.STARTING
        since = 0.0 if starting else time.monotonic() - LAST_WORDS_S
        code = self.child.poll() if self.child else None  # before we signal it ourselves
        root = next((p for p in self.record.processes if p.pid == self.record.session), None)
        self.refresh_record()
        asked = any("API server: shutdown triggered" in line for _, line in self.recent_lines)
        self.update_record(state=InstanceState.STOPPING, note="a process has died")
        await self.take_down()
        self.refresh_record(ended=True)
        lines = [line for moment, line in self.recent_lines if moment >= since]
        try:
            failure = self.explain_failure(
                lines, dead_processes, root, code, stopped_by_signal=asked
            )
        except Exception as error:  # to end comes first
            self.reporter.report(error)
            failure = Failure("a process has died; why is not known")
        self.record_end(InstanceState.FAILED, failure)

    def explain_failure(
        self,
        lines: Sequence[str],
        dead_processes: Sequence[Process],
        root: Process | None,
        code: int | None,
        *,
        stopped_by_signal: bool,
    ) -> Failure:
        """The cause, by a node that is gone, the root's exit code, the log, the missing process."""
        for raylet, node in self.raylets.items():
            if not is_alive(raylet):
                why = f"node {node} is gone: its raylet (pid {raylet.pid}) died"
                return Failure(why, "Ray")
        lost = logs.find_lost_node(lines) if self.raylets else None
        if lost:
            return Failure(f"node {lost} is gone: Ray has lost it", "Ray")
        if self.peers.lost_addresses:
            return Failure(
                f"node {', '.join(self.peers.lost_addresses)} is gone: it does not answer any more"
            )
        if code is not None and code < 0:
            name = logs.get_signal_name(-code)
            victim = format_role_and_ranks(root.role, root.place) if root else Role.API
            return Failure(f"{victim} (pid {self.record.session}) was killed by {name}")
        if stopped_by_signal and not any("EngineDeadError" in line for line in lines):
            return Failure("vLLM was stopped by a signal that vllmops did not send", "APIServer")
        if failure := logs.find_failure(lines):
            return add_worker_ranks(failure, dead_processes)
        dead_processes = [p for p in dead_processes if code is None or p.pid != self.record.session]
        if dead_processes:
            names = ", ".join(
                f"{format_role_and_ranks(p.role, p.place)} (pid {p.pid})" for p in dead_processes
            )
            return Failure(f"{names} died without an error in the log: killed, or out of memory?")
        if echo := logs.find_failure(lines, echoes=True):
            return echo
        last = next(
            (logs.parse_line(line).text for line in reversed(lines) if line.strip()), "no output"
        )
        return Failure(f"vLLM exited with status {code}: {last}")

    async def stop_or_restart(self, ending: TakedownPlan) -> None:
        """Stop, or stop and start again; a further request in the meantime cuts the drain short."""
        was_ready = self.record.state is InstanceState.READY
        self.update_record(state=InstanceState.STOPPING, note="stopping")
        note = ""
        if was_ready:
            try:
                note = await self.drain_server(ending.drain_s, rerun=ending.rerun)
            except Exception as error:  # to stop comes first
                self.reporter.report(error)
                note = "not drained"
        self.update_record(note="stopping")
        await self.take_down(should_restart=ending.should_restart)
        if ending.should_restart and (self.holders or self.record.detached):
            self.update_record(rerun=self.record.run if ending.rerun else "")
            self.launch_server()
        else:
            self.record_end(InstanceState.STOPPED, note=note)

    async def drain_server(self, seconds: float, *, rerun: bool) -> str:
        loop = asyncio.get_running_loop()

        def update_note(note: str) -> None:
            loop.call_soon_threadsafe(lambda: self.update_record(note=note))

        return await asyncio.to_thread(
            shutdown.drain_server,
            self.record.processes,
            self.record.url,
            seconds,
            update_note,
            should_stop_waiting=lambda: not self.requests.empty(),
            rerun=rerun,
        )

    async def run_hand_over(self, run: str, drain_s: float) -> None:
        self.update_record(hand_over="looking for memory", hand_over_run=run)
        try:
            why = await self.hand_over(run, drain_s)
        except Exception as error:  # who asked for it waits for an answer
            self.reporter.report(error)
            why = self.reporter.last_error
        self.update_record(hand_over=why and f"{FAILED}{why}")

    async def hand_over(self, run: str, drain_s: float) -> str:
        """Have a second server take over; returns why it did not, and then the first serves on.

        Args:
            run: names the start of the second one.
            drain_s: how long the first one's requests have to finish.
        """
        first, next_log = self.record, self.folder.path / "next.log"
        if first.state is not InstanceState.READY or first.port is None or self.raylets:
            return "it is not ready, or has no TCP port of its own, or runs on several nodes"
        if why := await asyncio.to_thread(handover.explain_insufficient_memory, first.processes):
            return why
        if not await asyncio.to_thread(handover.is_accepting_connections, first.processes):
            return "not all of its API servers have the agent: vllmops attach loads it"
        try:
            listener = handover.copy_listening_socket(first.processes, first.port)
        except OSError as error:
            return f"its listening socket can't be shared: {error.strerror}"
        try:
            added = {RUN: run, LISTEN: f"{listener} {first.port} {first.host}"}
            next_log.unlink(missing_ok=True)
            second = self.spawn_server(next_log, added, (listener,))
        except (OSError, ValueError) as error:
            return f"the second server can't be started: {error}"
        finally:
            os.close(listener)
        started_at = time.time()
        started = process_identity.read_identity(second.pid).start_ticks
        self.update_record(
            hand_over="the second server starts",
            hand_over_processes=(Process(Role.OTHER, second.pid, started),),
            beside_session=second.pid,
        )
        try:
            while not await asyncio.to_thread(
                handover.is_accepting_connections, self.scan_both_servers()
            ):
                if why := self.explain_hand_over_failure(second, next_log):
                    return why
                await asyncio.sleep(TICK_S)
            # Before the first one takes no more connections: if this process dies now, one does.
            self.swap_servers(second, next_log, run, started_at)
            await run_and_report(lambda: self.drain_first_server(first, drain_s), self.reporter)
        finally:  # the one that is not, or not any more, the instance's
            while not await run_and_report(self.take_down_other_server, self.reporter):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(RETRY_S)
        return ""

    async def drain_first_server(self, first_record: InstanceRecord, drain_s: float) -> None:
        """Have the first server of a hand-over take no more connections, and finish its requests.

        Args:
            first_record: its record.
            drain_s: how long to wait for them at most.
        """
        loop = asyncio.get_running_loop()

        def update_progress(text: str) -> None:
            loop.call_soon_threadsafe(lambda: self.update_record(hand_over=text))

        note = await asyncio.to_thread(
            handover.drain_first_server,
            first_record.processes,
            drain_s,
            update_progress,
            lambda: not self.requests.empty(),
            {**os.environ, **first_record.environment},
        )
        self.update_record(note=note)

    def scan_both_servers(self) -> tuple[Process, ...]:
        """Take stock of the other server of a hand-over; and of this one."""
        self.refresh_record()
        table = processes.read_process_table()
        roots = shutdown.find_session_members(table, self.record.beside_session)
        self.update_record(hand_over_processes=processes.build_process_tree(table, roots))
        return self.record.hand_over_processes

    def explain_hand_over_failure(self, second: subprocess.Popen[bytes], log: Path) -> str:
        """Why a hand-over does not go on; empty if it does."""
        if not all(is_alive(p) for p in self.record.processes if p.role in VITAL):
            return "the first server has died"
        if not self.requests.empty():
            return "another command for it came meanwhile"
        code = second.poll()
        if code is None:
            return ""
        lines = logs.read_last_lines(log, lines=RECENT_LINES, limit=RECENT_LINES * RECENT_LETTERS)
        failure = logs.find_failure(lines) or logs.find_failure(lines, echoes=True)
        cause = failure.cause if failure else f"exit code {code}"
        return f"the second server failed: {cause}"

    def swap_servers(
        self, second: subprocess.Popen[bytes], log: Path, run: str, started_at: float
    ) -> None:
        """The second server becomes the instance's, the first one the other."""
        first, now = self.record, time.time()
        logs.start_new_log(self.folder.server_log)
        with contextlib.suppress(OSError):  # somebody deleted it
            log.rename(self.folder.server_log)
        self.tail, self.child = logs.LogTail(self.folder.server_log), second
        self.recent_lines.clear()
        self.update_record(
            run=run,
            rerun="",
            started_at=started_at,
            ready_at=now,
            ready_s=now - started_at,
            stage_at=now,
            session=second.pid,
            processes=first.hand_over_processes,
            segments=(),
            hand_over_processes=first.processes,
            beside_session=first.session,
        )
        self.scanned_at = 0.0

    async def take_down_other_server(self) -> None:
        """Take the other server of a hand-over down."""
        record = self.record
        own = set(record.segments)
        await asyncio.to_thread(
            shutdown.take_down,
            record.hand_over_processes,
            record.beside_session,
            {
                name
                for p in record.hand_over_processes
                for name in shared_memory.find_used_segments(p.pid)
            }
            - own,
        )
        self.reap_children()
        self.update_record(hand_over_processes=(), beside_session=None)

    def stop_headless_nodes(self, *, should_restart: bool) -> None:
        """Have the supervisors of its headless nodes on this machine end them, or restart them."""
        ours = {process.identity for process in self.record.processes}
        for folder in list_instance_folders():
            try:
                record = folder.load_record()
                if record and record.headless and not record.state.is_over:
                    theirs = {process.identity for process in record.processes}
                    if folder.name != self.folder.name and ours & theirs:
                        request = (
                            ControlRequest(restart=0.0)
                            if should_restart
                            else ControlRequest(stop=0.0)
                        )
                        send_and_wait_until_begun(folder, request, OTHERS_S)
            except Exception as error:  # to end comes first
                self.reporter.report(error)

    async def take_down(self, *, should_restart: bool = False) -> None:
        """Stop the server; on an error, for example no free descriptor, try again."""
        while True:
            try:
                with contextlib.suppress(VllmopsError):  # of the state directory: ours ends anyhow
                    await asyncio.to_thread(self.stop_headless_nodes, should_restart=should_restart)
                self.scan_processes()
                remains = await asyncio.to_thread(
                    shutdown.take_down,
                    self.record.processes,
                    self.record.session,
                    self.record.segments,
                )
                break
            except Exception as error:
                self.reporter.report(error)
                await asyncio.sleep(RETRY_S)
        if self.record.uds:
            server_address.remove_stale_socket(self.record.uds)
        if remains.removed_segments:
            write_log(f"removed from /dev/shm: {', '.join(remains.removed_segments)}")
        self.reap_children()
        self.update_record(processes=remains.unkillable, segments=(), note=str(remains))

    def reap_children(self) -> None:
        """Collect dead children: ours, and the orphans that the subreaper was given."""
        if self.child:
            self.child.poll()
        for orphan in psutil.Process().children():
            if self.child is None or orphan.pid != self.child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)

    def record_end(
        self, state: InstanceState, failure: Failure | None = None, note: str = ""
    ) -> None:
        """The last record, after everything has been taken down."""
        notes = ", ".join(filter(None, (note, self.record.note)))
        code = self.child.returncode if self.child else None
        self.update_record(
            state=state, ended_at=time.time(), failure=failure, exit_code=code, note=notes
        )

    async def release_instance(self) -> None:
        """Let the clients read the last record; when they see the end, name and port are free."""
        os.close(self.lock)
        if self.port is not None:
            os.close(self.port)
        if self.server:
            self.server.close()
        drains = [asyncio.wait_for(writer.drain(), GOODBYE_S) for writer in self.clients]
        await asyncio.gather(*drains, return_exceptions=True)
        for writer in list(self.clients):
            writer.close()
        # Who is still served when the loop ends is cancelled, and asyncio logs that as an error.
        if self.serving:
            await asyncio.wait(self.serving, timeout=GOODBYE_S)
        self.folder.control_socket.unlink(missing_ok=True)


def is_session_reused(tree: Sequence[Process], session: int | None) -> bool:
    """Whether a session's number may be another session's by now.

    The kernel does not give it away while the session has a process. So either its leader is
    there, or nobody has that pid; unless the machine was booted since.

    Args:
        tree: the processes that are known of it.
        session: its number.
    """
    leader = next((process for process in tree if process.pid == session), None)
    if leader is None or leader.boot != read_boot_id():
        return True
    try:
        return process_identity.read_identity(leader.pid) != leader.identity
    except ProcessLookupError:
        return False


def add_worker_ranks(failure: Failure, dead_processes: Sequence[Process]) -> Failure:
    """A failure with the ranks of the workers that died, where the log has a number of vLLM's."""
    if not failure.process.startswith("VllmWorker"):
        return failure
    workers = [p for p in dead_processes if p.role is Role.WORKER and p.place.ranks]
    names = ", ".join(f"{format_role_and_ranks(p.role, p.place)} (pid {p.pid})" for p in workers)
    cause = f"{names}: {failure.cause}" if names else failure.cause
    return msgspec.structs.replace(failure, cause=cause)


def read_inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllmops.supervision.supervisor")
    parser.add_argument("name")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    os.set_inheritable(given.lock, False)
    if given.port is not None:
        os.set_inheritable(given.port, False)
    # The server inherits that, too. Whoever reads its keys again on SIGHUP hears it all the same.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Sent to all at once, by systemd say, to end the server: who takes that down is needed yet.
    # No SIG_IGN, which the server would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.environ["VLLMOPS_HOME"] = str(resolve_home())  # a watch runs in another directory
    folder = InstanceFolder(given.name)
    record = folder.load_record()
    assert record is not None
    client = socket.socket(fileno=given.client)
    port = given.port
    if port is None and record.port is not None:
        port = claimed_ports.claim_port(record.port)
    supervisor = Supervisor(folder, record, given.lock, port)
    asyncio.run(supervisor.run(launch=given.launch, client=client))


if __name__ == "__main__":
    main()
