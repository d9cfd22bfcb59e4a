"""Requests that wait in vain for KV blocks from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...host.processes import Process
from ...host.roles import Role
from ...instances.servers import Server
from ...protocol.heal import HealRequest, Proof
from ...requests.ending import end
from ...requests.listing import Row
from ...rpc import agent
from ..action import Case, InAgents, ask

HOLDERS = (Role.WORKER, Role.ENGINE)  # an engine without workers has the connector itself


class Transfers(InAgents):
    name = "transfers"
    state = "a request waits for KV blocks whose transfer is over, or whose sender is gone"
    does = (
        "reports that load as failed: vLLM computes the request itself or ends it, as its "
        "kv_load_failure_policy says; if the sender is gone, ends the request"
    )
    risk = "that request's client gets an error, unless the policy is recompute"
    reference = "https://github.com/vllm-project/vllm/issues/49829"
    roles = (Role.ENGINE,)
    unseen = True

    def look(self, server: Server) -> list[Case]:
        cases = super().look(server)
        names = [case.proof.subject for case in cases if not case.proof.why]
        kept = known(server, names) if names else set()
        return [case for case in cases if case.proof.why or case.proof.subject not in kept]

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:
        left: dict[str, str] = {}
        for case in cases:
            if case.proof.why:
                row = Row(id=case.proof.subject, state="")
                left |= {one.id: one.left for one in end(server, [row], case.proof.why)}
        if lost := [case for case in cases if not case.proof.why]:
            left |= super().act(server, lost)
        return {name: why for name, why in left.items() if why}


def known(server: Server, names: Sequence[str]) -> set[str]:
    """The requests whose load a worker may still know: all, where not every worker says so."""

    def one(process: Process) -> tuple[Proof, ...]:
        return ask(process, HealRequest(action=Transfers.name, among=list(names))).proofs

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
