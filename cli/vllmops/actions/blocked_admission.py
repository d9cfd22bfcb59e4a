"""A request at the head of the queue that can't be admitted."""

from __future__ import annotations

from collections.abc import Sequence

from ..collect.agents.proven_states import HealCase
from ..observe.requests.listing import InFlightRequest
from ..servers.discovery import Server
from .action import AgentAction
from .request_abort import abort_requests


class StuckAdmission(AgentAction):
    name = "admission"
    state = (
        "the first request in the queue needs more of the KV cache than there is, or than other "
        "requests leave free that wait themselves"
    )
    does = "ends that request; its client is told why, and the queue goes on"
    risk = "that request's client gets status 410"
    reference = "https://github.com/vllm-project/vllm/issues/39734"

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        left: dict[str, str] = {}
        for case in cases:
            row = InFlightRequest(id=case.proof.subject, state="")
            left |= {
                one.id: one.reason
                for one in abort_requests(server, [row], case.proof.client_message)
            }
        return {name: why for name, why in left.items() if why}
