"""Requests that only one side knows."""

from __future__ import annotations

from collections.abc import Sequence

from ...diagnose.requests import one_sided
from ...host.roles import Role
from ...instances.servers import Server
from ...protocol.heal import Proof
from ...requests import listing
from ...requests.ending import end
from ...requests.listing import Row
from ...rpc import agent
from ..action import Action, Case, asked

WHY = "the engine lost this request: send it again"


class Zombies(Action):
    name = "zombies"
    state = "only the API server or only the engine knows a request"
    does = "ends it, and frees what it holds"
    risk = "its client, if there is one, gets status 410"
    reference = "https://github.com/vllm-project/vllm/issues/55521"

    def look(self, server: Server) -> list[Case]:
        processes, silent = listing.look(server)
        lone = one_sided(processes, silent)
        # A request or its end may be on its way, to or from a process that is busy.
        ends = (Role.API, Role.ENGINE)
        if not lone or len(asked(server, "transit", ends)) < len(server.of(*ends)):
            return []
        if len(server.of(Role.ENGINE)) < engines(server):
            return []  # an engine on another node may have it
        knowing = {
            request.id: found.pid
            for found in processes
            for request in (*(found.front or ()), *(found.engine or ()))
        }
        by_pid = {process.pid: process for process in server.processes}
        return [
            Case(by_pid[knowing[name]], Proof(subject=name, what=why))
            for name, why in lone.items()
            if name in knowing  # what a worker alone has goes with the next step
        ]

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:
        rows = [Row(id=case.proof.subject, state="") for case in cases]
        return {one.id: one.left for one in end(server, rows, WHY) if one.left}


def engines(server: Server) -> int:
    """How many engines a server has on all its nodes, as far as its heartbeats tell."""
    pulses = [agent.beat(process) for process in server.of(Role.API, Role.ENGINE)]
    return max((pulse.beat.standing.sizes.get("DP", 1) for pulse in pulses if pulse), default=1)
