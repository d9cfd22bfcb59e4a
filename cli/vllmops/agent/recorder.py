"""Records the engine's last steps into a file that outlives the process, kill -9 included.

Written with ``pwrite`` from the engine's own thread: a mapped write raises SIGBUS on a full disk,
and another thread would not write the step in which the process hangs with the GIL held.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from ..background import ErrorReporter
from ..files import open_plain, read_private, take
from ..protocol import steps
from ..protocol.steps import ENDED, EXECUTING, SCHEDULING, StepsFile, StepsHead
from . import objects
from .adapters import engine as adapter
from .identity import here, own, standing
from .log import log

KEPT = 8  # recordings of processes that have ended
KEPT_S = 24 * 3600.0
NEW_S = 60.0
OPEN = 64  # steps whose end is awaited; vLLM schedules a few ahead at most


class Run:
    """The steps of one record.

    Args:
        sequence: of the record.
        number: of the first step.
        now: monotonic, in seconds.
    """

    __slots__ = (
        *(
            "sequence",
            "offset",
            "number",
            "began",
            "began_at",
            "seconds",
            "steps",
            "ended",
            "phase",
        ),
        *("tokens", "requests", "running", "waiting", "deferred", "kv_cache_usage"),
    )

    def __init__(self, sequence: int, number: int, now: float) -> None:
        self.sequence = sequence
        self.offset = steps.offset(sequence)
        self.number = number
        self.began, self.began_at = now, time.time()
        self.seconds = 0.0
        self.steps = self.ended = self.tokens = self.requests = 0
        self.running = self.waiting = self.deferred = 0
        self.kv_cache_usage: float | None = None
        self.phase = SCHEDULING


class Recorder:
    """The recording of this process.

    Args:
        directory: of the agents.

    Raises:
        OSError: its file can't be made, or somebody else writes into it.
    """

    def __init__(self, directory: Path) -> None:
        sweep(directory)
        identity = own()
        self.path = directory / steps.file_name(identity)
        # The lock shows that the process lives, also to other containers; the kernel drops it.
        fd = take(self.path)
        if fd is None:
            raise BlockingIOError(f"another process writes {self.path}")
        self.fd = fd
        self.head = StepsHead(
            **identity._asdict(),
            parent=os.getppid(),
            session=os.getsid(0),
            started_at=time.time(),
            standing=standing(),
        )
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(self.head).ljust(steps.HEAD_BYTES), 0)
        self.reporter = ErrorReporter("the engine's steps can't be recorded", log.warning)
        self.run: Run | None = None
        self.open: dict[int, Run] = {}

    def begin(self, scheduler: Any) -> Run:
        """A step begins: it is about to be scheduled."""
        now, run = time.monotonic(), self.run
        if run is None or now - run.began >= steps.SHARED_S:
            sequence = 0 if run is None else run.sequence + 1
            number = getattr(scheduler, "current_step", sequence) + 1
            run = self.run = Run(sequence, number, now)
        run.steps += 1
        run.phase = SCHEDULING
        self.write(run)
        return run

    def scheduled(self, run: Run, scheduler: Any, output: Any) -> None:
        """What was scheduled, before it is executed."""
        run.seconds = time.monotonic() - run.began
        run.tokens += output.total_num_scheduled_tokens
        run.requests = len(output.num_scheduled_tokens)
        run.kv_cache_usage = adapter.kv_cache_usage(scheduler)
        run.phase = EXECUTING
        self.count(run, scheduler)
        self.open[id(output)] = run
        if len(self.open) > OPEN:
            del self.open[next(iter(self.open))]
        self.write(run)

    def end(self, scheduler: Any, output: Any) -> None:
        """A step's output has been taken."""
        run = self.open.pop(id(output), None)
        if run is None:
            return  # it began before the hooks were there
        run.seconds = time.monotonic() - run.began
        run.ended += 1
        if run.ended == run.steps:
            run.phase = ENDED
        self.count(run, scheduler)
        self.write(run)

    def count(self, run: Run, scheduler: Any) -> None:
        run.running, run.waiting, run.deferred = adapter.queues(scheduler)

    def write(self, run: Run) -> None:
        try:
            os.pwrite(self.fd, steps.packed(run), run.offset)
        except OSError as error:
            self.reporter.report(error)


_place: Callable[[], Path] = Path
_recorder: Recorder | None = None
_off = False
_computed = 0
_hooked = False


def computed() -> int | None:
    """The tokens of all steps so far whose output was taken; None where nobody counts them."""
    return _computed if _hooked else None


def install(place: Callable[[], Path]) -> None:
    """Record the steps of this process's scheduler, once its module is imported.

    Args:
        place: makes the directory of the agents; it may raise.
    """
    global _place  # noqa: PLW0603
    _place = place
    objects.watch("scheduler", hook)


def hook(module: ModuleType) -> None:
    """Make the scheduler record its steps; idempotent."""
    cls = module.Scheduler
    schedule, update = cls.schedule, cls.update_from_output
    if hasattr(schedule, "__vllmops__"):
        return

    @functools.wraps(schedule)
    def scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = recorder()
        run = attempt(found.begin, self) if found else None
        output = schedule(self, *args, **kwargs)
        if found and run:
            attempt(found.scheduled, run, self, output)
        return output

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        global _computed  # noqa: PLW0603
        result = update(self, scheduler_output, *args, **kwargs)
        _computed += attempt(tokens_of, scheduler_output) or 0
        if _recorder:
            attempt(_recorder.end, self, scheduler_output)
        return result

    scheduled.__vllmops__ = update_from_output.__vllmops__ = True  # type: ignore[attr-defined]
    cls.schedule, cls.update_from_output = scheduled, update_from_output
    global _hooked  # noqa: PLW0603
    _hooked = True


def tokens_of(output: Any) -> int:
    """The tokens that a step computes."""
    return int(output.total_num_scheduled_tokens)


def attempt(act: Callable[..., Any], *args: Any) -> Any:
    """The result of `act`; nothing it raises may reach vLLM, and one report is enough."""
    try:
        return act(*args)
    except Exception as error:
        off(error)
        return None


def recorder() -> Recorder | None:
    """The recording of this process, begun with its first step; None where that is impossible."""
    global _recorder  # noqa: PLW0603
    if _recorder is None and not _off:
        try:
            _recorder = Recorder(_place())
        except Exception as error:
            off(error)
    return _recorder


def off(error: Exception) -> None:
    """Record no more."""
    global _recorder, _off
    _recorder, _off = None, True
    objects.report(f"the engine's steps are not recorded: {error!r}")


def forget() -> None:
    """In a forked child: the recording is its parent's."""
    global _recorder, _off
    if _recorder is not None:
        with suppress(OSError):
            os.close(_recorder.fd)
    _recorder, _off = None, False


def sweep(directory: Path) -> None:
    """Remove recordings of processes that have ended, except the newest of the last day."""
    ended: list[tuple[float, Path]] = []
    for path in directory.glob(f"*{steps.SUFFIX}"):
        with suppress(OSError):
            modified = path.lstat().st_mtime
            # Without the check, the lock would open a FIFO; a new file may not be locked yet.
            os.close(open_plain(path))
            if time.time() - modified > NEW_S and (fd := take(path)) is not None:
                os.close(fd)
                ended.append((modified, path))
    ended.sort(reverse=True)
    for number, (modified, path) in enumerate(ended):
        if number >= KEPT or time.time() - modified > KEPT_S:
            with suppress(OSError):
                path.unlink()


def snapshot() -> StepsFile:
    """``GET /steps``."""
    found = _recorder
    content = b"" if found is None else read_private(found.path, None, steps.FILE_BYTES)
    return StepsFile(**here(), pid=os.getpid(), content=content)
