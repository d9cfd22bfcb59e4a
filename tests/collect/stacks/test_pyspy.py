"""Real processes, real py-spy; a stand-in for py-spy only where it can't be made to fail."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from vllmops.collect.machine import proc
from vllmops.collect.machine.processes import Process
from vllmops.collect.stacks import pyspy
from vllmops.model import process_identity, snapshot_files
from vllmops.model.roles import Role
from vllmops.model.stacks import DumpOptions, ProcessStacks, StacksSnapshot
from vllmops.support.errors import VllmopsError

from ...support.children import Spawn
from ...support.extent import programs
from ...support.waiting import until

pytestmark = programs

# PR_SET_PTRACER_ANY: with Yama's ptrace_scope 1 a sibling may not look into a process otherwise.
READABLE = "import ctypes; ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))\n"

THREADS = """
    import threading, time
    begun = threading.Barrier(3)

    def generate(prompt):
        begun.wait()
        time.sleep(1000)

    def spin():
        begun.wait()
        while True:
            pass

    threading.Thread(target=generate, args=["tell me"], name="waiter", daemon=True).start()
    threading.Thread(target=spin, name="spinner", daemon=True).start()
    begun.wait()
    print("up", flush=True)
    time.sleep(1000)
"""

COUNTER = """
    import itertools, sys, time

    print("up", flush=True)
    for count in itertools.count():
        time.sleep(0.001)
        sys.stdout.write("x")
        sys.stdout.flush()
"""

# A parent waits for a vfork child in the kernel, where no signal and no tracer can stop it.
UNINTERRUPTIBLE = """
    import ctypes, threading, time

    def call_driver():
        if ctypes.CDLL(None).vfork() == 0:
            time.sleep(1000)

    print("up", flush=True)
    call_driver()
"""

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine all takes its time."""
    monkeypatch.setattr(pyspy.dump_stacks, "__kwdefaults__", {"timeout_s": 120.0, "server": None})
    monkeypatch.setattr(pyspy, "AGENT_S", 60.0)
    monkeypatch.setattr(pyspy, "HELD_S", 60.0)
    monkeypatch.setattr(pyspy, "KILL_WAIT_S", 60.0)


@contextlib.contextmanager
def python(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs ``source`` and has said ``up``."""
    started = subprocess.Popen(
        [sys.executable, "-c", READABLE + textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert started.stdout is not None
    try:
        assert started.stdout.readline() == b"up\n"
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        started.stdout.close()


def process(pid: int, role: Role = Role.ENGINE) -> Process:
    return Process(role=role, pid=pid, start_ticks=process_identity.read_identity(pid).start_ticks)


def dump(
    pid: int, options: DumpOptions | None = None, *, timeout_s: float = 120.0
) -> ProcessStacks:
    return pyspy.dump_stacks([process(pid)], options, timeout_s=timeout_s).processes[0]


def functions(stacks: ProcessStacks) -> list[str]:
    return [frame.function for thread in stacks.threads for frame in thread.frames]


def code(stacks: ProcessStacks) -> str:
    assert stacks.error is not None, "it was dumped"
    assert stacks.threads == ()
    return stacks.error.code


def state(pid: int) -> str:
    return psutil.Process(pid).status()


def dump_sleeping_threads(pid: int, options: DumpOptions | None = None) -> ProcessStacks:
    """A dump of `THREADS` once all but the spinner have come to their sleep."""

    def asleep() -> ProcessStacks | None:
        stacks = dump(pid, options)
        # One that waits for the GIL is idle, too; the spinner lets go of it for a moment then.
        states = [(thread.state, thread.owns_gil) for thread in stacks.threads]
        rest = [("active", True), ("idle", False), ("idle", False)]
        return stacks if states == rest else None

    return until(asleep)


def until_state(pid: int, wanted: str) -> None:
    until(lambda: state(pid) == wanted, explain=lambda: f"{state(pid)} and not {wanted}")


def test_threads_with_names_states_and_frames_the_busy_one_first() -> None:
    with python(THREADS) as target:
        stacks = dump_sleeping_threads(target.pid)
    assert stacks.error is None
    assert stacks.note == ""
    assert [thread.name for thread in stacks.threads] == ["spinner", "MainThread", "waiter"]
    assert stacks.threads[1].tid == target.pid
    spin = stacks.threads[0].frames[0]
    assert (spin.function, spin.file) == ("spin", "<string>")
    assert spin.line in {12, 13}
    run = stacks.threads[0].frames[1]
    assert run.short_file == "threading.py"
    assert run.file.endswith("/threading.py")
    assert Path(run.file).is_absolute()


def test_local_variables_only_when_asked_for() -> None:
    with python(THREADS) as target:
        without, with_ = (
            dump_sleeping_threads(target.pid),
            dump_sleeping_threads(target.pid, DumpOptions(locals=True)),
        )
    assert all(frame.locals is None for thread in without.threads for frame in thread.frames)
    frame = with_.threads[2].frames[0]
    assert frame.locals is not None
    assert [(item.name, item.value, item.argument) for item in frame.locals] == [
        ("prompt", '"tell me"', True)
    ]


def test_native_frames() -> None:
    with python(THREADS) as target:
        dump_sleeping_threads(target.pid)
        stacks = dump_sleeping_threads(target.pid, DumpOptions(native=True))
    assert stacks.note == ""
    waiter = stacks.threads[2].frames
    assert waiter[0].function != "generate"
    assert waiter[0].line is None
    assert "generate" in [frame.function for frame in waiter]


def test_nonblocking() -> None:
    with python(THREADS) as target:
        assert "generate" in functions(dump(target.pid, DumpOptions(nonblocking=True)))


def test_dead_process_does_not_prevent_other_dumps() -> None:
    with python(THREADS) as target, python(THREADS) as other:
        gone = process(other.pid, Role.WORKER)
        other.kill()
        other.wait()
        snapshot = pyspy.dump_stacks([gone, process(target.pid)], server="demo")
    assert [item.role for item in snapshot.processes] == ["worker", "engine"]
    assert code(snapshot.processes[0]) == "stacks.gone"
    assert "generate" in functions(snapshot.processes[1])
    assert snapshot.server == "demo"


def test_a_reused_pid_is_never_dumped() -> None:
    with python(THREADS) as target:
        now = process(target.pid)
        old = Process(role=now.role, pid=now.pid, start_ticks=now.start_ticks - 3600)
        stacks = pyspy.dump_stacks([old]).processes[0]
    assert code(stacks) == "stacks.gone"
    assert stacks.error is not None
    assert "another process" in stacks.error.message


def test_a_pid_reused_while_it_is_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    with python(THREADS) as target:
        # The pid can't be made to change hands at that moment: the table is told to say so.
        asked = process(target.pid)
        seen = iter([asked.identity, asked.identity._replace(start_ticks=2**40)])
        monkeypatch.setattr(process_identity, "read_identity", lambda _: next(seen))
        assert code(pyspy.dump_stacks([asked]).processes[0]) == "stacks.gone"


def test_a_zombie() -> None:
    with python("import os, time; print('up', flush=True); os.fork() or os._exit(0); "
                "time.sleep(1000)") as target:  # fmt: skip
        children = until(psutil.Process(target.pid).children)
        until_state(children[0].pid, psutil.STATUS_ZOMBIE)
        stacks = dump(children[0].pid)
    assert code(stacks) == "stacks.zombie"
    assert stacks.error is not None
    assert f"parent, pid {target.pid}," in stacks.error.message


def test_process_without_python_is_reported() -> None:
    target = subprocess.Popen(["sleep", "1000"])
    try:
        assert code(dump(target.pid)) == "stacks.not-python"
    finally:
        target.kill()
        target.wait()


def test_a_stopped_process_is_dumped_and_stays_stopped() -> None:
    with python(THREADS) as target:
        target.send_signal(signal.SIGSTOP)
        until_state(target.pid, psutil.STATUS_STOPPED)
        stacks = dump(target.pid, DumpOptions(native=True))
        assert state(target.pid) == psutil.STATUS_STOPPED
        target.send_signal(signal.SIGCONT)
        until_state(target.pid, psutil.STATUS_SLEEPING)
        assert dump(target.pid).note == ""
    assert "generate" in functions(stacks)
    assert f"kill -CONT {target.pid}" in stacks.note


def test_a_process_that_nothing_can_stop_is_read_all_the_same() -> None:
    with python(UNINTERRUPTIBLE) as target:
        until_state(target.pid, psutil.STATUS_DISK_SLEEP)
        for timeout_s in (2.0, 20.0, 60.0):
            stacks = dump(target.pid, timeout_s=timeout_s)  # without the limit, for ever
            if stacks.error is None:  # on a busy machine there may be no time left to read it
                break
    assert stacks.error is None
    assert "call_driver" in functions(stacks)
    assert f"thread {target.pid} is in a system call" in stacks.note


def test_a_process_in_a_debugger() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with python(THREADS) as target:
        assert libc.ptrace(PTRACE_SEIZE, target.pid, None, None) == 0
        assert libc.ptrace(PTRACE_INTERRUPT, target.pid, None, None) == 0
        os.waitpid(target.pid, WALL)
        stacks = dump(target.pid)
        libc.ptrace(PTRACE_DETACH, target.pid, None, None)
    assert "generate" in functions(stacks)
    assert f"debugged by pid {os.getpid()}" in stacks.note


def test_a_pyspy_that_is_late_is_killed_and_its_target_runs_on() -> None:
    with python(COUNTER) as target:
        assert target.stdout is not None
        for attempt in range(60):
            stacks = dump(
                target.pid, DumpOptions(native=attempt % 2 == 0), timeout_s=attempt / 2000
            )
            assert stacks.error is None or code(stacks) == "stacks.timeout"
            target.stdout.read(1)
        os.set_blocking(target.stdout.fileno(), False)
        while target.stdout.read(1 << 16):
            pass  # what it wrote meanwhile
        os.set_blocking(target.stdout.fileno(), True)
        assert target.stdout.read(20) == b"x" * 20
        assert psutil.Process(target.pid).status() != psutil.STATUS_STOPPED


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in py-spy's place: the real one can't be made to fail in this way."""
    program = tmp_path / "py-spy"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(pyspy, "find_pyspy", lambda: str(program))


def has_ended(child: psutil.Process) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_dumps_of_all_processes_share_one_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "#!/bin/sh\nexec sleep 1000\n")
    me = process(os.getpid())
    before = psutil.Process().children()
    limits: list[float] = []
    together = threading.Barrier(5)
    run = pyspy._run_pyspy

    def record_time_limit(
        command: Sequence[str], process: Process, limit_s: float, *, halted: bool
    ) -> bytes:
        limits.append(limit_s)
        if "--native" in command:  # the first of each: one after the other would not get on
            together.wait()
        return run(command, process, limit_s, halted=halted)

    monkeypatch.setattr(pyspy, "_run_pyspy", record_time_limit)
    began = time.monotonic()
    snapshot = pyspy.dump_stacks([me] * 5, DumpOptions(native=True), timeout_s=1.0)
    assert time.monotonic() - began > 0.9
    # Three ways each, which share what there is.
    assert len(limits) == 15
    assert sum(limits) <= 5.0
    assert {code(item) for item in snapshot.processes} == {"stacks.timeout"}
    error = snapshot.processes[0].error
    assert error is not None
    assert "py-spy did not finish" in error.message
    assert "--timeout 60" in error.hint
    until(lambda: all(map(has_ended, set(psutil.Process().children()).difference(before))))


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        ("#!/bin/sh\necho 'Error: no way\n\nCaused by:\n    0: broken' >&2; exit 1\n",
         "stacks.failed", "no way: broken"),
        ("#!/bin/sh\nexit 1\n", "stacks.failed", "gives no reason"),
        ("#!/bin/sh\necho '[{\"frames\": 1}]'\n", "stacks.unreadable", "unknown format"),
        ("#!/bin/sh\nprintf '\\377'\n", "stacks.unreadable", "unknown format"),
        ("no program\n", "pyspy.unusable", "can't be started"),
    ],
)  # fmt: skip
def test_pyspy_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str, words: str
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    stacks = dump(os.getpid())
    assert code(stacks) == expected
    assert stacks.error is not None
    assert words in stacks.error.message
    assert stacks.error.hint


def test_without_native_frames_rather_than_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        "#!/bin/sh\ncase \"$*\" in *--native*) echo 'Error: no unwinding' >&2; exit 1;; esac\n"
        f'exec {pyspy.find_pyspy()} "$@"\n',
    )
    with python(THREADS) as target:
        stacks = dump(target.pid, DumpOptions(native=True))
    assert "generate" in functions(stacks)
    assert stacks.note.startswith("without native frames: ")
    assert "no unwinding" in stacks.note


def test_pyspy_is_found_where_pip_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = pyspy.find_pyspy()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(pyspy.find_pyspy()).samefile(beside)


def test_pyspy_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    # It is one of our dependencies, so it can't be absent here.
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    with pytest.raises(VllmopsError) as caught:
        pyspy.dump_stacks([])
    assert caught.value.code == "pyspy.missing"
    assert caught.value.hint == f"{tmp_path}/python -m pip install py-spy"


def test_a_snapshot_survives_a_file(tmp_path: Path) -> None:
    with python(THREADS) as target:
        snapshot = pyspy.dump_stacks([process(target.pid)], DumpOptions(locals=True))
    snapshot_files.save_snapshot(tmp_path / "stacks.json", snapshot)
    assert snapshot_files.load_snapshot(tmp_path / "stacks.json", StacksSnapshot) == snapshot


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
             # Reading the files of this interpreter is no right over processes.
             "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]  # fmt: skip
IN_CONTAINER = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]


@pytest.mark.root_only
@pytest.mark.parametrize(
    ("wrap", "expected", "words", "hint"),
    [
        (AS_NOBODY, "stacks.other-user", "belongs to root and you are nobody", "sudo "),
        (IN_CONTAINER, "stacks.no-capability", "than this container", "--cap-add SYS_PTRACE"),
    ],
)
def test_no_permission(wrap: list[str], expected: str, words: str, hint: str) -> None:
    with python(THREADS) as target:
        found = process(target.pid)
        program = textwrap.dedent(f"""
            import msgspec
            from vllmops.collect.stacks import pyspy
            from vllmops.collect.machine.processes import Process
            from vllmops.model.roles import Role
            found = Process(role=Role.ENGINE, pid={found.pid}, start_ticks={found.start_ticks})
            print(msgspec.json.encode(pyspy.dump_stacks([found]).processes[0].error).decode())
        """)
        shown = subprocess.run(
            [*wrap, sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
    error = json.loads(shown.stdout)
    assert error["code"] == expected
    assert words in error["message"]
    assert hint in error["hint"]


# A py-spy that attaches, and then hangs: it holds its target, in a process that the program given
# as py-spy has started.
HANGING = """#!/bin/sh
{python} -c '
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.ptrace({request}, int(sys.argv[1]), None, None)
if {request} == 0x4206:
    libc.ptrace(0x4207, int(sys.argv[1]), None, None)
open(sys.argv[2], "a").write("held\\n")
time.sleep(1000)
' "$4" {held}
"""
PTRACE_ATTACH = 16


@pytest.mark.parametrize("request_", [PTRACE_ATTACH, PTRACE_SEIZE])
def test_a_pyspy_that_holds_its_target_and_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawn: Spawn, request_: int
) -> None:
    child = spawn(role=Role.ENGINE)
    monkeypatch.setattr(pyspy, "HELD_S", 1000.0)
    held = tmp_path / "held"
    stand_in(
        tmp_path,
        monkeypatch,
        HANGING.format(python=sys.executable, request=request_, held=held),
    )
    child.send("import time\nwhile True: time.sleep(0.01); beats = time.monotonic()")
    for timeout_s in (3.0, 30.0):
        found = pyspy.dump_stacks([child.process], DumpOptions(locals=True), timeout_s=timeout_s)
        (stacks,) = found.processes
        if held.exists():  # on a busy machine it may have been killed before
            break
    assert held.read_text()  # it was there
    assert state(child.process.pid) in {psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING}
    assert proc.read_status(child.process.pid)["TracerPid"] == "0"
    used = psutil.Process(child.process.pid).num_ctx_switches().voluntary
    until(lambda: psutil.Process(child.process.pid).num_ctx_switches().voluntary > used + 20)
    assert (stacks.source, stacks.role, stacks.error) == ("agent", "engine", None)
    assert stacks.instead is not None
    assert stacks.instead.code == "stacks.timeout"
    assert "did not finish" in stacks.note
    assert "without local variables" in stacks.note
    main = next(thread for thread in stacks.threads if thread.name == "MainThread")
    assert main.tid == child.process.pid
    assert "<module>" in [frame.function for frame in main.frames]


def test_no_pyspy_holds_its_target_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawn: Spawn
) -> None:
    child = spawn(role=Role.ENGINE)
    monkeypatch.setattr(pyspy, "HELD_S", 0.5)
    stand_in(
        tmp_path,
        monkeypatch,
        HANGING.format(python=sys.executable, request=PTRACE_SEIZE, held=tmp_path / "held"),
    )
    # Each of the two ways is given up after half a second, not after its share of an hour.
    (stacks,) = pyspy.dump_stacks([child.process], timeout_s=3600.0).processes
    assert stacks.source == "agent"


def test_the_agent_sees_what_pyspy_sees(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    child = spawn(role=Role.ENGINE)
    child.run(
        "import threading, queue, xml.dom.minidom\n"
        "class Deep:\n"
        "    def wait(self): queue.Queue().get()\n"
        "threading.Thread(target=Deep().wait, name='deep', daemon=True).start()"
    )
    until(lambda: "Queue.get" in functions(pyspy.dump_stacks([child.process]).processes[0]))
    (by_pyspy,) = pyspy.dump_stacks([child.process]).processes
    monkeypatch.setattr(pyspy, "find_pyspy", raise_missing_pyspy)
    (by_agent,) = pyspy.dump_stacks([child.process]).processes
    assert (by_pyspy.source, by_agent.source) == ("py-spy", "agent")
    assert by_agent.instead is not None
    assert by_agent.instead.code == "pyspy.missing"
    assert by_agent.pid == by_pyspy.pid
    assert by_agent.create_time == pytest.approx(by_pyspy.create_time, abs=1)
    seen = [{t.name: (t.tid, t.frames) for t in s.threads} for s in (by_pyspy, by_agent)]
    for name in ("MainThread", "deep"):
        assert seen[0][name] == seen[1][name]
    # Without an agent there is nobody to stand in.
    silent = spawn(role=Role.ENGINE, VLLMOPS_DISABLE="1")
    with pytest.raises(VllmopsError) as caught:
        pyspy.dump_stacks([silent.process])
    assert caught.value.code == "pyspy.missing"
    one, other = pyspy.dump_stacks([child.process, silent.process]).processes
    assert (one.source, code(other)) == ("agent", "pyspy.missing")


def raise_missing_pyspy() -> str:
    raise VllmopsError("pyspy.missing", "py-spy is not installed; it reads the stacks")
