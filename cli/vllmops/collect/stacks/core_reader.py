"""Reads a core file in its own process: ``python -m vllmops.collect.stacks.core_reader``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pystack.engine import CoreFileAnalyzer, NativeReportingMode, get_process_threads_for_core
from pystack.errors import PystackError
from pystack.process import is_elf
from pystack.types import NativeFrame, PyFrame, PyThread, frame_type

from ...model.ranks import parse_title
from ...model.stacks import DumpOptions, Frame, LocalVariable, ProcessStacks, StacksGap, ThreadStack
from .pasted_text import GUESSED, find_process_role, is_waiting, parse_process_title, shorten_path

CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def read_core_file(path: Path, options: DumpOptions) -> ProcessStacks:
    """The stacks in a core file; with an error if there are none."""
    try:
        core = CoreFileAnalyzer(path)
        program = _find_program(core)
        info = core.extract_ps_info()
        title = str(info["psargs"]).strip()
        if not program.exists():
            return _make_failed_process("core.no-program", str(program))
        core = CoreFileAnalyzer(path, program)
        mode = NativeReportingMode.PYTHON if options.native else NativeReportingMode.OFF
        threads_ = get_process_threads_for_core(path, program, None, mode, locals=options.locals)
        failure = core.extract_failure_info()
    except (PystackError, RuntimeError, OSError) as error:
        if "determine python version" in str(error):
            return _make_failed_process("core.not-python", title)
        return _make_failed_process("core.unreadable", str(error))
    pid = int(info["pid"])
    threads = [_make_thread(thread, pid, options) for thread in threads_ if thread.tid]
    if not threads:
        return _make_failed_process("core.unreadable", "Python had ended")
    threads.sort(key=lambda t: (not t.owns_gil, t.state != "active", t.tid))
    return ProcessStacks(
        role=str(find_process_role(title, tuple(threads))),
        pid=pid,
        create_time=0.0,
        title=parse_process_title(title),
        **msgspec.structs.asdict(parse_title(title)),
        note="; ".join(filter(None, (_describe_fatal_signal(failure), GUESSED))),
        source="pystack",
        threads=tuple(threads),
    )


def _make_failed_process(code: str, message: str) -> ProcessStacks:
    return ProcessStacks(role="other", pid=0, create_time=0.0, error=StacksGap(code, message))


def _find_program(core: CoreFileAnalyzer) -> Path:
    """The file of the program: a process that changed its title hides it from pystack."""
    program = Path(core.extract_executable())
    if is_elf(program):
        return program
    return next((Path(part.path) for part in core.extract_maps() if part.path), program)


def _describe_fatal_signal(failure: dict[str, int]) -> str:
    """What ended the process; empty if it lived on, as with gcore."""
    number, sender = failure.get("si_signo", 0), failure.get("sender_pid", 0)
    if number not in CRASHES:
        return ""
    by = f", sent by pid {sender}" if sender else ""
    return f"{signal.Signals(number).name} ended the process{by}"


def _make_thread(thread: PyThread, pid: int, options: DumpOptions) -> ThreadStack:
    frames = tuple(_merge_frames(thread, options))[::-1]
    idle = not thread.holds_the_gil > 0 and is_waiting(frames[:1])
    return ThreadStack(
        name="MainThread" if thread.tid == pid else thread.name or f"thread {thread.tid}",
        state="idle" if idle else "active",
        owns_gil=thread.holds_the_gil > 0,
        tid=thread.tid,
        frames=frames,
    )


def _merge_frames(thread: PyThread, options: DumpOptions) -> Iterator[Frame]:
    """A thread's frames, outermost first: a native call of the interpreter starts Python ones."""
    python = list(thread.all_frames)
    kinds = [frame_type(frame, thread.python_version) for frame in thread.native_frames]
    if kinds.count(NativeFrame.FrameType.EVAL) != sum(frame.is_entry for frame in python):
        kinds = []  # some native frames are missing
    for kind, native in zip(kinds, thread.native_frames, strict=False):
        if kind is NativeFrame.FrameType.EVAL:
            inner = next((at for at, f in enumerate(python[1:], 1) if f.is_entry), len(python))
            yield from _make_python_frames(python[:inner], options)
            python = python[inner:]
        elif kind is NativeFrame.FrameType.OTHER:
            file = native.path if native.linenumber else native.library
            yield Frame(native.symbol, file, shorten_path(file), native.linenumber or None)
    yield from _make_python_frames(python, options)


def _make_python_frames(frames: list[PyFrame], options: DumpOptions) -> Iterator[Frame]:
    for frame in frames:
        if frame.is_shim:  # the interpreter's own
            continue
        code = frame.code
        values = (
            LocalVariable(name, value, argument)
            for names, argument in ((frame.arguments, True), (frame.locals, False))
            for name, value in names.items()
        )
        yield Frame(
            code.scope,
            code.filename,
            shorten_path(code.filename),
            code.location.lineno or None,
            tuple(values) if options.locals else None,
        )


if __name__ == "__main__":
    found = read_core_file(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=DumpOptions))
    sys.stdout.buffer.write(msgspec.json.encode(found))
