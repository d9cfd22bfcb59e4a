"""Requests that wait in vain for KV blocks from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from ..collect.agents.proven_states import HealCase
from ..observe.requests import stalled_transfers
from ..observe.requests.listing import InFlightRequest
from ..servers.discovery import Server
from .action import AgentAction
from .request_abort import abort_requests


class LostTransfers(AgentAction):
    name = stalled_transfers.ACTION
    state = "a request waits for KV blocks whose transfer is over, or whose sender is gone"
    does = (
        "reports that load as failed: vLLM computes the request itself or ends it, as its policy "
        "for failed loads says; if the sender is gone, ends the request"
    )
    risk = "that request's client gets an error, unless the policy is recompute"
    reference = "https://github.com/vllm-project/vllm/issues/49829"
    unseen = True

    def find_cases(self, server: Server) -> list[HealCase]:
        return stalled_transfers.find_lost_loads(server)

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        left: dict[str, str] = {}
        for case in cases:
            if case.proof.client_message:
                row = InFlightRequest(id=case.proof.subject, state="")
                left |= {
                    one.id: one.reason
                    for one in abort_requests(server, [row], case.proof.client_message)
                }
        if lost := [case for case in cases if not case.proof.client_message]:
            left |= super().heal_or_explain(server, lost)
        return {name: why for name, why in left.items() if why}
