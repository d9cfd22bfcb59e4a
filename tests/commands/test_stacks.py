"""``vllmops stacks dump`` on a tree of real Python processes with vLLM's titles."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from vllmops.protocol import files
from vllmops.protocol.stacks import StacksSnapshot

from ..support.waiting import until

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


@dataclass
class Tree:
    """A server's processes, root first, and the command line to look at them."""

    pids: list[int]
    environment: dict[str, str] = field(default_factory=dict)

    def dump(
        self, *options: str, wrap: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [*wrap, sys.executable, "-m", "vllmops", "stacks", "dump", *options]
        if "-t" not in options and "VLLMOPS_TARGET" not in environment:
            command += ["-t", str(self.pids[0])]
        return subprocess.run(
            command,
            env=self.environment | environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )


@contextlib.contextmanager
def tree(folder: Path, kind: str = "spin") -> Iterator[Tree]:
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
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "FORCE_COLOR"}}
        environment.pop("VLLMOPS_TARGET", None)
        yield Tree(pids[:3], environment | {"VLLMOPS_HOME": str(folder / "home")})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
        root.wait()
        root.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    with tree(tmp_path_factory.mktemp("server")) as found:
        yield found


def words(text: str) -> str:
    """The text without the places where it was folded."""
    return "".join(text.split())


def test_every_process_with_its_threads_the_busy_one_first(server: Tree) -> None:
    told = server.dump()
    assert told.returncode == 0, told.stderr
    assert told.stderr == ""
    api, engine, worker = told.stdout.split("\n\n")
    assert api.splitlines()[0] == f"APIServer_0 pid {server.pids[0]}"
    assert engine.splitlines()[0] == f"EngineCore pid {server.pids[1]}"
    assert worker.splitlines()[:3] == [
        f"Worker_TP1 pid {server.pids[2]}",
        "  process_input_sockets [bold]: active, holds the GIL",
        "    spin (tree.py:10)",
    ]
    # Threads that wait at one place are told once.
    assert "  pool_0, pool_1, pool_2: idle, 3 threads alike\n" in engine
    assert engine.count("wait (tree.py:7)") == 2
    assert "    Thread.run (threading.py:" in engine


def test_json(server: Tree) -> None:
    told = server.dump("--json")
    assert told.returncode == 0
    envelope = json.loads(told.stdout)
    assert (envelope["command"], envelope["status"], envelope["exit_code"]) == (
        "stacks dump",
        "ok",
        0,
    )
    processes = envelope["data"]["processes"]
    assert [each["role"] for each in processes] == ["api", "engine", "worker"]
    assert [each["pid"] for each in processes] == server.pids
    assert [each["title"] for each in processes] == TITLES
    assert all(each["error"] is None for each in processes)
    spinner = processes[2]["threads"][0]
    assert (spinner["name"], spinner["state"]) == ("process_input_sockets [bold]", "active")
    assert spinner["frames"][0]["function"] == "spin"
    assert spinner["frames"][0]["line"] == 10


def test_narrow_terminal_and_pipe_tell_the_same(server: Tree) -> None:
    wide, narrow = server.dump(), server.dump(COLUMNS="60")
    assert max(len(line) for line in narrow.stdout.splitlines()) <= 60
    assert words(narrow.stdout) == words(wide.stdout)
    very = server.dump(COLUMNS="30")
    assert max(len(line) for line in very.stdout.splitlines()) <= 30
    assert words(very.stdout) == words(wide.stdout)


def test_local_variables_only_when_asked_for(server: Tree) -> None:
    assert "a-secret-prompt" not in server.dump("--json").stdout + server.dump().stdout
    assert 'prompt = "a-secret-prompt"' in server.dump("--locals").stdout
    assert "a-secret-prompt" in server.dump("--locals", "--json").stdout


def test_target_from_the_environment(server: Tree) -> None:
    told = server.dump("--json", VLLMOPS_TARGET=str(server.pids[1]))
    assert [each["pid"] for each in json.loads(told.stdout)["data"]["processes"]] == server.pids


def test_unknown_target(server: Tree) -> None:
    told = server.dump("--json", "-t", "nobody-has-this-name")
    assert told.returncode == 5
    assert json.loads(told.stdout)["errors"][0]["code"] == "target.unknown"


@pytest.mark.parametrize(
    "options", [("--native", "--nonblocking"), ("--timeout", "0"), ("--timeout", "soon")]
)
def test_wrong_options(server: Tree, options: tuple[str, ...]) -> None:
    told = server.dump(*options)
    assert told.returncode == 2
    assert told.stdout == ""
    assert "Traceback" not in told.stderr
    assert json.loads(server.dump(*options, "--json").stdout)["errors"][0]["code"] == "usage"


def test_save_writes_what_was_shown(server: Tree, tmp_path: Path) -> None:
    target = tmp_path / "stacks.json"
    target.write_text("an older one")
    told = server.dump("--json", "--save", str(target))
    assert told.returncode == 0
    assert f"saved to {target}" in words_of_stderr(told)
    assert json.loads(target.read_text()) == json.loads(told.stdout)["data"]
    assert files.load(target, StacksSnapshot).processes[2].threads[0].frames[0].function == "spin"
    assert [each.name for each in tmp_path.iterdir()] == ["stacks.json"]


def test_what_was_caught_is_shown_where_it_cannot_be_saved(server: Tree, tmp_path: Path) -> None:
    place = tmp_path / "absent" / "stacks.json"
    told = server.dump("--save", str(place))
    assert told.returncode == 1
    assert "spin (tree.py:10)" in told.stdout
    assert "can't be written" in told.stderr
    envelope = json.loads(server.dump("--json", "--save", str(place)).stdout)
    assert envelope["status"] == "error"
    assert len(envelope["data"]["processes"]) == 3


def test_one_that_fails_is_told_and_the_others_are_dumped(tmp_path: Path) -> None:
    with tree(tmp_path, "helper") as server:
        told = server.dump()
        data = json.loads(server.dump("--json").stdout)["data"]
    assert told.returncode == 1
    assert "Worker_TP1 pid" in told.stdout
    assert "Other process pid" in told.stdout
    assert "error: pid" in told.stdout
    assert "does not run Python" in told.stdout
    assert "hint: " in told.stdout
    failed = [each for each in data["processes"] if each["error"]]
    assert [(each["role"], each["error"]["code"]) for each in failed] == [
        ("other", "stacks.not-python")
    ]
    assert len(data["processes"]) == 4


def test_progress_on_stderr_while_one_process_cannot_be_stopped(tmp_path: Path) -> None:
    with tree(tmp_path, "stuck") as server:
        until(lambda: psutil.Process(server.pids[2]).status() == psutil.STATUS_DISK_SLEEP)
        told = server.dump("--timeout", "3")
    assert "reading" in told.stderr
    assert "3 s at most" in told.stderr
    assert "    stuck (tree.py:" in told.stdout
    assert "note: read without stopping it" in told.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give up rights")
def test_no_permission(server: Tree) -> None:
    told = server.dump(wrap=("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"))
    assert told.returncode == 1
    assert told.stdout.count("error: reading pid") == 3
    assert "--cap-add SYS_PTRACE" in told.stdout
    assert "Traceback" not in told.stderr


def words_of_stderr(told: subprocess.CompletedProcess[str]) -> str:
    return " ".join(told.stderr.split())
