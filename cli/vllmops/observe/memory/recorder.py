"""Records a server's memory: a sample after each round of a load, or one per interval."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import psutil

from ...collect.agents import agent_client
from ...collect.machine.gpu import NvidiaGpus
from ...collect.machine.processes import VITAL, Process
from ...model import snapshot_files
from ...model.admin_api import ServerProcesses
from ...model.memory import (
    AgentMemory,
    MemoryRecording,
    MemoryRecordingHead,
    MemorySample,
    ProcessMemory,
    RecordingEnd,
)
from ...model.ranks import format_process, make_process_key
from ...model.roles import ROLES
from ...model.snapshot_files import Journal
from ...servers.discovery import Server
from ...servers.record import InstanceFolder
from ...support.errors import VllmopsError
from ...support.files import lock_file, make_not_written_error, read_private_file
from ...support.files import read_input as read_bounded
from ...support.home import create_folder, require_safe_folder, resolve_home

if TYPE_CHECKING:
    from .load_generators import Load

# Times of files and recordings follow the wall clock, which may be set; a server's start does not.
CLOCK_SLACK_S = 2.0
# Not every second: for PSS and USS the kernel walks the page table (10 ms for some GB), and an idle
# agent needs as long to wake up if its pages were reclaimed.
FULL_S = 60.0
FULL_TIMES = 5  # at least
SILENCE_S = 10.0  # until a silent agent is asked again
KEPT = 20  # recordings of processes that have ended
SETTLE_S = 10.0
SETTLED_S = 0.2  # for what the engine frees after its last response
LOOK_S = 0.1
RECORDING_BYTES = 1 << 30  # one sample a second for some months
LINES = msgspec.json.Decoder(MemorySample | RecordingEnd)


def get_recording_path(label: str) -> Path:
    """The file with the newest recording of a server."""
    return require_safe_folder(resolve_home() / "memory") / f"{quote(label, safe='')}.jsonl"


def open_recording(label: str, head: MemoryRecordingHead) -> Journal:
    """Begin the newest recording of a server; it replaces an older one.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    path = get_recording_path(label)
    try:
        create_folder(path.parent)
        # The lock keeps two recordings that begin at once from writing to one file.
        gate = lock_file(path.parent / ".lock", wait=True)
    except OSError as error:
        raise make_not_written_error(path, error) from error
    assert gate is not None  # because of wait=True
    try:
        delete_old_recordings(path.parent)
        return Journal(path, head)
    finally:
        os.close(gate)


def delete_old_recordings(folder: Path) -> None:
    """Delete the recordings of ended processes, except the newest ones."""
    with suppress(OSError):  # a recording begins even if nothing can be deleted
        over = sorted(
            filter(is_obsolete_recording, folder.glob("*.jsonl")),
            key=lambda path: path.stat().st_mtime,
        )
        for path in over[:-KEPT]:
            path.unlink()


def is_obsolete_recording(path: Path) -> bool:
    """Whether a recording is of a process that has ended, and not of an instance."""
    label = path.stem
    if not label.isdecimal() or InstanceFolder(label).path.exists():
        return False
    try:
        return psutil.Process(int(label)).create_time() > path.stat().st_mtime + CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return True


def load_newest_recording(label: str, started_at: float) -> MemoryRecording | None:
    """The newest recording of a server, None if there is none.

    Args:
        label: the server's label.
        started_at: the server's start in seconds since the epoch; an older recording is not its
            own.
    """
    try:
        path = get_recording_path(label)
        recording = parse_recording(path, read_private_file(path, None, RECORDING_BYTES))
    except (OSError, VllmopsError):
        return None
    return recording if recording.head.started_at >= started_at - CLOCK_SLACK_S else None


def read_recording(path: Path) -> MemoryRecording:
    """The recording in a file.

    Raises:
        VllmopsError: as `snapshot_files.read_input` and `parse_recording` do.
    """
    return parse_recording(path, read_bounded(path, snapshot_files.MOST_BYTES))


def parse_recording(path: Path, content: bytes) -> MemoryRecording:
    """The recording in a file's content.

    Raises:
        VllmopsError: as `snapshot_files.parse_snapshot` does, and ``memory.empty``.
    """
    head, entries = snapshot_files.parse_journal(path, content, MemoryRecordingHead, LINES)
    samples = [entry for entry in entries if isinstance(entry, MemorySample)]
    if not samples:
        raise VllmopsError(
            "memory.empty", f"{path} contains no samples", "vllmops memory record --save …"
        )
    # All have the processes of the start, see `MemorySampler`; what judges them takes that for
    # granted.
    measured = {
        tuple((make_process_key(one), format_process(one)) for one in sample.processes)
        for sample in samples
    }
    if len(measured) > 1 or () in measured:
        raise snapshot_files.make_damaged_error(
            path, ValueError("its samples are not all of the same processes")
        )
    end = next((entry for entry in entries if isinstance(entry, RecordingEnd)), None)
    return MemoryRecording(head=head, samples=samples, end=end)


class MemorySampler:
    """The processes that a server has at the start; the agent of each is located once."""

    def __init__(self, server: Server) -> None:
        self.fleet = server.fleet
        self.processes = server.select_processes(*VITAL)
        if not self.processes:
            raise VllmopsError(
                "memory.no-process",
                f"{server.label} has no process yet",
                f"vllmops wait {server.label} --for ready",
            )
        self.gpus = NvidiaGpus()
        self.handles: dict[Process, psutil.Process] = {}
        for process in () if self.fleet else self.processes:
            with suppress(psutil.NoSuchProcess):
                self.handles[process] = psutil.Process(process.pid)
        self.agents: dict[Process, agent_client.Agent] = {}
        self.gaps_by_process: dict[tuple[str, int], tuple[float, str]] = {}

    def take_sample(
        self, round_: int | None = None, *, ask: bool = True, detailed: bool = True
    ) -> MemorySample:
        """A sample of all processes.

        Args:
            round_: rounds of the load so far.
            ask: whether to ask the agents.
            detailed: whether to measure PSS and USS too.
        """
        answers = self.fetch_reports() if ask else {}
        if self.fleet:
            return self.take_remote_sample(self.fleet.fetch_snapshot(), answers, round_)
        gpus, by_pid = self.gpus.read_used_memory()
        return MemorySample(
            taken_at=time.time(),
            round=round_,
            processes=[
                self.measure_process(
                    process, answers.get(process), by_pid.get(process.pid), detailed
                )
                for process in self.processes
            ],
            quiet=is_quiet(answers) if answers else None,
            gpus_bytes=gpus,
        )

    def take_remote_sample(
        self,
        server_processes: ServerProcesses,
        answers: dict[Process, AgentMemory],
        round_: int | None,
    ) -> MemorySample:
        """A sample of a server on another machine: what its kernel and its agents tell."""
        rss = {
            make_process_key(process): process.rss_bytes for process in server_processes.processes
        }
        return MemorySample(
            taken_at=time.time(),
            round=round_,
            processes=[
                ProcessMemory(
                    **agent_client.get_process_fields(process),
                    pid=process.pid,
                    rss_bytes=rss.get(make_process_key(process)),
                    agent=answers.get(process),
                    gap_reason=self.gaps_by_process.get(make_process_key(process), (0.0, ""))[1],
                )
                for process in self.processes
            ],
            quiet=is_quiet(answers) if answers else None,
        )

    def fetch_reports(self) -> dict[Process, AgentMemory]:
        """The agents' answers, except from agents that were silent a moment ago."""
        now = time.monotonic()
        asked = [
            process
            for process in self.processes
            if process.role in ROLES
            and now >= self.gaps_by_process.get(make_process_key(process), (0.0, ""))[0]
        ]
        answers, silent = agent_client.collect_answers(asked, self.fetch_report)
        for process, _ in answers:
            self.gaps_by_process.pop(make_process_key(process), None)
        for process_ in silent:
            self.gaps_by_process[make_process_key(process_)] = (
                time.monotonic() + SILENCE_S,
                process_.reason,
            )
        return dict(answers)

    def fetch_report(self, process: Process) -> tuple[Process, AgentMemory]:
        # An agent that does not answer is not kept: the next sample locates it again.
        reached = self.agents.pop(process, None) or agent_client.open_agent(process)
        answer = reached.fetch_memory()
        self.agents[process] = reached
        return process, answer

    def measure_process(
        self, process: Process, answer: AgentMemory | None, gpu: int | None, detailed: bool
    ) -> ProcessMemory:
        rss = pss = uss = None
        handle = self.handles.get(process)
        with suppress(psutil.Error):
            if handle and handle.is_running():
                rss = handle.memory_info().rss or None  # a zombie has none
            if handle and rss and detailed:
                info = handle.memory_full_info()
                rss, pss, uss = info.rss, info.pss, info.uss
        return ProcessMemory(
            **agent_client.get_process_fields(process),
            pid=process.pid,
            rss_bytes=rss,
            pss_bytes=pss,
            uss_bytes=uss,
            gpu_bytes=gpu,
            agent=answer,
            gap_reason=self.gaps_by_process.get(make_process_key(process), (0.0, ""))[1],
        )

    def take_settled_sample(self, round_: int) -> MemorySample:
        """A full sample once nothing is in flight, or after `SETTLE_S` in any case."""
        end = time.monotonic() + SETTLE_S
        while not is_quiet(self.fetch_reports()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        time.sleep(SETTLED_S)
        return self.take_sample(round_)


def is_quiet(answers: dict[Process, AgentMemory]) -> bool:
    """Whether nothing was in flight, as far as the agents know."""
    return not any(answer.unfinished_requests or answer.in_flight for answer in answers.values())


class MemoryRecorder:
    """Takes one recording, and keeps its samples whatever happens.

    Args:
        watch: the processes to measure.
        head: the options of the recording.
        load: the load to run, None for none.
        journal: gets each sample at once; None if the recording is not saved.
        on_sample: gets a line of progress and the sample.
    """

    def __init__(
        self,
        watch: MemorySampler,
        head: MemoryRecordingHead,
        load: Load | None,
        journal: Journal | None,
        on_sample: Callable[[str, MemorySample], None],
    ) -> None:
        self.watch = watch
        self.recording = MemoryRecording(head=head)
        self.load = load
        self.journal = journal
        self.on_sample = on_sample

    def run(self) -> VllmopsError | None:
        """Record to the end; returns the error that cut it short, None without one."""
        failure: VllmopsError | None = None
        try:
            if self.recording.head.rounds:
                self.record_rounds(self.recording.head.rounds)
            else:
                self.record_over_time()
        except KeyboardInterrupt:
            failure = VllmopsError("interrupted", "interrupted")
        except VllmopsError as error:
            failure = error
        self.recording.end = RecordingEnd(
            ended_at=time.time(), reason=failure.message if failure else ""
        )
        if self.journal:
            self.journal.append(self.recording.end)
            failure = failure or self.journal.failure
        return failure

    def record_rounds(self, rounds: int) -> None:
        self.add_sample(self.watch.take_sample(0), f"round 1 of {rounds}")
        for number in range(1, rounds + 1):
            if self.load:
                self.load.run_round(number, threading.Event())
            done = f"round {number + 1} of {rounds}" if number < rounds else "done"
            self.add_sample(self.watch.take_settled_sample(number), done)

    def record_over_time(self) -> None:
        head = self.recording.head
        interval, duration = head.interval_s or 0.0, head.duration_s or 0.0
        background = BackgroundLoad(self.load) if self.load else None
        began = full_at = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                last = now - began + interval > duration
                full = last or now >= full_at
                full_at = now + min(FULL_S, duration / FULL_TIMES) if full else full_at
                tenths = min(int(10 * (now - began) / duration), 10)
                self.add_sample(
                    self.watch.take_sample(ask=full, detailed=full),
                    f"{tenths * duration / 10:g} of {duration:g} s",
                )
                if background and background.error:
                    raise background.error
                if last:
                    return
                # If a sample took longer than the interval, the missed ones are skipped.
                passed = int((time.monotonic() - began) / interval) + 1
                time.sleep(max(began + passed * interval - time.monotonic(), 0.0))
        finally:
            if background:
                background.stop.set()
                background.thread.join(SETTLE_S)

    def add_sample(self, sample: MemorySample, progress: str) -> None:
        """Keep a sample.

        Raises:
            VllmopsError: ``memory.process-gone``.
        """
        self.recording.samples.append(sample)
        if self.journal:
            self.journal.append(sample)
        gone = [format_process(part) for part in sample.processes if part.rss_bytes is None]
        if gone:
            raise VllmopsError(
                "memory.process-gone",
                f"{', '.join(gone)} ended: the recording ends here",
                "vllmops ps --all shows the server's state; record again once the server is ready",
            )
        self.on_sample(progress, sample)


class BackgroundLoad:
    """A load that runs again and again until it is stopped."""

    def __init__(self, load: Load) -> None:
        self.stop = threading.Event()
        self.error: VllmopsError | None = None
        self.thread = threading.Thread(target=self.run_rounds, args=(load,), daemon=True)
        self.thread.start()

    def run_rounds(self, load: Load) -> None:
        number = 0
        while not self.stop.is_set() and not self.error:
            number += 1
            try:
                load.run_round(number, self.stop)
            except VllmopsError as error:
                self.error = error
            except Exception as error:
                # Without this, the recording would go on without its load.
                self.error = VllmopsError(
                    "memory.load-failed", f"the load failed: {type(error).__name__}: {error}"
                )
