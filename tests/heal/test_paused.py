"""An engine that rests: who is asked to wake it, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.heal.actions import paused
from vllmops.host.processes import Process
from vllmops.host.roles import Role
from vllmops.instances.servers import Server
from vllmops.protocol.heal import Healing, Proof
from vllmops.rpc.proofs import Case

ENGINE, API = Process(Role.ENGINE, 2, 0), Process(Role.API, 1, 0)
SERVER = Server("demo", (API, ENGINE))


@pytest.mark.parametrize("level", [1, 2])
def test_who_has_lost_its_weights_is_not_woken(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[Process] = []
    gone = [Case(ENGINE, Proof(subject="engine", what="its weights are gone"))]

    def asked(processes: Any, action: str) -> list[Case]:
        assert {process.role for process in processes} <= {Role.ENGINE, Role.WORKER}
        assert action == "sleeping-weights"
        return gone if level == 2 else []

    def ask(process: Process, *_: object) -> Healing:
        woken.append(process)
        return Healing(role="api", pid=1)

    monkeypatch.setattr(paused, "asked", asked)
    monkeypatch.setattr(paused, "ask", ask)
    left = paused.Paused().act(SERVER, [Case(ENGINE, Proof(subject="engine", what="it is asleep"))])
    if level == 2:
        assert woken == []
        assert "vllmops restart demo" in left["engine"]
    else:
        assert woken == [API]
        assert left == {}
