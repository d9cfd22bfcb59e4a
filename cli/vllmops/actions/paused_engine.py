"""An engine that is paused or asleep."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..collect.agents.proven_states import HealCase, collect_cases, send_heal_request
from ..model.healing import HealRequest
from ..model.roles import Role
from ..servers.discovery import Server
from ..support.errors import VllmopsError
from .action import AgentAction

WAKE_S = 65.0  # weights come back from the host's memory


class PausedEngine(AgentAction):
    name = "paused"
    state = "an engine is paused or asleep"
    does = "wakes it and lets it go on"
    risk = "somebody may have paused it on purpose, to change its weights"
    reference = "https://github.com/inclusionAI/AReaL/issues/1160"
    asks = True

    def find_cases(self, server: Server) -> list[HealCase]:
        cases = super().find_cases(server)
        more: list[str] = []
        if cases:
            more += dict.fromkeys(case.proof.evidence for case in find_sleeping_weights(server))
            more += [
                case.proof.evidence
                for case in collect_cases(server.select_processes(Role.API), "pauser")
            ]
        return [
            HealCase(
                case.process, replace(case.proof, evidence="; ".join((case.proof.evidence, *more)))
            )
            for case in cases
        ]

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        request = HealRequest(action=self.name, subjects=[case.proof.subject for case in cases])
        if find_sleeping_weights(server):
            why = (
                "it would answer with random tokens: load its weights (reload_weights), or"
                f" vllmops restart {server.label}"
            )
            return dict.fromkeys(request.subjects or (), why)
        failed: dict[str, str] = dict.fromkeys(request.subjects or (), "no API server answers")
        for process in server.select_processes(Role.API):
            try:
                failed = send_heal_request(process, request, WAKE_S).reason_by_subject
            except VllmopsError as error:
                failed = dict.fromkeys(failed, error.message)
            if not failed:
                break
        return failed


def find_sleeping_weights(server: Server) -> list[HealCase]:
    """The processes of a server whose workers sleep without their weights."""
    return collect_cases(server.select_processes(Role.ENGINE, Role.WORKER), "sleeping-weights")
