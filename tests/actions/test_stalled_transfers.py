"""A load counts as lost only where every worker says that it does not know it.

The processes are made up: a worker of another node needs a second machine.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import msgspec
import pytest

from vllmops.actions import stalled_transfers as transfers
from vllmops.collect.agents import agent_files
from vllmops.collect.agents import proven_states as proofs
from vllmops.collect.agents.proven_states import HealCase
from vllmops.collect.machine.processes import Process
from vllmops.model.healing import HealAnswer, HealProof, HealRequest
from vllmops.model.requests import EngineRequest, ProcessRequests, RequestState
from vllmops.model.roles import Role
from vllmops.observe.requests import listing
from vllmops.observe.requests import stalled_transfers as loads
from vllmops.rules import diagnosis
from vllmops.servers.discovery import Server
from vllmops.support.errors import VllmopsError

from ..rules.sample_servers import healthy

ENGINE, FIRST, SECOND = (
    Process(role, 11 + number, 1)
    for number, role in enumerate((Role.ENGINE, Role.WORKER, Role.WORKER))
)
WAITS = (
    HealProof(subject="lost", evidence=""),
    HealProof(subject="left", evidence="", client_message="it is gone"),
)


@pytest.mark.parametrize(
    ("workers", "ranks", "found"),
    [
        ({12: (), 13: ()}, {"TP": 2}, ["lost", "left"]),
        ({12: (), 13: ("lost",)}, {"TP": 2}, ["left"]),  # it still comes to one
        ({12: (), 13: None}, {"TP": 2}, ["left"]),  # one does not answer
        ({12: (), 13: ()}, {"TP": 2, "PP": 2}, ["left"]),  # two are on another node
    ],
)
def test_transfer_is_lost_only_if_no_worker_knows_it(
    monkeypatch: pytest.MonkeyPatch,
    workers: dict[int, tuple[str, ...] | None],
    ranks: dict[str, int],
    found: list[str],
) -> None:
    def answer_heal_request(process: Process, request: HealRequest) -> HealAnswer:
        proofs: tuple[HealProof, ...] = ()
        if not request.request_ids:
            proofs = WAITS
        elif process.role == Role.WORKER:
            assert request.request_ids == ["lost"]
            known = workers[process.pid]
            if known is None:
                raise VllmopsError("agent.timeout", "it does not answer", "")
            proofs = (HealProof(subject="connector", evidence="", requests=known),)
        return HealAnswer(pid=process.pid, role=process.role, proofs=proofs)

    beat = SimpleNamespace(standing=SimpleNamespace(sizes=ranks))
    pulse = SimpleNamespace(heartbeat=beat, age_s=0.5)
    monkeypatch.setattr(agent_files, "read_heartbeat", lambda _: pulse)
    monkeypatch.setattr(proofs, "is_running_python", lambda _: True)
    for module in (proofs, loads):
        monkeypatch.setattr(module, "send_heal_request", answer_heal_request)
    server = Server(name="demo", processes=(ENGINE, FIRST, SECOND))
    assert [case.proof.subject for case in transfers.LostTransfers().find_cases(server)] == found


@pytest.mark.parametrize("heard", [True, False])
def test_a_load_that_is_lost_is_a_finding_of_list_and_doctor(
    monkeypatch: pytest.MonkeyPatch, *, heard: bool
) -> None:
    held = [EngineRequest(id=name, state=RequestState.WAITING_FOR_KV) for name in ("lost", "slow")]
    processes = [ProcessRequests(pid=11, role="engine", engine=held, still_s=0.0)]
    proof = HealProof(subject="lost", evidence="nobody knows it", rises=5)
    steps = count(step=5)

    def find_load_or_time_out(_: Server) -> list[HealCase]:
        if not heard:
            raise VllmopsError("agent.timeout", "it does not answer", "")
        return [HealCase(ENGINE, msgspec.structs.replace(proof, rises=next(steps)))]

    monkeypatch.setattr(loads, "find_lost_loads", find_load_or_time_out)
    monkeypatch.setattr(listing, "collect_process_requests", lambda _: (processes, []))
    server = Server(name="demo", processes=(ENGINE,))
    found = listing.list_requests(server, 30)
    assert {row.id: row.stuck for row in found.rows} == {
        "lost": "nobody knows it" if heard else "",
        "slow": "",
    }
    assert [(each.code, each.subject) for each in found.findings] == (
        [("request.lost-load", "lost")] if heard else []
    )
    snapshot = msgspec.structs.replace(healthy(), lost_loads=(proof,) if heard else ())
    (told,) = diagnosis.diagnose_snapshot(snapshot).findings if heard else (None,)
    assert told is None or told.next_step.startswith("vllmops heal --only transfers")
