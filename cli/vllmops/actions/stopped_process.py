"""A process that a signal has stopped."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ..collect.agents.proven_states import HealCase
from ..collect.machine.process_states import observe_process
from ..collect.machine.processes import VITAL
from ..model.healing import HealProof
from ..servers.discovery import Server
from ..supervision.shutdown import send_signal
from .action import Action


class StoppedProcess(Action):
    name = "stopped"
    state = "a process of the server is stopped by a signal"
    does = "continues it: kill -CONT"
    risk = "somebody may have stopped it on purpose, to look at it"
    asks = True

    def find_cases(self, server: Server) -> list[HealCase]:
        if server.fleet:  # its processes are on another machine
            return []
        return [
            HealCase(
                process, HealProof(subject="process", evidence=f"state T; kill -CONT {process.pid}")
            )
            for process in server.select_processes(*VITAL)
            if observe_process(process).state == "T"
        ]

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:  # noqa: ARG002
        for case in cases:
            send_signal(case.process, signal.SIGCONT)
        return {}
