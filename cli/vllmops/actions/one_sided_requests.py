"""Requests that only one side knows."""

from __future__ import annotations

from collections.abc import Sequence

from ..collect.agents.proven_states import HealCase
from ..model.healing import HealProof
from ..observe.requests import listing
from ..observe.requests.listing import InFlightRequest
from ..observe.requests.one_sided_requests import find_one_sided_requests
from ..servers.discovery import Server
from .action import Action
from .request_abort import abort_requests

WHY = "the engine lost this request: send it again"


class ZombieRequests(Action):
    name = "zombies"
    state = "only the API server or only the engine knows a request"
    does = "ends it, and frees what it holds"
    risk = "its client, if there is one, gets status 410"
    reference = "https://github.com/vllm-project/vllm/issues/55521"
    unseen = True

    def find_cases(self, server: Server) -> list[HealCase]:
        processes, silent = listing.collect_process_requests(server)
        lone = find_one_sided_requests(server, processes, silent)
        knowing = {
            request.id: holder.pid
            for holder in processes
            for request in (*(holder.front or ()), *(holder.engine or ()))
        }
        by_pid = {process.pid: process for process in server.processes}
        return [
            HealCase(by_pid[knowing[name]], HealProof(subject=name, evidence=why))
            for name, why in lone.items()
            if name in knowing  # what a worker alone has goes with the next step
        ]

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        rows = [InFlightRequest(id=case.proof.subject, state="") for case in cases]
        return {one.id: one.reason for one in abort_requests(server, rows, WHY) if one.reason}
