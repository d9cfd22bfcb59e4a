"""What an action is, and what became of what it has found."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..collect.agents.proven_states import HealCase, collect_cases, send_heal_request
from ..model.healing import HealRequest
from ..model.roles import Role
from ..servers.discovery import Server


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

    def find_cases(self, server: Server) -> list[HealCase]:
        """What a look shows; raises VllmopsError."""
        raise NotImplementedError

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:
        """Heal what is proven; why a subject was not healed, by subject. Raises VllmopsError."""
        raise NotImplementedError


class AgentAction(Action):
    """An action that the agents look for, and carry out in the processes where they found it."""

    roles: tuple[Role, ...] = (Role.ENGINE, Role.API)

    def find_cases(self, server: Server) -> list[HealCase]:
        return collect_cases(server.select_processes(*self.roles), self.name)

    def heal_or_explain(self, server: Server, cases: Sequence[HealCase]) -> dict[str, str]:  # noqa: ARG002
        left: dict[str, str] = {}
        for process in dict.fromkeys(case.process for case in cases):
            subjects = [case.proof.subject for case in cases if case.process == process]
            left |= send_heal_request(
                process, HealRequest(action=self.name, subjects=subjects)
            ).reason_by_subject
        return left


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of something that was proven.

    Args:
        action: its name.
        process: where, for a person.
        subject: what it is about.
        evidence: what was seen, with figures.
        done: whether it was healed: the last look does not show it any more.
        did: what was changed, or would be.
        reason: why it was not healed; empty if it was, or with ``--dry-run``.
    """

    action: str
    process: str
    subject: str
    evidence: str = msgspec.field(name="seen")
    done: bool
    did: str
    reason: str = msgspec.field(default="", name="left")
