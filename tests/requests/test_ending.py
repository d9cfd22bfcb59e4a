"""What still counts as a request in flight after its end was asked for."""

from __future__ import annotations

import pytest

from vllmops.protocol.requests import EngineRequest, FrontRequest, ProcessRequests, State
from vllmops.requests.ending import knowing


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
