"""``vllmops stacks dump`` of a core file, which is real, and of a GPU, up to CUDA's pipe."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.collect.machine import processes
from vllmops.collect.machine.cuda_core_dumps import FLAGS, build_coredump_environment
from vllmops.collect.stacks import core_files, core_reader
from vllmops.model import snapshot_files
from vllmops.model.pasted_stacks import PastedStacks
from vllmops.model.stacks import DumpOptions, StacksSnapshot
from vllmops.rules.stacks import explanation

from ..support.commands import Vllmops
from ..support.waiting import until

TABLE = processes.read_process_table  # the fixture `home` hides what is not its own
MOST_CORE = 1 << 30
NOBODY = 65534
TITLE = "VLLM::Worker_TP1"
# Two threads of a worker: one is in a collective, the other one waits.
WORKER = """
import ctypes, threading

ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # readable under Yama's ptrace_scope 1
event = threading.Event()

def all_reduce(secret="a-secret-prompt"):
    event.wait()

def execute_model():
    all_reduce()

def worker_busy_loop():
    execute_model()

def async_output_busy_loop():
    event.wait()

threading.Thread(target=async_output_busy_loop, daemon=True).start()
print("up", flush=True)
worker_busy_loop()
"""


@contextlib.contextmanager
def start_titled_process(
    folder: Path, title: str, *words: str, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process with a title, which may leave a core file in its folder."""
    process = subprocess.Popen(
        [title, *words],
        executable=sys.executable,
        # A title in place of the program's name hides its library from the interpreter.
        env={**os.environ, "PYTHONHOME": sys.base_prefix, **env},
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    resource.prlimit(process.pid, resource.RLIMIT_CORE, (MOST_CORE, MOST_CORE))
    try:
        assert process.stdout.readline() == b"up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def left_by(process: subprocess.Popen[bytes], folder: Path) -> Path:
    """The core file of a process that is aborted; of gdb where the kernel pipes cores away."""
    if Path("/proc/sys/kernel/core_pattern").read_text()[0] in "|/":
        if not shutil.which("gcore"):
            pytest.skip("the kernel pipes cores away, and gdb is not installed")
        subprocess.run(["gcore", "-o", folder / "core", str(process.pid)], check=True)
    else:
        process.send_signal(signal.SIGABRT)
        process.wait()
    (found,) = folder.glob("core*")
    return found


Kept = tuple[Path, StacksSnapshot]


@pytest.fixture(scope="module")
def core_and_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """The core file of a worker, and the stacks that it had while it lived."""
    folder = tmp_path_factory.mktemp("core")
    script, saved = folder / "worker.py", folder / "live.json"
    script.write_text(WORKER)
    with start_titled_process(folder, TITLE, str(script)) as process:
        dump = (sys.executable, "-m", "vllmops", "stacks", "dump", "-t", str(process.pid))
        subprocess.run([*dump, "--save", saved], check=True, capture_output=True)
        return left_by(process, folder), snapshot_files.load_snapshot(saved, StacksSnapshot)


def threads(process: Any) -> dict[int, list[tuple[str, int]]]:
    """The places of each thread, as py-spy and pystack both name them."""
    return {
        thread["tid"]: [
            (frame["function"].rpartition(".")[2], frame["line"]) for frame in thread["frames"]
        ]
        for thread in process["threads"]
    }


def test_a_core_shows_what_a_live_dump_showed(
    vllmops: Vllmops, core_and_snapshot: Kept, home: Path
) -> None:
    path, live = core_and_snapshot
    saved = home / "saved.json"
    shown = vllmops("stacks", "dump", "--core", str(path), "--json", "--save", str(saved))
    assert shown.code == 0, shown.out
    (found,) = shown.data["processes"]
    (before,) = live.processes
    assert (found["role"], found["pid"], found["title"]) == ("worker", before.pid, TITLE)
    assert (found["tp_rank"], found["source"], found["error"]) == (1, "pystack", None)
    assert threads(found) == {
        thread.tid: [(f.function.rpartition(".")[2], f.line) for f in thread.frames]
        for thread in before.threads
    }
    assert "secret" not in shown.out
    assert snapshot_files.load_snapshot(saved, StacksSnapshot).processes[0].pid == before.pid
    text = vllmops("stacks", "dump", "--core", str(path)).out
    assert text.startswith(f"Worker_TP1 pid {before.pid}\n")
    assert "    execute_model (" in text


def test_the_main_thread_has_its_name_in_a_core_of_gdb() -> None:
    """gdb keeps what the kernel calls a thread: the program, where nobody has named it."""
    thread: Any = SimpleNamespace(
        name="python", tid=7, holds_the_gil=0, all_frames=(), native_frames=(), python_version=()
    )
    assert core_reader._make_thread(thread, 7, DumpOptions()).name == "MainThread"
    assert core_reader._make_thread(thread, 6, DumpOptions()).name == "python"


def test_a_core_is_explained_as_a_live_dump_is(vllmops: Vllmops, core_and_snapshot: Kept) -> None:
    path, live = core_and_snapshot
    shown = vllmops("stacks", "dump", "--core", str(path), "--explain", "--json")
    expected = explanation.explain_stacks(PastedStacks((live,)))
    assert [f["code"] for f in shown.data["findings"]] == [f.code for f in expected.findings]
    assert shown.data["findings"][0]["subject"] == expected.findings[0].subject
    assert shown.data["verdict"] == expected.verdict == "maybe"
    assert shown.data["processes"][0]["title"] == TITLE


def test_locals_and_native_frames_of_a_core(vllmops: Vllmops, core_and_snapshot: Kept) -> None:
    dump = ("stacks", "dump", "--core", str(core_and_snapshot[0]))
    assert 'secret = "a-secret-prompt"' in vllmops(*dump, "--locals").out
    native = vllmops(*dump, "--native", "--json").data["processes"][0]
    plain = vllmops(*dump, "--json").data["processes"][0]
    for tid, places in threads(plain).items():
        deeper = threads(native)[tid]
        assert [place for place in deeper if place in places] == places
        assert len(deeper) > len(places)


def cut(core: Path, to: Path) -> None:
    to.write_bytes(core.read_bytes()[: core.stat().st_size // 2])


def header(core: Path, to: Path) -> None:
    to.write_bytes(core.read_bytes()[:100])


def zeros(core: Path, to: Path) -> None:
    """A sparse file of 20 GB."""
    with to.open("wb") as file:
        file.truncate(20 << 30)


def write_core_without_memory(core: Path, to: Path) -> None:
    """A core whose memory is all zeros."""
    to.write_bytes(core.read_bytes()[: 1 << 14])
    os.truncate(to, core.stat().st_size)


def program(core: Path, to: Path) -> None:
    shutil.copy(sys.executable, to)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda _, __: None, "file.unreadable"),
        (lambda _, to: to.mkdir(), "file.unreadable"),
        (lambda _, to: os.mkfifo(to), "file.unreadable"),
        (lambda _, to: to.write_text("no core"), "core.not-a-core"),
        (zeros, "core.not-a-core"),
        (program, "core.not-a-core"),
        (cut, "core.truncated"),
        (header, "core.truncated"),
        (write_core_without_memory, "core.unreadable"),
    ],
)
def test_invalid_core_file_gives_one_error(
    make: Callable[[Path, Path], None],
    code: str,
    vllmops: Vllmops,
    core_and_snapshot: Kept,
    tmp_path: Path,
) -> None:
    path = tmp_path / "given"
    make(core_and_snapshot[0], path)
    shown = vllmops("stacks", "dump", "--core", str(path), "--json")
    assert (shown.code, shown.error["code"]) == (1, code)
    assert str(path) in shown.error["message"]
    assert shown.error["hint"]


def test_a_core_of_another_program(vllmops: Vllmops, tmp_path: Path) -> None:
    script = "print('up', flush=True); import os; os.execvp('sleep', ['sleep', '1000'])"
    with start_titled_process(tmp_path, "sh", "-c", script) as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        core = left_by(process, tmp_path)
    shown = vllmops("stacks", "dump", "--core", str(core), "--json")
    assert (shown.code, shown.error["code"]) == (1, "core.not-python")
    assert "sleep 1000" in shown.error["message"]


@pytest.mark.root_only
def test_a_core_that_one_may_not_read(
    vllmops: Vllmops, core_and_snapshot: Kept, home: Path
) -> None:
    theirs = home / "theirs"
    theirs.mkdir(0o700)
    shutil.chown(theirs, NOBODY)
    home.chmod(0o711)
    shutil.copy(core_and_snapshot[0], home / "core")
    (home / "core").chmod(0o600)
    shown = vllmops(
        *("stacks", "dump", "--core", str(home / "core"), "--json"),
        uid=NOBODY,
        env={"VLLMOPS_HOME": str(theirs)},
    )
    assert (shown.code, shown.error["code"]) == (4, "file.unreadable")


def test_without_pystack(
    vllmops: Vllmops, core_and_snapshot: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is installed here, so it is made not to be found.
    monkeypatch.setattr(core_files, "find_spec", lambda _: None)
    shown = vllmops("stacks", "dump", "--core", str(core_and_snapshot[0]), "--json")
    assert (shown.code, shown.error["code"]) == (1, "core.no-pystack")
    assert shown.error["hint"] == "pip install 'vllmops-cli[core]'"


def test_reading_a_core_times_out(
    vllmops: Vllmops, core_and_snapshot: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than the command takes, and than any start of Python does.
    given = core_files.read_core_stacks
    monkeypatch.setattr(
        core_files,
        "read_core_stacks",
        lambda core, options, **_: given(core, options, timeout_s=0.001),
    )
    shown = vllmops("stacks", "dump", "--core", str(core_and_snapshot[0]), "--json")
    assert (shown.code, shown.error["code"]) == (1, "core.timeout")


@pytest.mark.parametrize(
    "words",
    [("-t", "demo"), ("--cuda",), ("--nonblocking",), ("--explain", "--samples", "2")],
)
def test_core_option_rejects_incompatible_options(words: tuple[str, ...], vllmops: Vllmops) -> None:
    shown = vllmops("stacks", "dump", "--core", "core", *words, "--json")
    assert (shown.code, shown.error["code"]) == (2, "usage")


# --- CUDA: the driver's side of the pipe ---------------------------------------------------------

# What the driver does in a process that uses a GPU: no GPU is here. It makes the pipe that the
# variables name, and writes a file slowly when something is written into the pipe.
DRIVER = """
import ctypes, os, socket, sys, time

ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))

def named(variable):
    name = os.environ[variable].replace("%h", socket.gethostname())
    return name.replace("%p", str(os.getpid())).replace("%t", str(int(time.time())))

kind = sys.argv[1]
pipe = named("CUDA_COREDUMP_PIPE")
if kind == "file":
    open(pipe, "w").close()
elif kind == "device":
    os.mknod(pipe, 0o20600, os.makedev(1, 200))  # no driver: who opens it gets ENXIO
elif kind != "no-gpu":
    os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDWR) if kind in {"dumps", "silent"} else None
print("up", flush=True)
if kind == "dumps":
    os.read(reader, 1)
    with open(named("CUDA_COREDUMP_FILE"), "wb", buffering=0) as core:
        core.write(b"first")
        time.sleep(0.5)
        core.write(b"second")
time.sleep(1000)
"""


@pytest.fixture
def device(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., int]]:
    """Starts a worker whose driver behaves in some way."""
    monkeypatch.setattr(processes, "read_process_table", TABLE)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    with contextlib.ExitStack() as stack:

        def start(kind: str, **env: str) -> int:
            environment = {**build_coredump_environment(tmp_path), **env}
            place = start_titled_process(tmp_path, TITLE, str(script), kind, **environment)
            return stack.enter_context(place).pid

        yield start


def test_a_gpu_is_dumped_through_the_pipe(
    vllmops: Vllmops, device: Callable[..., int], tmp_path: Path
) -> None:
    pid = device("dumps")
    shown = vllmops("stacks", "dump", "-t", str(pid), "--cuda", "--json")
    assert shown.code == 0, shown.out
    (dump,) = shown.data["cuda"]
    assert (dump["pid"], dump["role"], dump["error"]) == (pid, "worker", None)
    # It is complete: the driver had closed it.
    assert Path(dump["file"]).read_bytes() == b"firstsecond"
    assert dump["bytes"] == 11
    assert shown.data["processes"][0]["threads"]


def test_a_gpu_is_never_dumped_unasked(vllmops: Vllmops, device: Callable[..., int]) -> None:
    pid = device("dumps")
    for words in ((), ("--explain", "--samples", "1")):
        assert vllmops("stacks", "dump", "-t", str(pid), *words, "--json").data["processes"]
    shown = vllmops("stacks", "dump", "-t", str(pid), "--cuda", "--json")
    assert shown.code == 0  # the one request that the driver takes is still open


@pytest.mark.parametrize(
    ("kind", "env", "code"),
    [
        ("dumps", {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "0"}, "cuda.not-armed"),
        ("dumps", {FLAGS: "skip_global_memory"}, "cuda.would-abort"),
        ("no-gpu", {}, "cuda.no-gpu"),
    ],
)
def test_a_gpu_that_is_not_to_be_asked(
    kind: str, env: dict[str, str], code: str, vllmops: Vllmops, device: Callable[..., int]
) -> None:
    shown = vllmops("stacks", "dump", "-t", str(device(kind, **env)), "--cuda", "--json")
    assert (shown.code, shown.error["code"]) == (1, code)
    assert shown.data["processes"][0]["threads"]  # the stacks are there, whatever the GPU says


@pytest.mark.root_only
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("silent", "has not finished it in time"),
        ("deaf", "no process reads"),
        ("file", "is not a FIFO"),
        ("device", "is not a FIFO"),
    ],
)
def test_a_driver_that_gives_no_dump(
    kind: str, why: str, vllmops: Vllmops, device: Callable[..., int]
) -> None:
    pid = device(kind)
    shown = vllmops("stacks", "dump", "-t", str(pid), "--cuda", "--timeout", "1", "--json")
    assert shown.code == 1
    (dump,) = shown.data["cuda"]
    assert dump["error"]["code"] == "cuda.failed"
    assert why in dump["error"]["message"]


@pytest.mark.root_only
def test_a_pipe_of_somebody_else_is_not_written(
    vllmops: Vllmops, device: Callable[..., int], tmp_path: Path
) -> None:
    pid = device("silent")
    (pipe,) = tmp_path.glob("*.pipe")
    os.chown(pipe, NOBODY, NOBODY)
    shown = vllmops("stacks", "dump", "-t", str(pid), "--cuda", "--timeout", "1", "--json")
    assert "another user" in shown.data["cuda"][0]["error"]["message"]
