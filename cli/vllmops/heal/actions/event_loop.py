"""An API server's event loop that a parser blocks."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import VllmopsError
from ...host.processes import Process
from ...host.roles import Role
from ...instances.servers import Server
from ...instances.takedown import kill
from ...protocol.heal import Proof
from ...protocol.parsers import parses
from ...rpc import agent
from ...rpc.proofs import Case
from ...stacks import pyspy
from ..action import Action

BLOCKED_S = 3.0
DUMP_S = 10.0


class EventLoop(Action):
    name = "event-loop"
    state = "a tool parser blocks the event loop of an API server"
    does = "ends that parser with a signal; the loop goes on"
    risk = "that request ends with an error, or its tool calls stay text"
    reference = "https://github.com/vllm-project/vllm/issues/18304"

    def look(self, server: Server) -> list[Case]:
        blocked = [process for process in server.of(Role.API) if blocks(process)]
        if not blocked or server.fleet:  # a signal comes from its own machine
            return []
        dumps = pyspy.capture(blocked, timeout_s=DUMP_S).processes
        cases = []
        for process, dump in zip(blocked, dumps, strict=True):
            main = next((thread for thread in dump.threads if thread.tid == dump.pid), None)
            frames = main.frames if main else ()
            if parser := next((one for one in frames if parses(one.function, one.file)), None):
                what = f"its main thread is in {frames[0].function}, for {parser.function}"
                cases.append(Case(process, Proof(subject="event loop", what=what)))
        return cases

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:  # noqa: ARG002
        left = {}
        for case in cases:
            pulse = agent.beat(case.process)
            number = pulse.beat.interrupt if pulse else 0
            if number and caught(case.process.pid, number):
                kill(case.process, number)
            else:
                left[case.proof.subject] = "its agent has no handler for the signal that ends it"
        return left


def blocks(process: Process) -> bool:
    """Whether an API server's event loop has run nothing for a while."""
    try:
        pulse = agent.beat(process)
    except VllmopsError:
        return False
    return pulse is not None and pulse.age_s + (pulse.beat.loop_s or 0.0) > BLOCKED_S


def caught(pid: int, number: int) -> bool:
    """Whether a process handles a signal: one that it does not would end it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = dict(line.split(":\t", 1) for line in file if line.startswith("Sig"))
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False
