"""What agents see of states that can be healed, and when it counts as proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import VllmopsError
from ..host.processes import Process
from ..host.states import state
from ..protocol.heal import Healing, HealRequest, Proof
from . import agent

LOOKS, APART_S = 3, 0.3
TIMEOUT_S = 5.0
# Each step tries again what could not be scheduled; with asynchronous scheduling, up to two steps
# that are on their way may still change something.
LEAST_STEPS = 3


@dataclass(frozen=True)
class Case:
    """Something that one look shows, and the process it is in."""

    process: Process
    proof: Proof

    @property
    def key(self) -> tuple[int, str, str]:
        """What must be the same in each look."""
        return self.process.pid, self.proof.subject, self.proof.same


def asked(processes: Sequence[Process], action: str) -> list[Case]:
    """What the agents of processes see of an action's state; one that does not answer sees none."""

    def one(process: Process) -> list[Case]:
        proofs = ask(process, HealRequest(action=action)).proofs
        return [Case(process, proof) for proof in proofs]

    answers, _ = agent.side_by_side(filter(awake, processes), one)
    return [case for cases in answers for case in cases]


def awake(process: Process) -> bool:
    """Whether a process runs Python, as far as the kernel and its heartbeat tell.

    Others do not answer before the time limit.
    """
    try:
        if not isinstance(process, agent.Distant) and state(process).state == "T":
            return False
        pulse = agent.beat(process)
    except VllmopsError:
        return False
    return pulse is None or pulse.age_s < agent.BEAT_LATE_S


def ask(process: Process, request: HealRequest, timeout_s: float = TIMEOUT_S) -> Healing:
    """Ask one agent; raises VllmopsError."""
    return agent.reach(process, timeout_s=timeout_s).heal(request)


def proven(looks: Sequence[Sequence[Case]]) -> list[Case]:
    """What every look shows, unchanged, while the engine took steps in vain.

    Args:
        looks: some hundred milliseconds apart.
    """

    def steps(case: Case) -> float:
        return float("nan") if case.proof.rises is None else case.proof.rises

    seen = [{case.key: case for case in look} for look in looks]
    cases = []
    for name, case in seen[-1].items() if seen else ():
        row = [look[name] for look in seen if name in look]
        tries = [steps(later) - steps(earlier) for earlier, later in pairwise(row)]
        # Of what needs no steps, each difference is NaN, which is not less than anything.
        if len(row) == len(seen) and not any(grown < LEAST_STEPS for grown in tries):
            cases.append(case)
    return cases


def certain(look: Callable[[], list[Case]]) -> list[Case]:
    """What is proven of a state: looks as often as that takes, once where there is none.

    Args:
        look: at the state; may raise VllmopsError.
    """
    looks = [look()]
    while looks[-1] and len(looks) < LOOKS:
        time.sleep(APART_S)
        looks.append(look())
    return proven(looks) if len(looks) == LOOKS else []
