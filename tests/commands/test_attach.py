"""``vllmops attach`` on trees of real Python processes that know nothing of vllmops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllmops.actions.attach import agent_loader, injector
from vllmops.actions.attach.agent_loader import AttachPlan
from vllmops.agent.transport import unix_socket
from vllmops.collect.agents.agent_client import open_agent
from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process
from vllmops.model import process_identity
from vllmops.model.process_identity import read_identity
from vllmops.model.roles import Role
from vllmops.support.errors import VllmopsError

from ..support.commands import Answer, Vllmops
from ..support.extent import long
from ..support.waiting import until
from .test_stacks import tree

NOBODY = 65534
# What vLLM has, such as msgspec: a server that is attached to need not have our packages.
WITHOUT_US = os.pathsep.join(path for path in sys.path if not Path(path, "vllmops").exists())


@pytest.fixture
def server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The pids of a server's processes, root first."""
    monkeypatch.setenv("PYTHONPATH", WITHOUT_US)
    with tree(tmp_path) as pids:
        yield pids


@dataclass
class Attach:
    """``vllmops attach --yes --json`` on the server of a pid."""

    vllmops: Vllmops

    def __call__(self, pid: int, *words: str, **how: Any) -> Answer:
        return self.vllmops("attach", "--yes", "--json", *words, "-t", str(pid), **how)

    def agents(self, server: list[int]) -> list[str]:
        rows = self.vllmops("ps", "--json").data["instances"]
        row = next(row for row in rows if row["pid"] == server[0])
        return [process["agent"] for process in row["processes"]]


@pytest.fixture
def attach(vllmops: Vllmops) -> Attach:
    return Attach(vllmops)


def program(server: list[int]) -> list[str]:
    """The same as a program of its own."""
    words = ("-m", "vllmops", "attach", "--yes", "--json", "-t", str(server[0]))
    return [sys.executable, *words]


def attach_with_fewer_rights(server: list[int], *rights: str) -> tuple[int, Any]:
    """The exit code and the error of a program with fewer rights, as ``setpriv`` takes them."""
    words = ["setpriv", *rights, *program(server)]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    (error,) = json.loads(done.stdout)["errors"]
    return done.returncode, error


def test_once_and_no_second_time(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attach: Attach, vllmops: Vllmops
) -> None:
    monkeypatch.setenv("PYTHONPATH", WITHOUT_US)
    with tree(tmp_path, "spin") as server:  # one of them computes
        plan = vllmops("attach", "--dry-run", "-t", str(server[0]))
        assert (plan.code, plan.out.count("by thread")) == (0, 3)
        assert attach.agents(server) == ["absent"] * 3
        done = attach(server[0])
        assert done.code == 0, done
        rows = done.data["processes"]
        assert [row["pid"] for row in rows] == server
        assert all(0 < row["stopped_s"] <= row["seconds"] for row in rows)
        assert attach.agents(server) == ["answers"] * 3
        again = attach(server[0])
        assert (again.code, again.error["code"]) == (1, "attach.already")
        assert all(Path(f"/proc/{pid}/status").exists() for pid in server)


def test_the_agent_needs_nothing_of_ours_on_the_server_s_path(
    server: list[int], attach: Attach
) -> None:
    probe = "import importlib.util as i; print(*map(i.find_spec, ('vllmops', 'vllmops_responses')))"
    alone = subprocess.run(
        [sys._base_executable, "-c", probe],  # type: ignore[attr-defined] # the server's Python
        stdout=subprocess.PIPE,
        check=True,
    )
    assert alone.stdout == b"None None\n"
    assert attach(server[0]).code == 0
    assert attach.agents(server) == ["answers"] * 3
    agent = open_agent(Process(Role.WORKER, server[2], read_identity(server[2]).start_ticks))
    failed = {}
    for path in unix_socket.GETS:
        status, content = agent.send_request("GET", path, None)
        if status != 200:
            failed[path] = content
    assert not [path for path, content in failed.items() if b"Error: No module" in content], failed
    assert agent.fetch_keys().keys == ()


def test_attach_without_a_terminal_requires_yes(server: list[int], vllmops: Vllmops) -> None:
    done = vllmops("attach", "--json", "-t", str(server[0]))
    assert (done.code, done.error["code"]) == (2, "unconfirmed")
    assert done.error["hint"] == f"vllmops attach -t {server[0]} --yes"


def test_attach_reports_a_missing_module(
    tmp_path: Path, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with tree(tmp_path) as server:
        done = attach(server[0])
        assert done.code == 1
        assert done.out.count("No module named 'msgspec'") == 3
        assert attach.agents(server) == ["absent"] * 3


def test_a_directory_open_to_others_is_told(server: list[int], attach: Attach, home: Path) -> None:
    (home / "agents").mkdir()
    (home / "agents").chmod(0o777)
    done = attach(server[0])
    assert done.code != 0
    assert f"chmod 700 {home}/agents" in done.out


def test_a_stopped_process_is_refused(server: list[int], attach: Attach) -> None:
    os.kill(server[1], signal.SIGSTOP)
    done = attach(server[0])
    os.kill(server[1], signal.SIGCONT)
    assert (done.code, done.error["code"]) == (1, "attach.state")
    assert done.error["hint"] == f"kill -CONT {server[1]}"
    assert attach.agents(server) == ["absent"] * 3


def test_attach_refuses_a_process_that_is_no_server(attach: Attach) -> None:
    done = attach(os.getpid())
    assert (done.code, done.error["code"]) == (5, "target.unknown")


@pytest.mark.root_only
def test_without_the_right_to_trace(server: list[int], attach: Attach) -> None:
    code, error = attach_with_fewer_rights(
        server, "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"
    )
    assert (code, error["code"]) == (1, "attach.no-capability")
    assert "--cap-add SYS_PTRACE" in error["hint"]
    assert attach.agents(server) == ["absent"] * 3


@pytest.mark.root_only
def test_another_users_process_is_refused(server: list[int]) -> None:
    rights = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    # A state directory of their own; the server's belongs to root.
    with tempfile.TemporaryDirectory(prefix="vo-nobody-", dir="/tmp") as place:
        os.chown(place, NOBODY, NOBODY)
        code, error = attach_with_fewer_rights(server, *rights, "env", f"VLLMOPS_HOME={place}")
    assert (code, error["code"]) == (4, "attach.other-user")
    assert error["hint"].startswith("sudo -u root vllmops attach")


def test_killed_halfway_it_can_be_done_again(server: list[int], attach: Attach) -> None:
    for begun_s in (0.3, 0.8, 1.3):  # wherever in its work that is
        nowhere = subprocess.DEVNULL
        begun = subprocess.Popen(program(server), stdout=nowhere, stderr=nowhere)
        time.sleep(begun_s)
        begun.kill()
        begun.wait()
        for pid in server:
            status = Path(f"/proc/{pid}/status")
            assert "TracerPid:\t0" in status.read_text()
            until(lambda status=status: re.search("State:\t[SR]", status.read_text()))  # type: ignore[misc]
    assert attach(server[0]).code in {0, 1}
    # What was killed may have told a process to begin, which takes its time.
    until(lambda: attach.agents(server) == ["answers"] * 3)


# Keeps the GIL without running Python, as a native call that forgot to let go of it.
GREEDY = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
time.sleep(0.2)
print("up", flush=True)
ctypes.PyDLL(None).sleep(int(sys.argv[1]))
time.sleep(600)
"""


@long
def test_a_gil_that_is_never_free_is_waited_for_in_vain(home: Path, attach: Attach) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHOME": sys.base_prefix}
    greedy = subprocess.Popen(
        ["VLLM::EngineCore", "-c", GREEDY, "15"],
        executable=sys.executable,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
    )
    try:
        assert greedy.stdout is not None
        assert greedy.stdout.readline() == b"up\n"
        done = attach(greedy.pid, "--timeout", "1")
        assert done.code != 0
        assert "attach.timeout" in done.out
        until(lambda: attach.agents([greedy.pid]) == ["answers"])
    finally:
        greedy.kill()
        greedy.wait()


# On other machines Python 3.14 does it itself; there is neither where the tests run.
def test_elsewhere_it_takes_a_newer_python(
    server: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injector, "is_supported", lambda: False)
    plan = agent_loader.plan_attach(
        Process(Role.API, server[0], process_identity.read_identity(server[0]).start_ticks)
    )
    assert plan.tids == ()
    with pytest.raises(VllmopsError) as caught:
        agent_loader.attach_agent(plan, patch=False, timeout_s=600)
    assert caught.value.code == "attach.machine"
    assert "remote_exec" in caught.value.message
    assert list_waiting_scripts(server[0]) == []


def list_waiting_scripts(pid: int) -> list[Path]:
    """The scripts that wait for a process to run them."""
    return list(Path(tempfile.gettempdir()).glob(f"vllmops-attach-{pid}-*"))


@pytest.fixture
def patient(server: list[int], monkeypatch: pytest.MonkeyPatch) -> AttachPlan:
    """A process whose Python 3.14 has taken a script, and does not come to run it."""
    monkeypatch.setattr(injector, "is_supported", lambda: False)
    plan = agent_loader.plan_attach(
        Process(Role.API, server[0], process_identity.read_identity(server[0]).start_ticks)
    )
    monkeypatch.setattr(agent_loader, "build_boot_code", lambda *_: "print('it runs')")
    taken = subprocess.CompletedProcess[str]((), 0)
    monkeypatch.setattr(agent_loader.subprocess, "run", lambda *_, **__: taken)  # type: ignore[attr-defined]
    return plan


def test_a_script_that_python_runs_later_is_there_then(
    patient: AttachPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VllmopsError) as caught:
        agent_loader.attach_agent(patient, patch=False, timeout_s=0.2)
    assert caught.value.code == "attach.timeout"
    monkeypatch.undo()
    (script,) = list_waiting_scripts(patient.process.pid)
    assert script.stat().st_mode & 0o777 == 0o600
    words = [sys.executable, str(script)]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"it runs\n"
    assert not script.exists()


@pytest.mark.parametrize("before", [True, False])
def test_no_script_is_left_for_a_process_that_has_ended(
    patient: AttachPlan, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    def ends(*_: Any, **__: Any) -> Any:
        os.kill(patient.process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess[str]((), 0)

    if before:
        ends()
        until(lambda: not processes.is_alive(patient.process))
    monkeypatch.setattr(agent_loader.subprocess, "run", ends)  # type: ignore[attr-defined]
    with pytest.raises(VllmopsError) as caught:
        agent_loader.attach_agent(patient, patch=False, timeout_s=600)
    assert caught.value.code == "attach.gone"
    assert list_waiting_scripts(patient.process.pid) == []


TRACER = """
import sys
from vllmops.actions.attach import injector as inject, ptrace as trace
for tid in inject.PythonProcess(int(sys.argv[1])).list_thread_ids():
    trace.ptrace(trace.SEIZE, tid)
print(1, flush=True)
sys.stdin.readline()
"""


def test_a_process_that_has_a_tracer_is_refused(server: list[int], attach: Attach) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", TRACER, str(server[1])], stdin=pipe, stdout=pipe
    ) as tracer:
        assert tracer.stdout
        tracer.stdout.readline()
        done = attach(server[0])
        (silent,) = done.data["silent"]
        assert (done.code, silent["code"], silent["pid"]) == (1, "attach.traced", server[1])
        assert f"pid {tracer.pid} " in silent["why"]
        tracer.communicate(b"\n")
    assert attach(server[0]).code == 0


def test_a_process_that_ends_meanwhile(server: list[int]) -> None:
    process = Process(Role.WORKER, server[2], process_identity.read_identity(server[2]).start_ticks)
    made = agent_loader.plan_attach(process)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(VllmopsError) as caught:
        agent_loader.attach_agent(made, patch=False, timeout_s=600)
    assert (caught.value.code, caught.value.exit_code) == ("attach.gone", 5)
