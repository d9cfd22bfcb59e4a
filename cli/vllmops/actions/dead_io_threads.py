"""Threads that read and write an engine's sockets."""

from __future__ import annotations

from collections.abc import Sequence

from ..collect.agents.proven_states import HealCase, send_heal_request
from ..model.healing import HealRequest
from ..model.roles import Role
from ..observe.requests.listing import InFlightRequest
from ..servers.discovery import Server
from .action import AgentAction
from .request_abort import abort_requests

WHY = "an error in the engine's {subject} lost a part of this request: send it again"


class DeadIoThreads(AgentAction):
    name = "io-threads"
    state = "the thread that reads or writes an engine's sockets has ended"
    does = "starts it again on the same sockets; the request whose message ended it ends"
    risk = "the client of that request gets status 410"
    reference = "https://github.com/vllm-project/vllm/issues/26195"
    # Without the one that writes, the engine goes on with what comes, and nobody gets an answer.
    unseen = True

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        for case in cases:
            # Before the thread runs: what is queued behind would be an answer with a hole.
            if rows := [InFlightRequest(id=name, state="") for name in case.proof.requests]:
                abort_requests(server, rows, WHY.format(subject=case.proof.subject))
        request = HealRequest(action=self.name, subjects=[case.proof.subject for case in cases])
        for process in server.select_processes(Role.API):
            if left := send_heal_request(process, request).reason_by_subject:
                return left
        return super().heal_or_explain(server, cases)
