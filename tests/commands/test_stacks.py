"""``vllmops stacks dump`` on a tree of real Python processes with vLLM's titles."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vllmops.collect.machine import processes
from vllmops.model import snapshot_files
from vllmops.model.stacks import StacksSnapshot

from ..support.commands import Vllmops
from ..support.waiting import until

TABLE = processes.read_process_table  # the fixture `home` hides what is not its own
TREE = """
import ctypes, subprocess, sys, threading, time

ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # readable under Yama's ptrace_scope 1

def wait(prompt="a-secret-prompt"):
    time.sleep(1000)

def spin():
    while True: pass

def stuck():
    if ctypes.CDLL(None).vfork() == 0:
        time.sleep(1000)

kind, titles = sys.argv[1], sys.argv[2:]
for index in range(3):
    threading.Thread(target=wait, name=f"pool_{index}", daemon=True).start()
if titles:
    child = [titles[0], __file__, kind, *titles[1:]]
    subprocess.Popen(child, executable="/proc/self/exe")
elif kind == "spin":
    threading.Thread(target=spin, name="process_input_sockets [bold]", daemon=True).start()
elif kind == "helper":
    subprocess.Popen(["sleep", "1000"])
print("up", flush=True)
stuck() if kind == "stuck" and not titles else wait()
"""
TITLES = ["VLLM::APIServer_0", "VLLM::EngineCore", "VLLM::Worker_TP1"]


def rests(pid: int) -> bool:
    """Whether all threads of a process wait in the kernel."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(") ")[2][0] for stat in stats} <= {"S", "D"}


@contextlib.contextmanager
def tree(folder: Path, kind: str = "wait") -> Iterator[list[int]]:
    """A server's processes, root first; only of the kind ``spin`` one is busy."""
    script = folder / "tree.py"
    script.write_text(TREE)
    root = subprocess.Popen(
        [TITLES[0], str(script), kind, *TITLES[1:]],
        executable=sys.executable,
        # A title in place of the program's name hides its library from the interpreter.
        env=os.environ | {"PYTHONHOME": sys.base_prefix},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert root.stdout is not None
    try:
        for _ in TITLES:
            assert root.stdout.readline() == b"up\n"
        pids = [root.pid, *(c.pid for c in psutil.Process(root.pid).children(recursive=True))]
        waiting = pids[: len(TITLES) - (kind == "spin")]
        until(lambda: all(map(rests, waiting)))  # after its word, each still goes to its place
        yield pids[:3]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
        root.wait()
        root.stdout.close()


@pytest.fixture(scope="module")
def shared_server_pids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with tree(tmp_path_factory.mktemp("server")) as pids:
        yield pids


@pytest.fixture
def server(shared_server_pids: list[int], home: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A server that only waits, and belongs to no state directory."""
    monkeypatch.setattr(processes, "read_process_table", TABLE)
    return shared_server_pids


@pytest.fixture
def busy_server_pids(home: Path, tmp_path: Path) -> Iterator[list[int]]:
    """A server whose worker computes."""
    with tree(tmp_path, "spin") as pids:
        yield pids


@pytest.fixture
def dump(vllmops: Vllmops) -> Vllmops:
    """Dumps the stacks of the server of a pid."""
    return lambda pid, *words, **how: vllmops("stacks", "dump", "-t", str(pid), *words, **how)


def words(text: str) -> str:
    """The text without the places where it was folded."""
    return "".join(text.split())


def test_every_process_with_its_threads_the_busy_one_first(
    busy_server_pids: list[int], dump: Vllmops
) -> None:
    shown = dump(busy_server_pids[0])
    assert (shown.code, shown.err) == (0, "")
    api, engine, worker = shown.out.split("\n\n")
    assert api.splitlines()[0] == f"APIServer_0 pid {busy_server_pids[0]}"
    assert engine.splitlines()[0] == f"EngineCore pid {busy_server_pids[1]}"
    assert worker.splitlines()[:3] == [
        f"Worker_TP1 pid {busy_server_pids[2]}",
        "  process_input_sockets [bold]: active, holds the GIL",
        "    spin (tree.py:10)",
    ]
    # Threads that wait at one place are told once.
    assert "  pool_0, pool_1, pool_2: idle, 3 threads alike\n" in engine
    assert engine.count("wait (tree.py:7)") == 2
    assert "    Thread.run (threading.py:" in engine


def test_json(busy_server_pids: list[int], dump: Vllmops) -> None:
    shown = dump(busy_server_pids[0], "--json")
    assert shown.code == 0
    envelope = shown.envelope
    assert (envelope["command"], envelope["status"], envelope["exit_code"]) == (
        "stacks dump",
        "ok",
        0,
    )
    found = shown.data["processes"]
    assert [item["role"] for item in found] == ["api", "engine", "worker"]
    assert [item["pid"] for item in found] == busy_server_pids
    assert [item["title"] for item in found] == TITLES
    assert all(item["error"] is None for item in found)
    spinner = found[2]["threads"][0]
    assert (spinner["name"], spinner["state"]) == ("process_input_sockets [bold]", "active")
    assert spinner["frames"][0]["function"] == "spin"
    assert spinner["frames"][0]["line"] == 10
    assert [process["tp_rank"] for process in shown.data["processes"]] == [None, None, 1]


def test_narrow_terminal_and_pipe_tell_the_same(server: list[int], dump: Vllmops) -> None:
    wide = dump(server[0])
    for columns in (60, 30):
        narrow = dump(server[0], env={"COLUMNS": str(columns)})
        assert max(len(line) for line in narrow.out.splitlines()) <= columns
        assert words(narrow.out) == words(wide.out)


def test_local_variables_only_when_asked_for(server: list[int], dump: Vllmops) -> None:
    assert "a-secret-prompt" not in dump(server[0], "--json").out + dump(server[0]).out
    assert 'prompt = "a-secret-prompt"' in dump(server[0], "--locals").out
    assert "a-secret-prompt" in dump(server[0], "--locals", "--json").out


def test_target_from_the_environment(server: list[int], vllmops: Vllmops) -> None:
    shown = vllmops("stacks", "dump", "--json", env={"VLLMOPS_TARGET": str(server[1])})
    assert [item["pid"] for item in shown.data["processes"]] == server


def test_unknown_target(dump: Vllmops) -> None:
    shown = dump("nobody-has-this-name", "--json")
    assert (shown.code, shown.error["code"]) == (5, "target.unknown")


@pytest.mark.parametrize(
    "options", [("--native", "--nonblocking"), ("--timeout", "0"), ("--timeout", "soon")]
)
def test_wrong_options(server: list[int], dump: Vllmops, options: tuple[str, ...]) -> None:
    shown = dump(server[0], *options)
    assert (shown.code, shown.out) == (2, "")
    assert "Traceback" not in shown.err
    assert dump(server[0], *options, "--json").error["code"] == "usage"


def test_save_writes_what_was_shown(server: list[int], dump: Vllmops, tmp_path: Path) -> None:
    target = tmp_path / "stacks.json"
    target.write_text("an older one")
    shown = dump(server[0], "--json", "--save", str(target))
    assert shown.code == 0
    assert f"saved to {target}" in " ".join(shown.err.split())
    assert json.loads(target.read_text()) == shown.data
    found = snapshot_files.load_snapshot(target, StacksSnapshot).processes[2].threads
    assert any(frame.function == "wait" for frame in found[0].frames)
    assert [item.name for item in tmp_path.iterdir()] == ["stacks.json"]


def test_stacks_are_shown_if_they_cannot_be_saved(
    server: list[int], dump: Vllmops, tmp_path: Path
) -> None:
    place = tmp_path / "absent" / "stacks.json"
    shown = dump(server[0], "--save", str(place))
    assert shown.code == 1
    assert "wait (tree.py:7)" in shown.out
    assert "can't be written" in shown.err
    shown = dump(server[0], "--json", "--save", str(place))
    assert shown.envelope["status"] == "error"
    assert len(shown.data["processes"]) == 3


def test_failed_dump_is_reported_beside_the_other_dumps(
    home: Path, dump: Vllmops, tmp_path: Path
) -> None:
    with tree(tmp_path, "helper") as server:
        shown = dump(server[0])
        data = dump(server[0], "--json").data
    assert shown.code == 1
    assert "Worker_TP1 pid" in shown.out
    assert "Other process pid" in shown.out
    assert "error: pid" in shown.out
    assert "does not run Python" in shown.out
    assert "hint: " in shown.out
    failed = [item for item in data["processes"] if item["error"]]
    assert [(item["role"], item["error"]["code"]) for item in failed] == [
        ("other", "stacks.not-python")
    ]
    assert len(data["processes"]) == 4


def test_progress_on_stderr_while_one_process_cannot_be_stopped(
    home: Path, dump: Vllmops, tmp_path: Path
) -> None:
    with tree(tmp_path, "stuck") as server:
        until(lambda: psutil.Process(server[2]).status() == psutil.STATUS_DISK_SLEEP)
        shown = dump(server[0], "--timeout", "3")
    assert "reading" in shown.err
    assert "3 s at most" in shown.err
    assert "    stuck (tree.py:" in shown.out
    assert "note: read without stopping it" in shown.out


@pytest.mark.root_only
def test_no_permission(server: list[int]) -> None:
    shown = subprocess.run(
        [
            *("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"),
            *(sys.executable, "-m", "vllmops", "stacks", "dump", "-t", str(server[0])),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 1
    assert shown.stdout.count("has more privileges than this container") == 3
    assert "--cap-add SYS_PTRACE" in shown.stdout
    assert "Traceback" not in shown.stderr
