"""An API server's event loop that a parser blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..collect.agents import agent_files
from ..collect.agents.proven_states import HealCase
from ..collect.machine.processes import Process
from ..collect.stacks import pyspy
from ..model.healing import HealProof
from ..model.parser_frames import is_parser_call
from ..model.roles import Role
from ..servers.discovery import Server
from ..supervision.shutdown import send_signal
from ..support.errors import VllmopsError
from .action import Action

BLOCKED_S = 3.0
DUMP_S = 10.0
AGAIN_S = 1.0  # until the second signal; a call of a parser takes less


class BlockedEventLoop(Action):
    name = "event-loop"
    state = "a tool parser blocks the event loop of an API server"
    does = "ends that parser with a signal; the loop goes on"
    risk = "that request ends with an error, or its tool calls stay text"
    reference = "https://github.com/vllm-project/vllm/issues/18304"

    def find_cases(self, server: Server) -> list[HealCase]:
        begins = {
            process: find_blocked_since(process) for process in server.select_processes(Role.API)
        }
        blocked = [process for process, begin in begins.items() if begin]
        if not blocked or server.fleet:  # a signal comes from its own machine
            return []
        dumps = pyspy.dump_stacks(blocked, timeout_s=DUMP_S).processes
        cases = []
        for process, dump in zip(blocked, dumps, strict=True):
            main = next((thread for thread in dump.threads if thread.tid == dump.pid), None)
            frames = main.frames if main else ()
            if parser := next(
                (one for one in frames if is_parser_call(one.function, one.file)), None
            ):
                what = f"its main thread is in {frames[0].function}, for {parser.function}"
                proof = HealProof(subject="event loop", evidence=what, progress_key=begins[process])
                cases.append(HealCase(process, proof))
        return cases

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:  # noqa: ARG002
        left = {}
        for case in cases:
            pulse = agent_files.read_heartbeat(case.process)
            number = pulse.heartbeat.interrupt if pulse else 0
            if not (number and has_signal_handler(case.process.pid, number)):
                left[case.proof.subject] = "its agent has no handler for the signal that ends it"
                continue
            if find_blocked_since(case.process) == case.proof.progress_key:
                # The handler ends a call only if both meet it, and none that has begun since.
                # The first one lets a heartbeat come, with another begin: that tells nothing more.
                send_signal(case.process, number)
                time.sleep(AGAIN_S)
                send_signal(case.process, number)
        return left


def find_blocked_since(process: Process) -> str:
    """When an API server's event loop ran last; empty if that is not long ago.

    It is the same as long as the loop runs nothing, whether or not there are heartbeats meanwhile.
    """
    try:
        pulse = agent_files.read_heartbeat(process)
    except VllmopsError:
        return ""
    loop_s = (pulse.heartbeat.loop_s or 0.0) if pulse else 0.0
    if pulse is None or pulse.age_s + loop_s <= BLOCKED_S:
        return ""
    return f"{pulse.heartbeat.monotonic - loop_s:.3f}"


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process handles a signal: one that it does not would end it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = dict(line.split(":\t", 1) for line in file if line.startswith("Sig"))
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False
