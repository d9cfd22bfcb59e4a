"""``vllmops attach`` on trees of real Python processes that know nothing of vllmops."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllmops.attach import attach, inject
from vllmops.errors import VllmopsError
from vllmops.host.processes import Process, Role
from vllmops.protocol import identity

from ..support.waiting import until
from .test_stacks import Tree, tree

NOBODY = 65534


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    # What vLLM has: msgspec; and where its agents are to be.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("VLLMOPS_HOME", str(tmp_path / "home"))
    with tree(tmp_path) as found:
        yield found


def run(server: Tree, *words: str, wrap: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrap, sys.executable, "-m", "vllmops", *words, "-t", str(server.pids[0])],
        env=server.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )


def error(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)["errors"][0]


def agents(server: Tree) -> list[str]:
    words = [sys.executable, "-m", "vllmops", "ps", "--json"]
    done = subprocess.run(words, env=server.environment, capture_output=True, check=True)
    rows = json.loads(done.stdout)["data"]["instances"]
    row = next(row for row in rows if row["pid"] == server.pids[0])
    return [process["agent"] for process in row["processes"]]


def test_once_and_no_second_time(server: Tree) -> None:
    plan = run(server, "attach", "--dry-run")
    assert (plan.returncode, plan.stdout.count("by thread")) == (0, 3)
    assert agents(server) == ["absent"] * 3
    done = run(server, "attach", "--yes", "--json")
    assert done.returncode == 0, done.stdout
    rows = json.loads(done.stdout)["data"]["processes"]
    assert [row["pid"] for row in rows] == server.pids
    assert all(row["stopped_s"] < 3 and row["seconds"] < 15 for row in rows)
    assert agents(server) == ["answers"] * 3
    again = run(server, "attach", "--yes", "--json")
    assert (again.returncode, error(again)["code"]) == (1, "attach.already")
    assert all(Path(f"/proc/{pid}/status").exists() for pid in server.pids)


def test_nobody_there_to_ask(server: Tree) -> None:
    done = run(server, "attach", "--json")
    assert (done.returncode, error(done)["code"]) == (2, "unconfirmed")
    assert error(done)["hint"] == f"vllmops attach -t {server.pids[0]} --yes"


def test_what_it_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLMOPS_HOME", str(tmp_path / "home"))
    with tree(tmp_path) as server:
        done = run(server, "attach", "--yes")
        assert done.returncode == 1
        assert done.stdout.count("No module named 'msgspec'") == 3
        assert agents(server) == ["absent"] * 3


def test_a_directory_open_to_others_is_told(server: Tree, tmp_path: Path) -> None:
    (tmp_path / "home/agents").mkdir(parents=True)
    (tmp_path / "home/agents").chmod(0o777)
    done = run(server, "attach", "--yes", "--json")
    assert done.returncode != 0
    assert f"chmod 700 {tmp_path}/home/agents" in done.stdout


def test_a_stopped_process_is_refused(server: Tree) -> None:
    os.kill(server.pids[1], signal.SIGSTOP)
    done = run(server, "attach", "--yes", "--json")
    os.kill(server.pids[1], signal.SIGCONT)
    assert (done.returncode, error(done)["code"]) == (1, "attach.state")
    assert error(done)["hint"] == f"kill -CONT {server.pids[1]}"
    assert agents(server) == ["absent"] * 3


def test_what_is_not_a_server_is_refused(server: Tree) -> None:
    words = [sys.executable, "-m", "vllmops", "attach", "--yes", "--json", "-t", str(os.getpid())]
    done = subprocess.run(
        words, env=server.environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, error(done)["code"]) == (5, "target.unknown")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give up rights")
def test_without_the_right_to_trace(server: Tree) -> None:
    wrap = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
    done = run(server, "attach", "--yes", "--json", wrap=wrap)
    assert (done.returncode, error(done)["code"]) == (1, "attach.no-capability")
    assert "--cap-add SYS_PTRACE" in error(done)["hint"]
    assert agents(server) == ["absent"] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused(server: Tree) -> None:
    # A state directory of their own; the server's belongs to root.
    place = ("env", f"VLLMOPS_HOME=/tmp/vllmops-{NOBODY}")
    wrap = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *place)
    done = run(server, "attach", "--yes", "--json", wrap=wrap)
    assert (done.returncode, error(done)["code"]) == (4, "attach.other-user")
    assert error(done)["hint"].startswith("sudo -u root vllmops attach")


def test_killed_halfway_it_can_be_done_again(server: Tree) -> None:
    words = [sys.executable, "-m", "vllmops", "attach", "--yes", "-t", str(server.pids[0])]
    for _ in range(3):
        begun = subprocess.Popen(
            words, env=server.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(random.uniform(0.3, 1.5))
        begun.kill()
        begun.wait()
        for pid in server.pids:
            status = Path(f"/proc/{pid}/status").read_text()
            assert "TracerPid:\t0" in status
            assert "State:\tS" in status or "State:\tR" in status
    assert run(server, "attach", "--yes").returncode in {0, 1}
    assert agents(server) == ["answers"] * 3


# Keeps the GIL without running Python, as a native call that forgot to let go of it.
GREEDY = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(0.2)
print("up", flush=True)
ctypes.PyDLL(None).sleep(int(sys.argv[1]))
time.sleep(60)
"""


def test_a_gil_that_is_never_free_is_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLMOPS_HOME": str(tmp_path / "home"),
    }
    greedy = subprocess.Popen(
        ["VLLM::EngineCore", "-c", GREEDY, "4"],
        executable=sys.executable,
        env={**environment, "PYTHONHOME": sys.base_prefix},
        stdout=subprocess.PIPE,
    )
    try:
        assert greedy.stdout is not None
        assert greedy.stdout.readline() == b"up\n"
        server = Tree([greedy.pid], environment)
        began = time.monotonic()
        done = run(server, "attach", "--yes", "--timeout", "1", "--json")
        assert time.monotonic() - began < 10
        assert done.returncode != 0
        assert "attach.timeout" in done.stdout
        until(lambda: agents(server) == ["answers"])
    finally:
        greedy.kill()
        greedy.wait()


# On another machine than x86-64 Python 3.14 does it itself; there is neither where the tests run.
def test_elsewhere_it_takes_a_newer_python(server: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "supported", lambda: False)
    created = identity.of(server.pids[0]).start_ticks
    plan = attach.plan(Process(Role.API, server.pids[0], created))
    assert plan.tids == ()
    with pytest.raises(VllmopsError) as caught:
        attach.attach(plan, patch=False, timeout_s=5)
    assert caught.value.code == "attach.machine"
    assert "remote_exec" in caught.value.message


TRACER = """
import sys
from vllmops.attach import inject
for tid in inject.Target(int(sys.argv[1])).tids():
    inject._ptrace(inject.PTRACE_SEIZE, tid)
print(1, flush=True)
sys.stdin.readline()
"""


def test_a_process_that_has_a_tracer_is_refused(server: Tree) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(server.pids[1])], stdin=pipe, stdout=pipe
    ) as tracer:
        assert tracer.stdout
        tracer.stdout.readline()
        done = run(server, "attach", "--yes", "--json")
        (silent,) = json.loads(done.stdout)["data"]["silent"]
        assert (done.returncode, silent["code"], silent["pid"]) == (
            1,
            "attach.traced",
            server.pids[1],
        )
        assert f"pid {tracer.pid} " in silent["why"]
        tracer.communicate(b"\n")
    assert run(server, "attach", "--yes").returncode == 0


def test_a_process_that_ends_meanwhile(server: Tree) -> None:
    process = Process(Role.WORKER, server.pids[2], identity.of(server.pids[2]).start_ticks)
    made = attach.plan(process)
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(VllmopsError) as caught:
        attach.attach(made, patch=False, timeout_s=20)
    assert (caught.value.code, caught.value.exit_code) == ("attach.gone", 5)
    assert time.monotonic() - began < 5
