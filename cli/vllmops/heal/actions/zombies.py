"""Requests that only one side knows."""

from __future__ import annotations

from collections.abc import Sequence

from ...instances.servers import Server
from ...protocol.heal import Proof
from ...requests import listing
from ...requests.ending import end
from ...requests.listing import Row
from ...requests.lost import lost
from ...rpc.proofs import Case
from ..action import Action

WHY = "the engine lost this request: send it again"


class Zombies(Action):
    name = "zombies"
    state = "only the API server or only the engine knows a request"
    does = "ends it, and frees what it holds"
    risk = "its client, if there is one, gets status 410"
    reference = "https://github.com/vllm-project/vllm/issues/55521"
    unseen = True

    def look(self, server: Server) -> list[Case]:
        processes, silent = listing.look(server)
        lone = lost(server, processes, silent)
        knowing = {
            request.id: holder.pid
            for holder in processes
            for request in (*(holder.front or ()), *(holder.engine or ()))
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
