"""Who is asked when a server is healed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllmops.actions import healing
from vllmops.actions.action import Action
from vllmops.collect.agents import agent_files
from vllmops.collect.agents.proven_states import HealCase
from vllmops.collect.machine.processes import Process
from vllmops.model.healing import HealAnswer, HealProof, HealRequest
from vllmops.model.roles import Role
from vllmops.servers.discovery import Server
from vllmops.support.errors import VllmopsError


def test_a_process_that_runs_no_python_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_request(process: Process, request: HealRequest, timeout_s: float) -> HealAnswer:
        raise AssertionError(f"{process.pid} was asked for {timeout_s} s: {request}")

    monkeypatch.setattr(healing, "send_heal_request", fail_on_request)
    monkeypatch.setattr(healing, "is_running_python", lambda _: False)
    monkeypatch.setattr(
        agent_files, "read_heartbeat", lambda _: SimpleNamespace(age_s=9.0, is_late=True)
    )
    server = Server(name="demo", processes=(Process(Role.API, 11, 1),))
    with pytest.raises(VllmopsError, match="can't answer; its last heartbeat is 9 s old") as caught:
        healing.heal_server(server, ())
    assert caught.value.code == "heal.no-agent"


def test_heal_shows_no_action_without_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing.ACTIONS[0].__class__, "find_cases", lambda *_: [])
    said: list[str] = []
    healing.heal_server(
        Server(name="demo", processes=()), healing.ACTIONS[:1] * 2, show=said.append
    )
    assert said == ["demo: looking for what can be healed"]


def test_heal_asks_a_resumed_process_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that runs again would be said not to answer."""
    process = Process(Role.WORKER, 12, 1)
    stopped = [True]

    class Resumed(Action):
        name, state, does, risk = "stopped", "", "", ""

        def find_cases(self, server: Server) -> list[HealCase]:
            return (
                [HealCase(process, HealProof(subject="process", evidence="T"))] if stopped else []
            )

        def heal_or_explain(self, server: Server, cases: object) -> dict[str, str]:
            stopped.clear()
            return {}

    monkeypatch.setattr(healing, "is_running_python", lambda _: not stopped)
    monkeypatch.setattr(healing, "send_heal_request", lambda *_: HealAnswer(pid=12, role="worker"))
    monkeypatch.setattr(healing, "log_outcomes", lambda *_: None)
    monkeypatch.setattr(
        agent_files, "read_heartbeat", lambda _: SimpleNamespace(age_s=9.0, is_late=True)
    )
    healed = healing.heal_server(Server(name="demo", processes=(process,)), [Resumed()])
    assert [outcome.done for outcome in healed.outcomes] == [True]
    assert healed.gaps == []
