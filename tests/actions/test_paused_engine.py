"""An engine that rests: who is asked to wake it, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.actions import paused_engine
from vllmops.collect.agents.proven_states import HealCase
from vllmops.collect.machine.processes import Process
from vllmops.model.healing import HealAnswer, HealProof
from vllmops.model.roles import Role
from vllmops.servers.discovery import Server

ENGINE, API = Process(Role.ENGINE, 2, 0), Process(Role.API, 1, 0)
SERVER = Server("demo", (API, ENGINE))


@pytest.mark.parametrize("level", [1, 2])
def test_engine_without_weights_is_not_woken(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[Process] = []
    gone = [HealCase(ENGINE, HealProof(subject="engine", evidence="its weights are gone"))]

    def collect_weight_cases(processes: Any, action: str) -> list[HealCase]:
        assert {process.role for process in processes} <= {Role.ENGINE, Role.WORKER}
        assert action == "sleeping-weights"
        return gone if level == 2 else []

    def record_wake_request(process: Process, *_: object) -> HealAnswer:
        woken.append(process)
        return HealAnswer(role="api", pid=1)

    monkeypatch.setattr(paused_engine, "collect_cases", collect_weight_cases)
    monkeypatch.setattr(paused_engine, "send_heal_request", record_wake_request)
    left = paused_engine.PausedEngine().heal_or_explain(
        SERVER, [HealCase(ENGINE, HealProof(subject="engine", evidence="it is asleep"))]
    )
    if level == 2:
        assert woken == []
        assert "vllmops restart demo" in left["engine"]
    else:
        assert woken == [API]
        assert left == {}
