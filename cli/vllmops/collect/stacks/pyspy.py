"""Takes stacks from outside with py-spy: all processes at once, within one time budget.

py-spy stops a process with PTRACE_SEIZE and PTRACE_INTERRUPT. It sends no signal, and if py-spy
dies for any reason, the kernel resumes the process. So it is safe to kill a py-spy that is late.

Where py-spy is missing, may not look, or does not come to an end, the agent of the process lists
its own threads; and so does the agent of a process on another machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ...model import process_identity
from ...model.roles import ROLES
from ...model.stacks import DumpOptions, ProcessStacks, StacksGap, StacksSnapshot, ThreadStack
from ...support.errors import VllmopsError
from ..agents import agent_client, agent_files
from ..machine import proc
from ..machine.processes import Process
from ..machine.ptrace_permission import make_refusal_error, read_rights
from . import pyspy_json

SURE_SHARE = 0.8
# A killed process ends at once, unless it is stuck in the kernel.
KILL_WAIT_S = 1.0
# py-spy holds a process for some milliseconds, with native frames for longer. Meanwhile the
# process does not work, so one py-spy must not hold it for as long as all may take.
HELD_S = 5.0
LOOK_S = 0.25
# An agent that runs Python answers in milliseconds; this comes on top of the time for py-spy.
AGENT_S = 1.0

NOT_PYTHON = ("Failed to find python version", "Failed to find a python interpreter")
STOPPED = "it is stopped by a signal"
UNSTOPPED = "read without stopping it"
REFUSED = ("Permission denied", "Permission Denied", "EPERM", "Operation not permitted")


class _PyspyTimeoutError(VllmopsError):
    """py-spy was killed at its time limit."""


def find_pyspy() -> str:
    """The py-spy program: beside this Python, on the path, or where pip put it.

    Raises:
        VllmopsError: ``pyspy.missing``.
    """
    beside = Path(sys.executable).with_name("py-spy")
    if beside.is_file():
        return str(beside)
    if program := shutil.which("py-spy"):
        return program
    from importlib import metadata  # noqa: PLC0415 - slow to import, and hardly ever needed

    try:
        files = metadata.files("py-spy") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "py-spy" and (path := Path(str(file.locate()))).is_file():
            return str(path)
    raise VllmopsError(
        "pyspy.missing",
        "py-spy is not installed; it reads the stacks",
        f"{sys.executable} -m pip install py-spy",
    )


def dump_stacks(
    processes: Sequence[Process],
    options: DumpOptions | None = None,
    *,
    timeout_s: float = 20.0,
    server: str | None = None,
) -> StacksSnapshot:
    """Dump all processes at the same time; one that fails does not stop the others.

    Args:
        processes: the processes to dump.
        options: local variables, native frames, whether to stop the processes.
        timeout_s: seconds for all processes together.
        server: the server's name, for the snapshot.

    Raises:
        VllmopsError: ``pyspy.missing``, if no agent stands in for it either.
    """
    options = options or DumpOptions()
    # From elsewhere only agents answer, and in other processes there is none.
    processes = [
        p for p in processes if p.role in ROLES or not isinstance(p, agent_files.ProxiedProcess)
    ]
    captured_at, began = time.time(), time.monotonic()
    deadline = began + timeout_s
    with ThreadPoolExecutor(max(len(processes), 1)) as pool:
        dumps = [pool.submit(_dump_process, process, options, deadline) for process in processes]
        done = tuple(dump.result() for dump in dumps)
    if all(process.error and process.error.code == "pyspy.missing" for process in done):
        find_pyspy()
    return StacksSnapshot(
        captured_at=captured_at,
        seconds=round(time.monotonic() - began, 3),
        server=server,
        options=options,
        processes=done,
    )


def _dump_process(process: Process, options: DumpOptions, deadline: float) -> ProcessStacks:
    began = time.monotonic()
    try:
        if isinstance(process, agent_files.ProxiedProcess):
            return _fetch_agent_stacks(process, options)
        _require_alive(process)
        try:
            stacks = _dump_local_process(process, options, deadline)
        finally:
            # A process that ended meanwhile is reported as gone, whatever py-spy printed; and if
            # another process has its pid now, these may be the wrong stacks.
            _require_alive(process)
    except VllmopsError as error:
        stacks = _make_process_stacks(
            process, error=StacksGap(error.code, error.message, error.hint)
        )
    return msgspec.structs.replace(stacks, seconds=round(time.monotonic() - began, 3))


def _dump_local_process(process: Process, options: DumpOptions, deadline: float) -> ProcessStacks:
    """The stacks by py-spy, or by the agent if py-spy fails.

    Raises:
        VllmopsError: why py-spy failed, if there is no agent that answers.
    """
    try:
        threads, note = _try_dump_modes(find_pyspy(), process, options, deadline)
    except VllmopsError as error:
        try:
            stacks = _fetch_agent_stacks(process, options)
        except VllmopsError:
            raise error from None
        notes = filter(None, (f"listed by its agent, because {error.message}", stacks.note))
        instead = StacksGap(error.code, error.message, error.hint)
        return msgspec.structs.replace(stacks, note="; ".join(notes), instead=instead)
    return _make_process_stacks(process, threads=threads, note=note, stopped=STOPPED in note)


def _fetch_agent_stacks(process: Process, options: DumpOptions) -> ProcessStacks:
    """The stacks that the agent of a process lists; raises as `agent_client.open_agent` does."""
    stacks = agent_client.open_agent(process, timeout_s=AGENT_S).fetch_stacks()
    asked = ("local variables", options.locals), ("native frames", options.native)
    lacking = " and ".join(what for what, wanted in asked if wanted)
    return msgspec.structs.replace(stacks, note=f"without {lacking}") if lacking else stacks


def _make_process_stacks(process: Process, **fields: Any) -> ProcessStacks:
    return ProcessStacks(
        role=str(process.role),
        pid=process.pid,
        create_time=process.create_time,
        title=next((word for word in process.title.split() if word.startswith("VLLM::")), ""),
        **msgspec.structs.asdict(process.place),
        **fields,
    )


def _require_alive(process: Process) -> None:
    """Raise unless this same process is alive."""
    try:
        process_ = psutil.Process(process.pid)
        reused = process_identity.read_identity(process.pid) != process.identity
        zombie = not reused and process_.status() == psutil.STATUS_ZOMBIE
        parent = process_.ppid() if zombie else 0
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise VllmopsError(
            "stacks.gone", f"pid {process.pid} is gone", "vllmops ps shows what runs now"
        ) from None
    if reused:
        raise VllmopsError(
            "stacks.gone",
            f"pid {process.pid} is gone; another process has this pid now",
            "vllmops ps shows what runs now",
        )
    if zombie:
        raise VllmopsError(
            "stacks.zombie",
            f"pid {process.pid} has ended and is a zombie: its parent, pid {parent}, did not reap "
            "it",
            "vllmops logs shows its last log lines",
        )


def _try_dump_modes(
    program: str, process: Process, options: DumpOptions, deadline: float
) -> tuple[tuple[ThreadStack, ...], str]:
    """The stacks, taken as asked or in a simpler way, and a note if it was a simpler way.

    A process that can't be stopped (in a driver call, or held by a debugger) can still be read, and
    Python frames are useful without native ones. A process that is stopped already is read without
    stopping it: py-spy would wait in vain. Each attempt except the last may use a share of the time
    that is left: half, or more if it will hardly fail.
    """
    ways: list[tuple[str, ...]] = [("--nonblocking",)]
    halted = "" if options.nonblocking else _explain_unstoppable(process.pid, "tT")
    if not (options.nonblocking or halted):
        ways.insert(0, ())
        if options.native:
            ways.insert(0, ("--native",))
    locals_ = ("--locals",) if options.locals else ()
    budget_s = deadline - time.monotonic()
    first: VllmopsError | None = None
    for way in ways:
        left_s = max(deadline - time.monotonic(), 0.0)
        sure = "--native" not in way and not _explain_unstoppable(process.pid)
        limit_s = left_s * (1.0 if way is ways[-1] else SURE_SHARE if sure else 0.5)
        command = (program, "dump", "--json", "--pid", str(process.pid), *way, *locals_)
        try:
            threads = pyspy_json.parse_dump(
                _run_pyspy(command, process, limit_s, halted=bool(halted)),
                with_locals=options.locals,
            )
        except VllmopsError as error:
            first = first or error
            if isinstance(error, _PyspyTimeoutError) and not halted:
                _resume_process(process.pid)
            continue
        note = f"{UNSTOPPED}: {halted}" if halted else ""
        return threads, _explain_dump_mode(process, way, first) if first else note
    assert first is not None
    if isinstance(first, _PyspyTimeoutError):
        held = _explain_unstoppable(process.pid)
        raise VllmopsError(
            "stacks.timeout",
            f"py-spy did not finish with pid {process.pid} within {round(budget_s, 1):g} s"
            + (f": {held}" if held else ""),
            f"vllmops stacks dump -t {process.pid} --timeout {max(60, 3 * budget_s):.0f}",
        ) from first
    raise first


def _explain_dump_mode(process: Process, dump_options: Iterable[str], error: VllmopsError) -> str:
    """Why a dump was not taken as asked."""
    if "--nonblocking" not in dump_options:
        return f"without native frames: {error.message}"
    if held := _explain_unstoppable(process.pid):
        return f"{UNSTOPPED}: {held}"
    return f"{UNSTOPPED}, so frames may be inconsistent: {error.message}"


def _explain_unstoppable(pid: int, states: str = "tTD") -> str:
    """Why py-spy can't stop a process at the moment; empty if no reason is visible.

    Args:
        pid: the process.
        states: the kernel's letters for the thread states that count.
    """
    try:
        for task in proc.list_thread_ids(pid):
            letter = process_identity.read_stat_fields(f"{pid}/task/{task}")[0]
            match letter if letter in states else "":
                case "t":
                    tracer = proc.read_status(f"{pid}/task/{task}")["TracerPid"]
                    return f"it is being debugged by pid {tracer}"
                case "T":
                    return f"{STOPPED}; kill -CONT {pid} resumes it"
                case "D":
                    return f"thread {task} is in a system call that can't be interrupted"
    except (OSError, LookupError):
        pass  # gone, or not Linux
    return ""


def _run_pyspy(command: Sequence[str], process: Process, limit_s: float, *, halted: bool) -> bytes:
    """Run py-spy; returns its output.

    Args:
        command: its command line.
        process: its target.
        limit_s: seconds after which it is killed.
        halted: whether something else holds the target; if not, py-spy is killed too once it has
            held it for `HELD_S`.

    Raises:
        VllmopsError: ``pyspy.unusable``, one of `_parse_pyspy_error`, or `_PyspyTimeoutError`.
    """
    try:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise VllmopsError(
            "pyspy.unusable",
            f"{command[0]} can't be started: {error.strerror}",
            f"{sys.executable} -m pip install --force-reinstall py-spy",
        ) from error
    now = time.monotonic()
    end, held_since = now + limit_s, None
    while True:
        try:
            output, complaint = running.communicate(timeout=max(min(end - now, LOOK_S), 0.0))
            break
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        held_since = (held_since or now) if not halted and _is_traced(process.pid) else None
        if now >= end or (held_since and now - held_since >= HELD_S):
            _kill_pyspy(running)
            late = f"did not finish within {limit_s:.3g} s"
            held = f"held it for {HELD_S:g} s"
            raise _PyspyTimeoutError("stacks.timeout", f"py-spy {late if now >= end else held}")
    if running.returncode:
        raise _parse_pyspy_error(process, complaint.decode(errors="replace"))
    return output


def _kill_pyspy(running: subprocess.Popen[bytes]) -> None:
    """Kill py-spy, and what it has started: it may be a script around the one that traces."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(running.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    running.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.communicate(timeout=KILL_WAIT_S)


def _is_traced(pid: int) -> bool:
    """Whether a tracer holds the main thread of a process, and so all of them."""
    with contextlib.suppress(OSError):
        return process_identity.read_stat_fields(pid)[0] == "t"
    return False


def _resume_process(pid: int) -> None:
    """See to it that a process runs on after a py-spy that was killed.

    The kernel lets it go; but where the tracer attached by a signal, the process may stop by that
    signal a moment later, and SIGCONT, which a running process ignores, prevents that.
    """
    end = time.monotonic() + KILL_WAIT_S
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGCONT)
        while _explain_unstoppable(pid, "tT") and time.monotonic() < end:
            time.sleep(0.01)
            os.kill(pid, signal.SIGCONT)


def _parse_pyspy_error(process: Process, complaint: str) -> VllmopsError:
    """The error for what py-spy printed on stderr: a message and its causes."""
    message = complaint.partition("Stack backtrace:")[0]
    if any(words in message for words in NOT_PYTHON):
        return VllmopsError(
            "stacks.not-python",
            f"pid {process.pid} does not run Python, or has not started it yet",
            f"for native stacks: gdb -p {process.pid} -batch -ex 'thread apply all bt'",
        )
    if any(words in message for words in REFUSED):
        # Not Linux, or the process is gone: py-spy's own message is used.
        with contextlib.suppress(OSError):
            return make_refusal_error(process.pid, read_rights(process.pid))
    lines = [
        line.strip() for line in message.splitlines() if line.strip() not in {"", "Caused by:"}
    ]
    causes = dict.fromkeys(re.sub(r"^(Error|\d+): ", "", line) for line in lines)
    return VllmopsError(
        "stacks.failed",
        f"py-spy failed on pid {process.pid}: {': '.join(causes) or 'it gives no reason'}",
        f"vllmops stacks dump -t {process.pid} --nonblocking",
    )
