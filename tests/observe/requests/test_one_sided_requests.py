"""A request that only one side knows counts as lost only where nothing can be on its way.

The processes are made up: a busy queue lasts for milliseconds, a second node is another machine.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllmops.actions.one_sided_requests import ZombieRequests
from vllmops.collect.agents import agent_files
from vllmops.collect.machine.processes import Process
from vllmops.model.requests import FrontRequest, ProcessRequests
from vllmops.model.roles import Role
from vllmops.observe.requests import listing, one_sided_requests
from vllmops.servers.discovery import Server

API, ENGINE = Process(Role.API, 11, 1), Process(Role.ENGINE, 12, 1)
SERVER = Server(name="demo", processes=(API, ENGINE))
LOST = [
    ProcessRequests(pid=11, role="api", front=[FrontRequest(id="a")]),
    ProcessRequests(pid=12, role="engine", engine=[]),
]


@pytest.mark.parametrize(
    ("quiet", "ranks", "lost_"),
    [
        ([API, ENGINE], 1, ["a"]),
        ([API], 1, []),  # the engine still takes messages in
        ([ENGINE], 1, []),  # the API server has not read all outputs
        ([API, ENGINE], 2, []),  # the engine of another node may have it
    ],
)
def test_request_is_lost_only_if_no_process_can_still_deliver_it(
    monkeypatch: pytest.MonkeyPatch, quiet: list[Process], ranks: int, lost_: list[str]
) -> None:
    beat = SimpleNamespace(heartbeat=SimpleNamespace(standing=SimpleNamespace(sizes={"DP": ranks})))
    monkeypatch.setattr(one_sided_requests, "is_at_rest", lambda process: process in quiet)
    monkeypatch.setattr(listing, "collect_process_requests", lambda _: (LOST, []))
    monkeypatch.setattr(agent_files, "read_heartbeat", lambda _: beat)
    found = ZombieRequests().find_cases(SERVER)
    assert [(case.process, case.proof.subject) for case in found] == [(API, one) for one in lost_]
    assert [finding.subject for finding in listing.list_requests(SERVER, 30).findings] == lost_
