"""What an action is, and when what it found counts as proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from ..errors import VllmopsError
from ..host.processes import Process
from ..host.roles import Role
from ..host.states import state
from ..instances.servers import Server
from ..protocol.heal import Healing, HealRequest, Proof
from ..rpc import agent

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


class Action:
    """A state, and how it is healed.

    Attributes:
        name: for ``--only`` and ``--skip``.
        state: that it heals.
        does: what it changes.
        risk: what somebody may lose by it.
        reference: a public report; empty without one.
        asks: whether it acts only with ``--resume``: somebody may have wanted the state.
        unseen: whether other requests may go on meanwhile, so that no stall shows it.
    """

    name = ""
    state = ""
    does = ""
    risk = ""
    reference = ""
    asks = False
    unseen = False

    def look(self, server: Server) -> list[Case]:
        """What a look shows; raises VllmopsError."""
        raise NotImplementedError

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:
        """Heal what is proven; why a subject was not healed, by subject. Raises VllmopsError."""
        raise NotImplementedError


class InAgents(Action):
    """An action that the agents look for, and carry out in the processes where they found it."""

    roles: tuple[Role, ...] = (Role.ENGINE, Role.API)

    def look(self, server: Server) -> list[Case]:
        return asked(server, self.name, self.roles)

    def act(self, server: Server, cases: Sequence[Case]) -> dict[str, str]:  # noqa: ARG002
        left: dict[str, str] = {}
        for process in dict.fromkeys(case.process for case in cases):
            subjects = [case.proof.subject for case in cases if case.process == process]
            left |= ask(process, HealRequest(action=self.name, subjects=subjects)).left
        return left


def asked(server: Server, action: str, roles: Sequence[Role]) -> list[Case]:
    """What the agents of a server see of an action's state; one that does not answer sees none."""

    def one(process: Process) -> list[Case]:
        proofs = ask(process, HealRequest(action=action)).proofs
        return [Case(process, proof) for proof in proofs]

    answers, _ = agent.side_by_side(filter(awake, server.of(*roles)), one)
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


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of something that was proven.

    Args:
        action: its name.
        process: where, for a person.
        subject: what it is about.
        seen: what was seen, with figures.
        done: whether it was healed: the last look does not show it any more.
        did: what was changed, or would be.
        left: why it was not healed; empty if it was, or with ``--dry-run``.
    """

    action: str
    process: str
    subject: str
    seen: str
    done: bool
    did: str
    left: str = ""
