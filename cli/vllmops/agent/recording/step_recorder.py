"""Records the engine's last steps into a file that outlives the process, kill -9 included.

Written with ``pwrite`` from the engine's own thread: a mapped write raises SIGBUS on a full disk,
and another thread would not write the step in which the process hangs with the GIL held.

Not with `os.pwrite`, which lets go of the GIL: the thread that sends the outputs of the last step
would take it, and the workers would wait for the next step until it has sent them.

A write that waits for its disk, or for another machine, would hold up the engine and all other
threads. So on a file system of the network, and after a slow write, the heartbeat's thread writes.

A write is most of what a step's record costs. While requests are pending the next step begins at
once, so the end of a step is written together with the next one's beginning.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, TypeAlias

import msgspec

from ...model import step_recording
from ...model.step_recording import (
    ENDED,
    EXECUTING,
    SCHEDULING,
    SHARED_S,
    StepAccumulator,
    StepsFile,
    StepsHead,
    pack_record,
)
from ...support.background import ErrorReporter
from ...support.files import lock_file, open_regular_file, read_private_file
from ..hooks import vllm_objects
from ..identity import find_standing, make_process_fields, read_own_identity
from ..log import log
from ..versions.engine import count_requests_by_state, kv_cache_usage

KEPT = 8  # recordings of processes that have ended
KEPT_S = 24 * 3600.0
NEW_S = 60.0
SIZE = step_recording.RECORD.size
_pwrite = ctypes.PyDLL(None, use_errno=True).pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_ssize_t)
_pwrite.restype = ctypes.c_ssize_t
_statfs = ctypes.CDLL(None).statfs
# Of statfs(2): ext2 to 4, XFS, Btrfs, tmpfs, overlay, ZFS, F2FS, bcachefs.
LOCAL = {0xEF53, 0x58465342, 0x9123683E, 0x1021994, 0x794C7630, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E}
SLOW_S = 0.25
OPEN = 64  # steps whose end is awaited; vLLM schedules a few ahead at most


Aside: TypeAlias = deque[tuple[bytes, int]]  # what to write, and where


def is_local_filesystem(directory: Path) -> bool:
    """Whether a directory is on a file system of this machine, as far as is known."""
    found = ctypes.create_string_buffer(256)  # more than a struct statfs
    if _statfs(os.fsencode(directory), found):
        return False
    return int.from_bytes(found.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in LOCAL


class StepRecorder:
    """The recording of this process.

    Args:
        directory: of the agents.

    Raises:
        OSError: its file can't be made, or somebody else writes into it.
    """

    def __init__(self, directory: Path) -> None:
        remove_old_recordings(directory)
        identity = read_own_identity()
        self.path = directory / step_recording.make_recording_name(identity)
        # The lock shows that the process lives, also to other containers; the kernel drops it.
        fd = lock_file(self.path)
        if fd is None:
            raise BlockingIOError(f"another process writes {self.path}")
        self.fd = fd
        self.head = StepsHead(
            **identity._asdict(),
            parent=os.getppid(),
            session=os.getsid(0),
            started_at=time.time(),
            standing=find_standing(),
        )
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(self.head).ljust(step_recording.HEAD_BYTES), 0)
        self.reporter = ErrorReporter("the engine's steps can't be recorded", log.warning)
        self.run: StepAccumulator | None = None
        self.open_steps: dict[int, StepAccumulator] = {}
        self.unwritten_steps: StepAccumulator | None = None  # its end is not written
        self.previous_unwritten_steps: StepAccumulator | None = (
            None  # the same at the heartbeat before
        )
        self.turn = threading.Lock()
        # What the heartbeat's thread is to write; None where the engine's does.
        self.queued_writes: Aside | None = (
            None if is_local_filesystem(directory) else Aside(maxlen=step_recording.SLOTS)
        )

    def begin_step(self, scheduler: Any) -> StepAccumulator:
        """A step begins: it is about to be scheduled."""
        now, run, late = monotonic(), self.run, self.unwritten_steps
        if run is None or now - run.began >= SHARED_S:
            sequence = 0 if run is None else run.sequence + 1
            number = getattr(scheduler, "current_step", sequence) + 1
            run = self.run = StepAccumulator(sequence, number, now)
        run.steps += 1
        run.phase = SCHEDULING
        if late is None or late is run:
            self.write_record(pack_record(run), run.offset)
        elif late.offset + SIZE == run.offset:
            self.write_record(pack_record(late) + pack_record(run), late.offset)
        else:
            self.write_record(pack_record(late), late.offset)
            self.write_record(pack_record(run), run.offset)
        self.unwritten_steps = None
        return run

    def record_schedule(self, run: StepAccumulator, scheduler: Any, output: Any) -> None:
        """What was scheduled, before it is executed."""
        run.seconds = monotonic() - run.began
        run.tokens += output.total_num_scheduled_tokens
        run.requests = max(run.requests, len(output.num_scheduled_tokens))
        if (usage := kv_cache_usage(scheduler)) is not None:
            run.kv_cache_usage = max(run.kv_cache_usage or 0.0, usage)
        run.phase = EXECUTING
        run.running, run.waiting, run.deferred = count_requests_by_state(scheduler)
        self.open_steps[id(output)] = run
        if len(self.open_steps) > OPEN:
            del self.open_steps[next(iter(self.open_steps))]
        self.write_record(pack_record(run), run.offset)

    def end_step(self, scheduler: Any, output: Any) -> None:
        """A step's output has been taken."""
        run = self.open_steps.pop(id(output), None)
        if run is None:
            return  # it began before the hooks were there
        run.seconds = monotonic() - run.began
        run.ended += 1
        if run.ended == run.steps:
            run.phase = ENDED
        run.running, run.waiting, run.deferred = count_requests_by_state(scheduler)
        if self.unwritten_steps is not None and self.unwritten_steps is not run:
            self.write_record(pack_record(self.unwritten_steps), self.unwritten_steps.offset)
        self.unwritten_steps = run
        if not (run.running or run.waiting or self.open_steps):
            self.write_record(pack_record(run), run.offset)
            self.unwritten_steps = None

    def flush_pending(self) -> None:
        """Write such an end where no step has begun since the last heartbeat.

        Called by another thread, so it changes nothing that the engine's uses.
        """
        late = self.unwritten_steps
        if late is not None and late is self.previous_unwritten_steps:
            self.write_record(pack_record(late), late.offset)
        self.previous_unwritten_steps = late
        if not self.turn.acquire(blocking=False):
            return  # another thread writes
        try:
            while self.queued_writes:
                os.pwrite(self.fd, *self.queued_writes[0])  # lets go of the GIL
                self.queued_writes.popleft()
        except OSError as error:
            self.reporter.report(error)
        finally:
            self.turn.release()

    def read_content(self) -> bytes:
        """Of the file, with what is not written yet."""
        found = bytearray(read_private_file(self.path, None, step_recording.FILE_BYTES))
        for content, offset in tuple(self.queued_writes or ()):
            found[offset : offset + len(content)] = content
        if late := self.unwritten_steps:
            found[late.offset : late.offset + SIZE] = pack_record(late)
        return bytes(found)

    def write_record(self, content: bytes, offset: int) -> None:
        if self.queued_writes is not None:
            self.queued_writes.append((content, offset))
            return
        began = monotonic()
        if _pwrite(self.fd, content, len(content), offset) < 0:
            number = ctypes.get_errno()
            self.reporter.report(OSError(number, os.strerror(number)))
        if (took_s := monotonic() - began) > SLOW_S:
            self.queued_writes = Aside(maxlen=step_recording.SLOTS)
            log.warning(
                "vllmops: the engine's steps are written once a second from now on: a write to %s "
                "took %.1f s",
                self.path,
                took_s,
            )


_place: Callable[[], Path] = Path
_recorder: StepRecorder | None = None
_off = False
_computed = 0
_hooked = False


def count_computed_tokens(scheduler: Any) -> int | None:
    """The tokens of all steps so far whose output was taken; None where nobody counts them.

    As with a scheduler of somebody's own that does not call vLLM's.
    """
    update = getattr(type(scheduler), "update_from_output", None)
    counts = _hooked and (_computed or hasattr(update, "__vllmops__"))
    return _computed if counts else None


def install_recorder(make_directory: Callable[[], Path]) -> None:
    """Record the steps of this process's scheduler, once its module is imported.

    Args:
        make_directory: makes the directory of the agents; it may raise.
    """
    global _place  # noqa: PLW0603
    _place = make_directory
    vllm_objects.when_symbol_imported("scheduler", hook_scheduler)


def hook_scheduler(module: ModuleType) -> None:
    """Make the scheduler record its steps; idempotent."""
    cls = module.Scheduler
    schedule, update = cls.schedule, cls.update_from_output
    if hasattr(schedule, "__vllmops__"):
        return

    # Nothing the recorder raises may reach vLLM, and one report is enough.
    @functools.wraps(schedule)
    def schedule_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = None
        if ring := _recorder or open_recorder():
            try:
                run = ring.begin_step(self)
            except Exception as error:
                stop_recording(error)
        output = schedule(self, *args, **kwargs)
        if ring and run:
            try:
                ring.record_schedule(run, self, output)
            except Exception as error:
                stop_recording(error)
        return output

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        global _computed, _hooked  # noqa: PLW0603
        result = update(self, scheduler_output, *args, **kwargs)
        try:
            _computed += scheduler_output.total_num_scheduled_tokens
            if found := _recorder:
                found.end_step(self, scheduler_output)
        except Exception as error:
            _hooked = False
            stop_recording(error)
        return result

    schedule_and_record.__vllmops__ = update_from_output.__vllmops__ = True  # type: ignore[attr-defined]
    cls.schedule, cls.update_from_output = schedule_and_record, update_from_output
    global _hooked  # noqa: PLW0603
    _hooked = True


def open_recorder() -> StepRecorder | None:
    """The recording of this process, begun with its first step; None where that is impossible."""
    global _recorder  # noqa: PLW0603
    if _recorder is None and not _off:
        try:
            _recorder = StepRecorder(_place())
        except Exception as error:
            stop_recording(error)
    return _recorder


def stop_recording(error: Exception) -> None:
    """Record no more."""
    global _recorder, _off
    _recorder, _off = None, True
    vllm_objects.report_problem(f"the engine's steps are not recorded: {error!r}")


def reset_after_fork() -> None:
    """In a forked child: the recording is its parent's."""
    global _recorder, _off
    if _recorder is not None:
        with suppress(OSError):
            os.close(_recorder.fd)
    _recorder, _off = None, False


def remove_old_recordings(directory: Path) -> None:
    """Remove recordings of processes that have ended, except the newest of the last day."""
    ended: list[tuple[float, Path]] = []
    for path in directory.glob(f"*{step_recording.SUFFIX}"):
        with suppress(OSError):
            modified = path.lstat().st_mtime
            # Without the check, the lock would open a FIFO; a new file may not be locked yet.
            os.close(open_regular_file(path))
            if time.time() - modified > NEW_S and (fd := lock_file(path)) is not None:
                os.close(fd)
                ended.append((modified, path))
    ended.sort(reverse=True)
    for number, (modified, path) in enumerate(ended):
        if number >= KEPT or time.time() - modified > KEPT_S:
            with suppress(OSError):
                path.unlink()


def read_recording() -> StepsFile:
    """``GET /steps``."""
    content = _recorder.read_content() if _recorder else b""
    return StepsFile(**make_process_fields(), pid=os.getpid(), content=content)


def flush_recording() -> None:
    """With each heartbeat, see `StepRecorder.flush_pending`."""
    try:
        if found := _recorder:
            found.flush_pending()
    except Exception as error:
        stop_recording(error)
