"""Which requests wait in vain for KV blocks from elsewhere: nobody will report their arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ..errors import VllmopsError
from ..host.processes import Process
from ..host.roles import Role
from ..instances.servers import Server
from ..protocol.heal import HealRequest, Proof
from ..rpc import agent
from ..rpc.proofs import Case, ask, asked, certain

ACTION = "transfers"  # of the agents, and of ``vllmops heal``
HOLDERS = (Role.WORKER, Role.ENGINE)  # an engine without workers has the connector itself


def look(server: Server) -> list[Case]:
    """What a look shows: loads that no engine and no worker knows, or whose sender is gone."""
    cases = asked(server.of(Role.ENGINE), ACTION)
    names = [case.proof.subject for case in cases if not case.proof.why]
    kept = known(server, names) if names else set()
    return [case for case in cases if case.proof.why or case.proof.subject not in kept]


def lost(server: Server) -> list[Proof]:
    """What is proven; nothing of a server whose processes end meanwhile."""
    try:
        return [case.proof for case in certain(partial(look, server))]
    except VllmopsError:
        return []


def known(server: Server, names: Sequence[str]) -> set[str]:
    """The requests whose load a worker may still know: all, where not every worker says so."""

    def one(process: Process) -> tuple[Proof, ...]:
        return ask(process, HealRequest(action=ACTION, among=list(names))).proofs

    asked = server.of(*HOLDERS)
    answers, silent = agent.side_by_side(asked, one)
    connectors = [proof for proofs in answers for proof in proofs]
    if silent or len(connectors) < workers(server):
        return set(names)
    return {name for proof in connectors for name in proof.requests}


def workers(server: Server) -> int:
    """How many workers a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent.beat(process) for process in server.of(*HOLDERS)]
    sizes = [pulse.beat.standing.sizes for pulse in pulses if pulse]
    return max((math.prod(size.values()) for size in sizes), default=1)
