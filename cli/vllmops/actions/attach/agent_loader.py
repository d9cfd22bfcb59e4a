"""Loads the agent into the processes of a server that runs without it."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp

import vllmops

from ...collect.agents import agent_client, agent_files
from ...collect.machine import proc, ptrace_permission
from ...collect.machine.processes import Process, format_process_name, is_alive
from ...collect.stacks import pyspy
from ...model.stacks import DumpOptions
from ...support.errors import ExitCode, VllmopsError
from ...support.home import format_user
from . import injector
from .ptrace import BusyError

PACKAGE = Path(vllmops.__file__).parent
BOOT = PACKAGE / "agent/attach_bootstrap.py"
# Where the agent can't be asked, `plan_attach` says what attaching lacks.
NO_AGENT = {"agent.absent", "agent.stale", "agent.other-user", "agent.unreadable"}
PAUSE_S = 0.05
PYSPY_S = 5.0
STATES = {"T": "stopped by a signal", "t": "being debugged", "Z": "dead, a zombie"}


@dataclass(frozen=True)
class AttachPlan:
    """How the agent can be brought into a process.

    Args:
        process: where.
        tids: the threads that could run it, the best first; none if Python itself does it.
    """

    process: Process
    tids: tuple[int, ...]


@dataclass(frozen=True)
class AttachResult:
    """A process with its new agent.

    Args:
        process: where.
        stopped_s: seconds for which one thread was stopped; None if none was.
        seconds: until the agent answered.
    """

    process: Process
    stopped_s: float | None
    seconds: float


def needs_agent(process: Process) -> bool:
    """Whether a process has no agent.

    Raises:
        VllmopsError: as `agent_client.open_agent` does, where there is one with which something is
            wrong.
    """
    try:
        agent_client.open_agent(process)
    except VllmopsError as error:
        if error.code not in NO_AGENT:
            raise
        return True
    return False


def plan_attach(process: Process) -> AttachPlan:
    """Find out whether the agent can be brought into a process, and how; changes nothing.

    Raises:
        VllmopsError: ``attach.other-user``, ``attach.gone``, ``attach.state``,
            ``attach.container``, ``attach.not-python``, ``attach.busy``, or what
            `ptrace_permission.make_refusal_error` says.
    """
    try:
        uid = agent_files.read_process_uid(process)
        if uid != os.geteuid():
            raise VllmopsError(
                "attach.other-user",
                f"{format_process_name(process)} belongs to {format_user(uid)}, and "
                "you are "
                f"{format_user(os.geteuid())}",
                f"sudo -u {format_user(uid)} vllmops attach -t {process.pid}",
                exit_code=ExitCode.NOT_AUTHORISED,
            )
        state = proc.read_status(str(process.pid))["State"]
        if state[0] in STATES:
            raise VllmopsError(
                "attach.state",
                f"{format_process_name(process)} is {STATES[state[0]]}: it runs no Python",
                f"kill -CONT {process.pid}" if state[0] == "T" else "vllmops ps",
            )
        inside = Path(f"/proc/{process.pid}/root{BOOT}")
        if not inside.exists() or not inside.samefile(BOOT):
            raise VllmopsError(
                "attach.container",
                f"{format_process_name(process)} does not see the files of this "
                "vllmops "
                f"({PACKAGE}): it is "
                "in a container",
                "install vllmops-cli in the container, then: docker exec CONTAINER vllmops attach",
            )
        tids = find_borrowable_threads(process) if injector.is_supported() else ()
    except PermissionError as error:
        raise make_refused_error(process) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise make_gone_error(process) from error
    if injector.is_supported() and not tids:
        raise VllmopsError(
            "attach.busy",
            f"no thread of {format_process_name(process)} waits in the kernel now",
            f"try again: vllmops attach -t {process.pid}",
        )
    return AttachPlan(process, tids)


def find_borrowable_threads(process: Process) -> tuple[int, ...]:
    """The threads to borrow, the best first.

    Python's own idle ones come first: nobody waits for them. The main thread's event loop may have
    more to do, and in a native thread Python has to make itself at home.
    """
    target = injector.PythonProcess(process.pid)
    # Both can fail, and are asked for before anything is changed.
    _ = target.function_addresses, target.entry_point
    dump = pyspy.dump_stacks([process], DumpOptions(nonblocking=True), timeout_s=PYSPY_S).processes[
        0
    ]
    python = [thread.tid for thread in dump.threads if thread.state == "idle" and thread.tid]
    first = [tid for tid in python if tid != process.pid]
    main = [tid for tid in python if tid == process.pid]
    native = [
        tid
        for tid in target.list_thread_ids()
        if tid not in {thread.tid for thread in dump.threads}
    ]
    return tuple(tid for tid in (*first, *main, *native) if target.is_idle(tid))


def attach_agent(plan: AttachPlan, *, patch: bool, timeout_s: float) -> AttachResult:
    """Bring the agent into a process, and wait until it answers.

    Args:
        plan: made by `plan_attach`, a moment ago.
        patch: whether to apply patches too.
        timeout_s: seconds to wait.

    Raises:
        VllmopsError: ``attach.timeout``, ``attach.failed``, ``attach.machine``, or what
            `plan_attach` raises.
    """
    process, began = plan.process, time.monotonic()
    deadline = began + timeout_s
    with TemporaryDirectory(prefix="vllmops-attach-") as folder:
        problem = Path(folder) / "problem"
        code = build_boot_code(process, patch, problem)
        stopped_s = script = None
        try:
            if plan.tids:
                stopped_s = run_in_borrowed_thread(plan, code, deadline)
            else:
                script = schedule_remote_exec(process, code)
        except PermissionError as error:
            raise make_refused_error(process) from error
        except OSError as error:
            raise (
                make_failed_error(process, str(error))
                if is_alive(process)
                else make_gone_error(process)
            ) from error
        while time.monotonic() < deadline:
            with suppress(VllmopsError):
                agent_client.open_agent(process)
                return AttachResult(process, stopped_s, time.monotonic() - began)
            if problem.exists():
                raise make_failed_error(process, problem.read_text("utf-8", "replace"))
            if not is_alive(process):
                if script:
                    script.unlink(missing_ok=True)
                raise make_gone_error(process)
            time.sleep(PAUSE_S)
    raise VllmopsError(
        "attach.timeout",
        f"the agent of {format_process_name(process)} did not answer within "
        f"{timeout_s:g} s: "
        "a thread "
        "holds the GIL, or Python does not run; the agent starts as soon as Python runs again",
        f"vllmops stacks dump --native -t {process.pid}",
    )


def build_boot_code(process: Process, patch: bool, problem: Path) -> str:
    """The line of Python that starts the agent in a thread of its own, and is done at once."""
    options = {
        "package": str(PACKAGE),
        "home": str(agent_files.find_state_home(process)),
        "patch": patch,
        "error_file": str(problem),
    }
    source = f"exec(compile(open({str(BOOT)!r}).read(), {str(BOOT)!r}, 'exec'))"
    names = {"__name__": "vllmops attach", "options": options}
    return f"__import__('_thread').start_new_thread(exec, ({source!r}, {names!r}))"


def run_in_borrowed_thread(plan: AttachPlan, code: str, deadline: float) -> float:
    """Have one of the threads run a line of Python; returns for how many seconds it was stopped.

    Raises:
        VllmopsError: ``attach.busy`` or ``attach.gone``.
        PermissionError: the kernel does not allow it.
    """
    target = injector.PythonProcess(plan.process.pid)
    while time.monotonic() < deadline:
        if not is_alive(plan.process):
            raise make_gone_error(plan.process)
        for tid in plan.tids:
            if not target.is_idle(tid):
                continue
            # In a thread of its own: with it ends whatever hold we have.
            with ThreadPoolExecutor(1) as pool, suppress(BusyError):
                return pool.submit(injector.inject_code, target, tid, code).result()
        time.sleep(PAUSE_S)
    raise VllmopsError(
        "attach.busy",
        f"no thread of {format_process_name(plan.process)} waited in the kernel long enough",
        f"try again: vllmops attach -t {plan.process.pid}",
        exit_code=ExitCode.TIMED_OUT,
    )


def schedule_remote_exec(process: Process, code: str) -> Path:
    """Have Python 3.14 or newer run a file at the main thread's next safe point (PEP 768).

    Returns:
        The file. It is there until it is run, however much later that is.

    Raises:
        VllmopsError: ``attach.machine``.
    """
    python = os.readlink(f"/proc/{process.pid}/exe")
    descriptor, name = mkstemp(prefix=f"vllmops-attach-{process.pid}-", suffix=".py")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(f"__import__('os').unlink({name!r})\n{code}\n")
    script = Path(name)
    call = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
    words = (python, "-c", call, str(process.pid), name)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        script.unlink(missing_ok=True)
        last = done.stderr.strip().rpartition("\n")[2]
        raise VllmopsError(
            "attach.machine",
            f"on {os.uname().machine}, attach needs sys.remote_exec of Python 3.14, and {python} "
            f"says: {last}",
            "start the server with vllmops serve, or with vllmops-cli installed beside vLLM",
        )
    return script


def make_failed_error(process: Process, reason: str) -> VllmopsError:
    return VllmopsError(
        "attach.failed",
        f"the agent can't run in {format_process_name(process)}: {reason}",
        f"vllmops stacks dump -t {process.pid} needs no agent",
    )


def make_gone_error(process: Process) -> VllmopsError:
    return VllmopsError("attach.gone", f"{format_process_name(process)} is gone", "vllmops ps")


def make_refused_error(process: Process) -> VllmopsError:
    """The kernel did not allow it: a thread has one tracer at most, and then there are rights."""
    if tracer := find_tracer_pid(process):
        return VllmopsError(
            "attach.traced",
            f"pid {tracer} (a debugger or strace, for example) traces "
            f"{format_process_name(process)}, and "
            "the kernel allows one tracer at a time",
            f"end pid {tracer}, then vllmops attach -t {process.pid}",
        )
    if not is_alive(process):
        return make_gone_error(process)
    return ptrace_permission.make_refusal_error(
        process.pid, ptrace_permission.read_rights(process.pid), "attach"
    )


def find_tracer_pid(process: Process) -> int:
    """The pid of whoever traces a process or one of its threads; 0 if nobody does."""
    with suppress(OSError):
        for tid in injector.PythonProcess(process.pid).list_thread_ids():
            if tracer := int(proc.read_status(f"{process.pid}/task/{tid}")["TracerPid"]):
                return tracer
    return 0
