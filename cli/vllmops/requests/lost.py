"""Which requests one side alone knows, while nothing that could change that is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnose.requests import one_sided
from ..host.processes import Process
from ..host.roles import Role
from ..instances.servers import Server
from ..protocol.caches import Silent
from ..protocol.heal import HealRequest
from ..protocol.requests import ProcessRequests
from ..rpc import agent

TIMEOUT_S = 5.0
ENDS = (Role.API, Role.ENGINE)


def lost(
    server: Server, processes: Sequence[ProcessRequests], silent: Sequence[Silent]
) -> dict[str, str]:
    """The ids that one side alone knows, and who it is; none while one may be on its way.

    One look proves nothing. Between two looks that show the same, all that was on its way has
    arrived.

    Args:
        server: that was looked at.
        processes: what each knows, as `listing.look` gives it.
        silent: the processes that did not answer.
    """
    lone = one_sided(processes, silent)
    if not lone or len(server.of(Role.ENGINE)) < engines(server):
        return {}  # an engine on another node may have it
    rested, _ = agent.side_by_side(server.of(*ENDS), at_rest)
    return lone if all(rested) and len(rested) == len(server.of(*ENDS)) else {}


def at_rest(process: Process) -> bool:
    """Whether nothing is on its way to or from a process; raises VllmopsError.

    One whose heartbeat is late would not answer, as it runs no Python.
    """
    pulse = agent.beat(process)
    if pulse is not None and pulse.age_s >= agent.BEAT_LATE_S:
        return False
    return bool(
        agent.reach(process, timeout_s=TIMEOUT_S).heal(HealRequest(action="transit")).proofs
    )


def engines(server: Server) -> int:
    """How many engines a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent.beat(process) for process in server.of(*ENDS)]
    return max((pulse.beat.standing.sizes.get("DP", 1) for pulse in pulses if pulse), default=1)
