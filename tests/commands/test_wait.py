"""``vllmops wait``, with a stand-in for vLLM (see supervision/standin.py)."""

import os
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.servers.record import InstanceFolder

from ..support.commands import background
from ..support.extent import long
from ..support.waiting import until


def test_until_ready(lab: Any) -> None:
    lab.start_in_foreground("a", ready_s=1.5)
    answer = lab.vllmops("wait", "a", "--json")
    assert (answer.code, answer.data["state"], answer.err) == (0, "ready", "")
    assert lab.state("a") == "ready"
    assert lab.vllmops("wait", "--for", "ready").out == "a is ready\n"


@long
def test_until_stopped(lab: Any) -> None:
    lab.serve("a")
    waiter = background("wait", "a", "--for", "stopped")
    assert waiter.stderr
    assert "a: ready" in waiter.stderr.readline()
    lab.vllmops("stop", "a", "--force")
    out, _ = waiter.communicate(timeout=60)
    assert (waiter.returncode, out) == (0, "a is stopped\n")


def test_until_the_time_is_up(lab: Any) -> None:
    lab.serve("a")
    answer = lab.vllmops("wait", "a", "--for", "stopped", "--timeout", "0.3", "--json")
    assert (answer.code, answer.error["code"]) == (3, "wait.timeout")
    assert "it is ready" in answer.error["message"]
    lab.start_in_foreground("b", ready_s=600)
    answer = lab.vllmops("wait", "b", "--timeout", "0")
    assert answer.code == 3
    assert "b is not ready" in answer.err


def test_until_it_fails(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(held := tmp_path / "held")
    lab.start_in_foreground("a", says=str(held), exits=0)

    def look_again(seconds: float) -> None:
        """Once the command has seen that it starts, it goes on, and fails."""
        if held.exists():
            held.write_text("")
            held.unlink()
        time.sleep(seconds)

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=look_again)
    monkeypatch.setattr(import_module("vllmops.commands.wait"), "time", clock)
    answer = lab.vllmops("wait", "a", "--json")
    assert (answer.code, answer.error["code"]) == (1, "serve.failed")
    answer = lab.vllmops("wait", "a", "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.over")
    assert answer.error["message"]


@pytest.mark.parametrize("words", [("wait", "a", "--for", "stopped"), ("logs", "a", "-f")])
def test_wait_and_logs_end_if_server_and_supervisor_die(lab: Any, words: tuple[str, ...]) -> None:
    record = lab.serve("a")
    waiting = background(*words)
    time.sleep(1)
    lab.kill_supervisor("a")
    for process in record.processes:
        lab.kill(process.pid)
    assert waiting.wait(60) == 0


@long
def test_wait_on_a_stopped_instance_ends_at_once(lab: Any) -> None:
    lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    answer = lab.vllmops("wait", "a", "--for", "stopped", "--json")
    assert (answer.code, answer.data["state"]) == (0, "stopped")
    assert lab.vllmops("wait", "a", "--for", "ready").code == 5
    assert lab.vllmops("wait", "nobody").code == 5
    assert lab.vllmops("wait", "a", "--for", "nonsense").code == 2


def test_wait_accepts_a_server_that_vllmops_did_not_start(lab: Any) -> None:
    server = lab.stranger()
    target = str(server.pid)
    assert lab.vllmops("wait", target).code == 0
    answer = lab.vllmops("wait", target, "--for", "stopped", "--timeout", "0.3")
    assert answer.code == 3
    waiter = background("wait", target, "--for", "stopped")
    assert waiter.stderr
    assert f"{target}: ready" in waiter.stderr.readline()
    lab.vllmops("stop", target, "--force")
    out, _ = waiter.communicate(timeout=60)
    assert (waiter.returncode, out) == (0, f"{target} is stopped\n")
