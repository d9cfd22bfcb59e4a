"""Requests that wait for a transfer of their KV blocks that nobody carries out any more."""

from __future__ import annotations

from math import prod

from ...host.roles import Role
from ...instances.servers import Server
from ...requests.lost import ENDS
from ...rpc import agent
from ..action import Case, InAgents, asked


class Transfers(InAgents):
    name = "transfers"
    state = "a request waits for its KV blocks, and no worker's connector knows of its transfer"
    does = (
        "reports the transfer as failed: vLLM ends the request, if kv_load_failure_policy is fail"
    )
    risk = "that request's client gets an error; its blocks stay taken until the connector reports"
    reference = "https://github.com/vllm-project/vllm/issues/35943"
    roles = (Role.ENGINE,)
    unseen = True

    def look(self, server: Server) -> list[Case]:
        cases = super().look(server)
        if not cases:
            return []
        found = asked(server, "transfers-known", (Role.WORKER, Role.ENGINE))
        if len(found) != workers(server) or any(not case.proof.subject for case in found):
            return []  # one that does not say what it knows may know of the transfer
        words = "\n".join(word for case in found for word in case.proof.requests)
        return [case for case in cases if case.proof.subject not in words]


def workers(server: Server) -> int:
    """How many workers a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent.beat(process) for process in server.of(*ENDS, Role.WORKER)]
    sizes = [pulse.beat.standing.sizes for pulse in pulses if pulse]
    return max(
        (prod(size.get(name, 1) for name in ("DP", "TP", "PP")) for size in sizes), default=1
    )
