"""An engine that is paused or asleep."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ...errors import VllmopsError
from ...host.roles import Role
from ...instances.servers import Server
from ...protocol.heal import HealRequest
from ...rpc.proofs import Case, ask, asked
from ..action import InAgents

WAKE_S = 65.0  # weights come back from the host's memory


class Paused(InAgents):
    name = "paused"
    state = "an engine is paused or asleep"
    does = "wakes it and lets it go on"
    risk = "somebody may have paused it on purpose, to change its weights"
    reference = "https://github.com/inclusionAI/AReaL/issues/1160"
    asks = True

    def look(self, server: Server) -> list[Case]:
        cases = super().look(server)
        more: list[str] = []
        if cases:
            more += dict.fromkeys(case.proof.what for case in without_weights(server))
            more += [case.proof.what for case in asked(server.of(Role.API), "pauser")]
        return [
            Case(case.process, replace(case.proof, what="; ".join((case.proof.what, *more))))
            for case in cases
        ]

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:
        request = HealRequest(action=self.name, subjects=[case.proof.subject for case in cases])
        if without_weights(server):
            why = (
                "it would answer with random tokens: load its weights (reload_weights), or"
                f" vllmops restart {server.label}"
            )
            return dict.fromkeys(request.subjects or (), why)
        failed: dict[str, str] = dict.fromkeys(request.subjects or (), "no API server answers")
        for process in server.of(Role.API):
            try:
                failed = ask(process, request, WAKE_S).left
            except VllmopsError as error:
                failed = dict.fromkeys(failed, error.message)
            if not failed:
                break
        return failed


def without_weights(server: Server) -> list[Case]:
    """The processes of a server whose workers sleep without their weights."""
    return asked(server.of(Role.ENGINE, Role.WORKER), "sleeping-weights")
