"""Which requests wait in vain for KV blocks from elsewhere: nobody will report their arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ...collect.agents import agent_client, agent_files
from ...collect.agents.proven_states import HealCase, collect_cases, prove_cases, send_heal_request
from ...collect.machine.processes import Process
from ...model.healing import HealProof, HealRequest
from ...model.roles import Role
from ...servers.discovery import Server
from ...support.errors import VllmopsError

ACTION = "transfers"  # of the agents, and of ``vllmops heal``
HOLDERS = (Role.WORKER, Role.ENGINE)  # an engine without workers has the connector itself


def find_lost_loads(server: Server) -> list[HealCase]:
    """What a look shows: loads that no engine and no worker knows, or whose sender is gone."""
    cases = collect_cases(server.select_processes(Role.ENGINE), ACTION)
    names = [case.proof.subject for case in cases if not case.proof.client_message]
    kept = find_known_loads(server, names) if names else set()
    return [case for case in cases if case.proof.client_message or case.proof.subject not in kept]


def prove_lost_loads(server: Server) -> list[HealProof]:
    """What is proven; nothing of a server whose processes end meanwhile."""
    try:
        return [case.proof for case in prove_cases(partial(find_lost_loads, server))]
    except VllmopsError:
        return []


def find_known_loads(server: Server, names: Sequence[str]) -> set[str]:
    """The requests whose load a worker may still know: all, where not every worker says so."""

    def fetch_proofs(process: Process) -> tuple[HealProof, ...]:
        return send_heal_request(
            process, HealRequest(action=ACTION, request_ids=list(names))
        ).proofs

    asked = server.select_processes(*HOLDERS)
    answers, silent = agent_client.collect_answers(asked, fetch_proofs)
    connectors = [proof for proofs in answers for proof in proofs]
    if silent or len(connectors) < count_workers(server):
        return set(names)
    return {name for proof in connectors for name in proof.requests}


def count_workers(server: Server) -> int:
    """How many workers a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent_files.read_heartbeat(process) for process in server.select_processes(*HOLDERS)]
    sizes = [pulse.heartbeat.standing.sizes for pulse in pulses if pulse]
    return max((math.prod(size.values()) for size in sizes), default=1)
