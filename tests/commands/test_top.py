"""``vllmops top --once`` on real processes; tests/top has the full screen."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from vllmops.commands import top
from vllmops.support.errors import ExitCode, VllmopsError


def test_every_server_of_the_machine_is_shown(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "ONCE_S", 60.0)
    lab.serve("demo")
    stranger = lab.stranger()
    answer = lab.vllmops("top", "--once", "--json")
    assert answer.code == 0, answer
    rows = {row["target"]: row for row in answer.data["servers"]}
    assert rows.keys() == {"demo", str(stranger.pid)}
    assert rows["demo"]["state"] == "ready"
    (node,) = rows["demo"]["nodes"]
    assert {process["role"] for process in node["processes"]} == {"api", "engine", "worker"}
    shown = lab.vllmops("top", "--once").out
    assert "demo  ready" in shown


def test_top_is_not_delayed_by_a_suspended_or_unknown_server(
    lab: Any, patience: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience.undo()
    monkeypatch.setattr(top, "ONCE_S", 30.0)
    record = lab.serve("demo")
    lab.serve("other")
    lab.kill(lab.pid_of(record.processes, "api"), signal.SIGSTOP)
    answer = lab.vllmops("top", "--once", "--json", "-t", "demo", "-t", "other", "-t", "nix")
    assert answer.code == ExitCode.NOT_FOUND
    rows = {row["target"]: row for row in answer.data["servers"]}
    assert rows["other"]["state"] == "ready"
    (node,) = rows["demo"]["nodes"]
    assert "stopped by a signal" in {process["state"] for process in node["processes"]}
    assert rows["nix"]["unseen"][0]["code"] == "target.unknown"
    lab.kill(lab.pid_of(record.processes, "api"), signal.SIGCONT)


def test_no_server_is_no_error(vllmops: Any) -> None:
    answer = vllmops("top", "--once")
    assert (answer.code, answer.out) == (0, "no vLLM server runs here\n")


def test_without_textual_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "find_spec", {}.get)
    with pytest.raises(VllmopsError) as raised:
        top.require_full_screen()
    assert raised.value.code == "top.no-textual"
    assert "pip install 'vllmops-cli[top]'" in raised.value.hint


def test_without_a_terminal_the_error_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "find_spec", str)
    with pytest.raises(VllmopsError) as raised:
        top.require_full_screen()
    assert raised.value.code == "top.no-terminal"


def test_a_server_that_is_too_late_is_an_error(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.serve("demo")
    monkeypatch.setattr(top, "ONCE_S", 0.0)
    (error,) = top.make_screen_result(["demo"]).errors
    assert (error.code, error.exit_code) == ("top.timeout", ExitCode.TIMED_OUT)
