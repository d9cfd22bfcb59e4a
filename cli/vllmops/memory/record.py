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

from ..errors import VllmopsError
from ..files import not_written, read_private, take
from ..files import read as read_bounded
from ..home import home, make, own
from ..host.gpu import Gpus
from ..host.processes import ROLES, VITAL, Process
from ..instances.record import Folder
from ..instances.servers import Server
from ..protocol import files
from ..protocol.files import Journal
from ..protocol.memory import (
    AgentMemory,
    End,
    MemorySample,
    ProcessMemory,
    Recording,
    RecordingHead,
)
from ..protocol.place import key, who
from ..protocol.remote import Members
from ..rpc import agent

if TYPE_CHECKING:
    from .loads import Load

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
LINES = msgspec.json.Decoder(MemorySample | End)


def kept(label: str) -> Path:
    """The file with the newest recording of a server."""
    return own(home() / "memory") / f"{quote(label, safe='')}.jsonl"


def keep(label: str, head: RecordingHead) -> Journal:
    """Begin the newest recording of a server; it replaces an older one.

    Raises:
        VllmopsError: ``file.not-written``.
    """
    path = kept(label)
    try:
        make(path.parent)
        # The lock keeps two recordings that begin at once from writing to one file.
        gate = take(path.parent / ".lock", wait=True)
    except OSError as error:
        raise not_written(path, error) from error
    assert gate is not None  # because of wait=True
    try:
        prune(path.parent)
        return Journal(path, head)
    finally:
        os.close(gate)


def prune(place: Path) -> None:
    """Delete the recordings of ended processes, except the newest ones."""
    with suppress(OSError):  # a recording begins even if nothing can be deleted
        over = sorted(filter(gone, place.glob("*.jsonl")), key=lambda path: path.stat().st_mtime)
        for path in over[:-KEPT]:
            path.unlink()


def gone(path: Path) -> bool:
    """Whether a recording is of a process that has ended, and not of an instance."""
    label = path.stem
    if not label.isdecimal() or Folder(label).path.exists():
        return False
    try:
        return psutil.Process(int(label)).create_time() > path.stat().st_mtime + CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return True


def newest(label: str, since: float) -> Recording | None:
    """The newest recording of a server, None if there is none.

    Args:
        label: the server's label.
        since: the server's start in seconds since the epoch; an older recording is not its own.
    """
    try:
        path = kept(label)
        recording = decode(path, read_private(path, None, RECORDING_BYTES))
    except (OSError, VllmopsError):
        return None
    return recording if recording.head.started_at >= since - CLOCK_SLACK_S else None


def read(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        VllmopsError: as `files.read` and `decode` do.
    """
    return decode(path, read_bounded(path, files.MOST_BYTES))


def decode(path: Path, content: bytes) -> Recording:
    """The recording in a file's content.

    Raises:
        VllmopsError: as `files.decode` does, and ``memory.empty``.
    """
    head, entries = files.decode_lines(path, content, RecordingHead, LINES)
    samples = [entry for entry in entries if isinstance(entry, MemorySample)]
    if not samples:
        raise VllmopsError(
            "memory.empty", f"{path} contains no samples", "vllmops memory record --save …"
        )
    # All have the processes of the start, see `Watch`; what judges them takes that for granted.
    measured = {tuple((key(one), who(one)) for one in sample.processes) for sample in samples}
    if len(measured) > 1 or () in measured:
        raise files.damaged(path, ValueError("its samples are not all of the same processes"))
    end = next((entry for entry in entries if isinstance(entry, End)), None)
    return Recording(head=head, samples=samples, end=end)


class Watch:
    """The processes that a server has at the start; the agent of each is located once."""

    def __init__(self, server: Server) -> None:
        self.fleet = server.fleet
        self.processes = server.of(*VITAL)
        if not self.processes:
            raise VllmopsError(
                "memory.no-process",
                f"{server.label} has no process yet",
                f"vllmops wait {server.label} --for ready",
            )
        self.gpus = Gpus()
        self.handles: dict[Process, psutil.Process] = {}
        for process in () if self.fleet else self.processes:
            with suppress(psutil.NoSuchProcess):
                self.handles[process] = psutil.Process(process.pid)
        self.reached: dict[Process, agent.Agent] = {}
        self.silent: dict[tuple[str, int], tuple[float, str]] = {}

    def sample(
        self, round_: int | None = None, *, ask: bool = True, full: bool = True
    ) -> MemorySample:
        """A sample of all processes.

        Args:
            round_: rounds of the load so far.
            ask: whether to ask the agents.
            full: whether to measure PSS and USS too.
        """
        answers = self.answers() if ask else {}
        if self.fleet:
            return self.remote(self.fleet.members(), answers, round_)
        gpus, by_pid = self.gpus.used()
        return MemorySample(
            taken_at=time.time(),
            round=round_,
            processes=[
                self.measured(process, answers.get(process), by_pid.get(process.pid), full)
                for process in self.processes
            ],
            quiet=quiet(answers) if answers else None,
            gpus_bytes=gpus,
        )

    def remote(
        self, now: Members, answers: dict[Process, AgentMemory], round_: int | None
    ) -> MemorySample:
        """A sample of a server on another machine: what its kernel and its agents tell."""
        rss = {key(process): process.rss_bytes for process in now.processes}
        return MemorySample(
            taken_at=time.time(),
            round=round_,
            processes=[
                ProcessMemory(
                    **agent.shown(process),
                    pid=process.pid,
                    rss_bytes=rss.get(key(process)),
                    agent=answers.get(process),
                    silent=self.silent.get(key(process), (0.0, ""))[1],
                )
                for process in self.processes
            ],
            quiet=quiet(answers) if answers else None,
        )

    def answers(self) -> dict[Process, AgentMemory]:
        """The agents' answers, except from agents that were silent a moment ago."""
        now = time.monotonic()
        asked = [
            process
            for process in self.processes
            if process.role in ROLES and now >= self.silent.get(key(process), (0.0, ""))[0]
        ]
        answers, silent = agent.side_by_side(asked, self.ask)
        for process, _ in answers:
            self.silent.pop(key(process), None)
        for process_ in silent:
            self.silent[key(process_)] = (time.monotonic() + SILENCE_S, process_.why)
        return dict(answers)

    def ask(self, process: Process) -> tuple[Process, AgentMemory]:
        # An agent that does not answer is not kept: the next sample locates it again.
        reached = self.reached.pop(process, None) or agent.reach(process)
        answer = reached.memory()
        self.reached[process] = reached
        return process, answer

    def measured(
        self, process: Process, answer: AgentMemory | None, gpu: int | None, full: bool
    ) -> ProcessMemory:
        rss = pss = uss = None
        handle = self.handles.get(process)
        with suppress(psutil.Error):
            if handle and handle.is_running():
                rss = handle.memory_info().rss or None  # a zombie has none
            if handle and rss and full:
                info = handle.memory_full_info()
                rss, pss, uss = info.rss, info.pss, info.uss
        return ProcessMemory(
            **agent.shown(process),
            pid=process.pid,
            rss_bytes=rss,
            pss_bytes=pss,
            uss_bytes=uss,
            gpu_bytes=gpu,
            agent=answer,
            silent=self.silent.get(key(process), (0.0, ""))[1],
        )

    def settled(self, round_: int) -> MemorySample:
        """A full sample once nothing is in flight, or after `SETTLE_S` in any case."""
        end = time.monotonic() + SETTLE_S
        while not quiet(self.answers()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        time.sleep(SETTLED_S)
        return self.sample(round_)


def quiet(answers: dict[Process, AgentMemory]) -> bool:
    """Whether nothing was in flight, as far as the agents know."""
    return not any(answer.unfinished or answer.in_flight for answer in answers.values())


class Recorder:
    """Takes one recording, and keeps its samples whatever happens.

    Args:
        watch: the processes to measure.
        head: the options of the recording.
        load: the load to run, None for none.
        journal: gets each sample at once; None if the recording is not saved.
        tell: gets a line of progress and the sample.
    """

    def __init__(
        self,
        watch: Watch,
        head: RecordingHead,
        load: Load | None,
        journal: Journal | None,
        tell: Callable[[str, MemorySample], None],
    ) -> None:
        self.watch = watch
        self.recording = Recording(head=head)
        self.load = load
        self.journal = journal
        self.tell = tell

    def run(self) -> VllmopsError | None:
        """Record to the end; returns the error that cut it short, None without one."""
        failure: VllmopsError | None = None
        try:
            if self.recording.head.rounds:
                self.by_rounds(self.recording.head.rounds)
            else:
                self.by_time()
        except KeyboardInterrupt:
            failure = VllmopsError("interrupted", "interrupted")
        except VllmopsError as error:
            failure = error
        self.recording.end = End(at=time.time(), why=failure.message if failure else "")
        if self.journal:
            self.journal.add(self.recording.end)
            failure = failure or self.journal.failure
        return failure

    def by_rounds(self, rounds: int) -> None:
        self.keep(self.watch.sample(0), f"round 1 of {rounds}")
        for number in range(1, rounds + 1):
            if self.load:
                self.load.run(number, threading.Event())
            done = f"round {number + 1} of {rounds}" if number < rounds else "done"
            self.keep(self.watch.settled(number), done)

    def by_time(self) -> None:
        head = self.recording.head
        interval, duration = head.interval_s or 0.0, head.duration_s or 0.0
        background = Background(self.load) if self.load else None
        began = full_at = time.monotonic()
        try:
            while True:
                now = time.monotonic()
                last = now - began + interval > duration
                full = last or now >= full_at
                full_at = now + min(FULL_S, duration / FULL_TIMES) if full else full_at
                tenths = min(int(10 * (now - began) / duration), 10)
                self.keep(
                    self.watch.sample(ask=full, full=full),
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

    def keep(self, sample: MemorySample, what: str) -> None:
        """Keep a sample.

        Raises:
            VllmopsError: ``memory.process-gone``.
        """
        self.recording.samples.append(sample)
        if self.journal:
            self.journal.add(sample)
        gone = [who(part) for part in sample.processes if part.rss_bytes is None]
        if gone:
            raise VllmopsError(
                "memory.process-gone",
                f"{', '.join(gone)} ended: the recording ends here",
                "vllmops ps --all shows the server's state; record again once the server is ready",
            )
        self.tell(what, sample)


class Background:
    """A load that runs again and again until it is stopped."""

    def __init__(self, load: Load) -> None:
        self.stop = threading.Event()
        self.error: VllmopsError | None = None
        self.thread = threading.Thread(target=self.run, args=(load,), daemon=True)
        self.thread.start()

    def run(self, load: Load) -> None:
        number = 0
        while not self.stop.is_set() and not self.error:
            number += 1
            try:
                load.run(number, self.stop)
            except VllmopsError as error:
                self.error = error
            except Exception as error:
                # Without this, the recording would go on without its load.
                self.error = VllmopsError(
                    "memory.load-failed", f"the load failed: {type(error).__name__}: {error}"
                )
