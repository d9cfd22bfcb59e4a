"""What agents see of states that can be healed, and when it counts as proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...model.healing import HealAnswer, HealProof, HealRequest
from ...support.errors import VllmopsError
from ..machine.process_states import observe_process
from ..machine.processes import Process
from . import agent_client, agent_files

LOOKS, APART_S = 3, 0.3
TIMEOUT_S = 5.0
# Each step tries again what could not be scheduled; with asynchronous scheduling, up to two steps
# that are on their way may still change something.
LEAST_STEPS = 3


@dataclass(frozen=True)
class HealCase:
    """Something that one look shows, and the process it is in."""

    process: Process
    proof: HealProof

    @property
    def comparison_key(self) -> tuple[int, str, str]:
        """What must be the same in each look."""
        return self.process.pid, self.proof.subject, self.proof.progress_key


def collect_cases(processes: Sequence[Process], action: str) -> list[HealCase]:
    """What the agents of processes see of an action's state; one that does not answer sees none."""

    def fetch_cases(process: Process) -> list[HealCase]:
        proofs = send_heal_request(process, HealRequest(action=action)).proofs
        return [HealCase(process, proof) for proof in proofs]

    answers, _ = agent_client.collect_answers(filter(is_running_python, processes), fetch_cases)
    return [case for cases in answers for case in cases]


def is_running_python(process: Process) -> bool:
    """Whether a process runs Python, as far as the kernel and its heartbeat tell.

    Others do not answer before the time limit.
    """
    try:
        if (
            not isinstance(process, agent_files.ProxiedProcess)
            and observe_process(process).state == "T"
        ):
            return False
        pulse = agent_files.read_heartbeat(process)
    except VllmopsError:
        return False
    return pulse is None or pulse.age_s < agent_files.BEAT_LATE_S


def send_heal_request(
    process: Process, request: HealRequest, timeout_s: float = TIMEOUT_S
) -> HealAnswer:
    """Ask one agent; raises VllmopsError."""
    return agent_client.open_agent(process, timeout_s=timeout_s).send_heal_request(request)


def select_proven_cases(snapshots: Sequence[Sequence[HealCase]]) -> list[HealCase]:
    """What every look shows, unchanged, while the engine took steps in vain.

    Args:
        snapshots: some hundred milliseconds apart.
    """

    def get_step_count(case: HealCase) -> float:
        return float("nan") if case.proof.rises is None else case.proof.rises

    seen = [{case.comparison_key: case for case in look} for look in snapshots]
    cases = []
    for name, case in seen[-1].items() if seen else ():
        row = [look[name] for look in seen if name in look]
        tries = [
            get_step_count(later) - get_step_count(earlier) for earlier, later in pairwise(row)
        ]
        # Of what needs no steps, each difference is NaN, which is not less than anything.
        if len(row) == len(seen) and not any(grown < LEAST_STEPS for grown in tries):
            cases.append(case)
    return cases


def prove_cases(find_cases: Callable[[], list[HealCase]]) -> list[HealCase]:
    """What is proven of a state: looks as often as that takes, once where there is none.

    Args:
        find_cases: at the state; may raise VllmopsError.
    """
    looks = [find_cases()]
    while looks[-1] and len(looks) < LOOKS:
        time.sleep(APART_S)
        looks.append(find_cases())
    return select_proven_cases(looks) if len(looks) == LOOKS else []
