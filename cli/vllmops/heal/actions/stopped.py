"""A process that a signal has stopped."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ...host.processes import VITAL
from ...host.states import state
from ...instances.servers import Server
from ...instances.takedown import kill
from ...protocol.heal import Proof
from ...rpc.proofs import Case
from ..action import Action


class Stopped(Action):
    name = "stopped"
    state = "a process of the server is stopped by a signal"
    does = "continues it: kill -CONT"
    risk = "somebody may have stopped it on purpose, to look at it"
    asks = True

    def look(self, server: Server) -> list[Case]:
        if server.fleet:  # its processes are on another machine
            return []
        return [
            Case(process, Proof(subject="process", what=f"state T; kill -CONT {process.pid}"))
            for process in server.of(*VITAL)
            if state(process).state == "T"
        ]

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:  # noqa: ARG002
        for case in cases:
            kill(case.process, signal.SIGCONT)
        return {}
