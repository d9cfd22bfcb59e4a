"""What still counts as a request in flight after its end was asked for."""

from __future__ import annotations

import pytest

from vllmops.actions import request_abort
from vllmops.actions.request_abort import find_holder_pids
from vllmops.collect.machine.processes import Process
from vllmops.model.caches import ProcessGap
from vllmops.model.requests import EngineRequest, FrontRequest, ProcessRequests, RequestState
from vllmops.model.roles import Role
from vllmops.observe.requests.listing import InFlightRequest
from vllmops.servers.discovery import Server


@pytest.mark.parametrize(
    ("state", "known"),
    [
        (RequestState.RUNNING, {"engine": 12}),
        (RequestState.WAITING_FOR_KV, {"engine": 12}),
        (RequestState.FINISHED, {}),  # over; its KV blocks are held until a transfer ends
    ],
)
def test_a_finished_request_is_gone_although_it_holds_blocks(
    state: RequestState, known: dict[str, int]
) -> None:
    engine = ProcessRequests(
        pid=12, role="engine", engine=[EngineRequest(id="a", state=state, kv_blocks=2)]
    )
    assert find_holder_pids([engine], {"a"}).get("a", {}) == known
    front = ProcessRequests(pid=11, role="api", front=[FrontRequest(id="a")])
    assert find_holder_pids([front, engine], {"a"})["a"] == {"api": 11, **known}


@pytest.mark.parametrize(
    ("role", "engine", "left"),
    [
        ("engine", 13, "engine 13 does not answer, and may still have it"),
        ("engine", None, "engine 13 does not answer, and may still have it"),  # it may be that one
        ("engine", 12, ""),  # the request was in another one
        ("worker", 12, ""),
    ],
)
def test_a_request_is_not_over_while_its_engine_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, role: str, engine: int | None, left: str
) -> None:
    silent = ProcessGap(role=role, pid=13, code="agent.timeout", reason="", hint="")
    api = ProcessRequests(pid=11, role="api", front=[])
    monkeypatch.setattr(request_abort, "collect_process_requests", lambda _: ([api], [silent]))
    monkeypatch.setattr(request_abort, "send_abort", lambda *_: {})
    monkeypatch.setattr(request_abort, "GONE_S", 0.0)
    server = Server(name="demo", processes=(Process(Role.API, 11, 1),))
    (ended,) = request_abort.abort_requests(
        server, [InFlightRequest(id="a", state=RequestState.RUNNING, engine=engine)], ""
    )
    assert (ended.done, ended.reason) == (not left, left)
