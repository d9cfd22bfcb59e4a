"""Which ranks of a server are not seen, from what its agents say."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.agent.transport.server_members import has_all_ranks
from vllmops.model.admin_api import ServerProcess
from vllmops.model.agent_state import Heartbeat
from vllmops.model.ranks import ServerMembership
from vllmops.model.server_snapshot import ProcessHeartbeat


def member(role: str, **ranks: Any) -> ServerProcess:
    return ServerProcess(role=role, pid=1, create_time=0.0, start_ticks=1, boot="", **ranks)


def pulses(**sizes: int) -> list[ProcessHeartbeat]:
    beat = Heartbeat(
        monotonic=0.0, sequence=0, pid=1, role="api", standing=ServerMembership(sizes=sizes)
    )
    return [ProcessHeartbeat(role="api", pid=1, age_s=0.0, heartbeat=beat)]


ENGINE: dict[str, Any] = {"role": "engine", "dp_rank": 0}
WORKERS = [member("worker", dp_rank=0, tp_rank=rank, pp_rank=0) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("found", "sizes", "all_"),
    [
        ([member(**ENGINE)], {"DP": 1, "TP": 1, "PP": 1}, True),
        ([member(**ENGINE)], {"DP": 1, "TP": 2, "PP": 1}, False),
        ([member(**ENGINE), *WORKERS], {"DP": 1, "TP": 2, "PP": 1}, True),
        ([member(**ENGINE), *WORKERS], {"DP": 2, "TP": 2, "PP": 1}, False),
        ([member(**ENGINE), member("engine", dp_rank=1)], {"DP": 2}, True),
        ([member(**ENGINE), member("engine", dp_rank=0)], {"DP": 2}, False),
        ([], {}, False),
    ],
)
def test_ranks_that_are_elsewhere(
    found: list[ServerProcess], sizes: dict[str, int], all_: bool
) -> None:
    assert has_all_ranks(found, pulses(**sizes)) is all_
