"""A load counts as lost only where every worker says that it does not know it.

The processes are made up: a worker of another node needs a second machine.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllmops.errors import VllmopsError
from vllmops.heal import action
from vllmops.heal.actions import transfers
from vllmops.host.processes import Process
from vllmops.host.roles import Role
from vllmops.instances.servers import Server
from vllmops.protocol.heal import Healing, HealRequest, Proof
from vllmops.rpc import agent

ENGINE, FIRST, SECOND = (
    Process(role, 11 + number, 1)
    for number, role in enumerate((Role.ENGINE, Role.WORKER, Role.WORKER))
)
WAITS = (Proof(subject="lost", what=""), Proof(subject="left", what="", why="it is gone"))


@pytest.mark.parametrize(
    ("workers", "ranks", "found"),
    [
        ({12: (), 13: ()}, {"TP": 2}, ["lost", "left"]),
        ({12: (), 13: ("lost",)}, {"TP": 2}, ["left"]),  # it still comes to one
        ({12: (), 13: None}, {"TP": 2}, ["left"]),  # one does not answer
        ({12: (), 13: ()}, {"TP": 2, "PP": 2}, ["left"]),  # two are on another node
    ],
)
def test_only_what_no_worker_knows_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    workers: dict[int, tuple[str, ...] | None],
    ranks: dict[str, int],
    found: list[str],
) -> None:
    def ask(process: Process, request: HealRequest) -> Healing:
        proofs: tuple[Proof, ...] = ()
        if not request.among:
            proofs = WAITS
        elif process.role == Role.WORKER:
            assert request.among == ["lost"]
            known = workers[process.pid]
            if known is None:
                raise VllmopsError("agent.timeout", "it does not answer", "")
            proofs = (Proof(subject="connector", what="", requests=known),)
        return Healing(pid=process.pid, role=process.role, proofs=proofs)

    beat = SimpleNamespace(standing=SimpleNamespace(sizes=ranks))
    pulse = SimpleNamespace(beat=beat, age_s=0.5)
    monkeypatch.setattr(agent, "beat", lambda _: pulse)
    monkeypatch.setattr(action, "awake", lambda _: True)
    for module in (action, transfers):
        monkeypatch.setattr(module, "ask", ask)
    server = Server(name="demo", processes=(ENGINE, FIRST, SECOND))
    assert [case.proof.subject for case in transfers.Transfers().look(server)] == found
