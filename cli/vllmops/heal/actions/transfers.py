"""Requests that wait in vain for KV blocks from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from ...instances.servers import Server
from ...requests import loads
from ...requests.ending import end
from ...requests.listing import Row
from ...rpc.proofs import Case
from ..action import InAgents


class Transfers(InAgents):
    name = loads.ACTION
    state = "a request waits for KV blocks whose transfer is over, or whose sender is gone"
    does = (
        "reports that load as failed: vLLM computes the request itself or ends it, as its policy "
        "for failed loads says; if the sender is gone, ends the request"
    )
    risk = "that request's client gets an error, unless the policy is recompute"
    reference = "https://github.com/vllm-project/vllm/issues/49829"
    unseen = True

    def look(self, server: Server) -> list[Case]:
        return loads.look(server)

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:
        left: dict[str, str] = {}
        for case in cases:
            if case.proof.why:
                row = Row(id=case.proof.subject, state="")
                left |= {one.id: one.left for one in end(server, [row], case.proof.why)}
        if lost := [case for case in cases if not case.proof.why]:
            left |= super().act(server, lost)
        return {name: why for name, why in left.items() if why}
