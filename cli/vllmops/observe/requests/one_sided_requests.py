"""Which requests one side alone knows, while nothing that could change that is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from ...collect.agents import agent_client, agent_files
from ...collect.machine.processes import Process
from ...model.caches import ProcessGap
from ...model.healing import HealRequest
from ...model.requests import ProcessRequests
from ...model.roles import Role
from ...rules.requests import compare_request_sides
from ...servers.discovery import Server

TIMEOUT_S = 5.0
ENDS = (Role.API, Role.ENGINE)


def find_one_sided_requests(
    server: Server, processes: Sequence[ProcessRequests], gaps: Sequence[ProcessGap]
) -> dict[str, str]:
    """The ids that one side alone knows, and who it is; none while one may be on its way.

    One look proves nothing. Between two looks that show the same, all that was on its way has
    arrived.

    Args:
        server: that was looked at.
        processes: what each knows, as `listing.collect_process_requests` gives it.
        gaps: the processes that did not answer.
    """
    lone = compare_request_sides(processes, gaps)
    if not lone or len(server.select_processes(Role.ENGINE)) < count_engines(server):
        return {}  # an engine on another node may have it
    rested, _ = agent_client.collect_answers(server.select_processes(*ENDS), is_at_rest)
    return lone if all(rested) and len(rested) == len(server.select_processes(*ENDS)) else {}


def is_at_rest(process: Process) -> bool:
    """Whether nothing is on its way to or from a process; raises VllmopsError.

    One whose heartbeat is late would not answer, as it runs no Python.
    """
    pulse = agent_files.read_heartbeat(process)
    if pulse is not None and pulse.age_s >= agent_files.BEAT_LATE_S:
        return False
    return bool(
        agent_client.open_agent(process, timeout_s=TIMEOUT_S)
        .send_heal_request(HealRequest(action="transit"))
        .proofs
    )


def count_engines(server: Server) -> int:
    """How many engines a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent_files.read_heartbeat(process) for process in server.select_processes(*ENDS)]
    return max(
        (pulse.heartbeat.standing.sizes.get("DP", 1) for pulse in pulses if pulse), default=1
    )
