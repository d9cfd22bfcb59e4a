"""What still counts as a request in flight after its end was asked for."""

from __future__ import annotations

import pytest

from vllmops.host.processes import Process
from vllmops.host.roles import Role
from vllmops.instances.servers import Server
from vllmops.protocol.caches import Silent
from vllmops.protocol.requests import EngineRequest, FrontRequest, ProcessRequests, State
from vllmops.requests import ending
from vllmops.requests.ending import knowing
from vllmops.requests.listing import Row


@pytest.mark.parametrize(
    ("state", "known"),
    [
        (State.RUNNING, {"engine": 12}),
        (State.WAITING_FOR_KV, {"engine": 12}),
        (State.FINISHED, {}),  # over; its KV blocks are held until a transfer ends
    ],
)
def test_a_finished_request_is_gone_although_it_holds_blocks(
    state: State, known: dict[str, int]
) -> None:
    engine = ProcessRequests(
        pid=12, role="engine", engine=[EngineRequest(id="a", state=state, kv_blocks=2)]
    )
    assert knowing([engine], {"a"}).get("a", {}) == known
    front = ProcessRequests(pid=11, role="api", front=[FrontRequest(id="a")])
    assert knowing([front, engine], {"a"})["a"] == {"api": 11, **known}


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
    silent = Silent(role=role, pid=13, code="agent.timeout", why="", hint="")
    api = ProcessRequests(pid=11, role="api", front=[])
    monkeypatch.setattr(ending, "look", lambda _: ([api], [silent]))
    monkeypatch.setattr(ending, "ask", lambda *_: {})
    monkeypatch.setattr(ending, "GONE_S", 0.0)
    server = Server(name="demo", processes=(Process(Role.API, 11, 1),))
    (ended,) = ending.end(server, [Row(id="a", state=State.RUNNING, engine=engine)], "")
    assert (ended.done, ended.left) == (not left, left)
