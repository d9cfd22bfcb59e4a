"""States that an agent can heal: what proves them, and what became of them."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer


class HealProof(msgspec.Struct, frozen=True, kw_only=True):
    """One look at something that can be healed; one look alone proves nothing.

    Args:
        subject: what is to be healed: the id of a request, or ``PART PID``.
        evidence: what was seen, with figures.
        client_message: what the client of a request is told; empty where none is.
        progress_key: must be the same in each look: what would change if the subject got further.
        requests: ids of the requests that end with it.
        rises: steps of the engine so far, which must rise from look to look; None if none need.
    """

    subject: str
    evidence: str = msgspec.field(name="what")
    client_message: str = msgspec.field(default="", name="why")
    progress_key: str = msgspec.field(default="", name="same")
    requests: tuple[str, ...] = ()
    rises: int | None = None


class HealRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to look for one state, or to heal it.

    Args:
        action: its name.
        subjects: what to heal; None to look only. It is looked at once more before.
        request_ids: ids of requests, for a look at what a process knows of them.
        note: a line for the server's log.
    """

    action: str = ""
    subjects: list[str] | None = None
    request_ids: list[str] = msgspec.field(default=[], name="among")
    note: str = ""


class HealAnswer(AgentAnswer, frozen=True, kw_only=True):
    """What was found, or done.

    Args:
        pid: process id.
        role: as in `Hello`.
        proofs: what a look shows.
        reason_by_subject: why a subject was not healed, by subject.
    """

    pid: int
    role: str
    proofs: tuple[HealProof, ...] = ()
    reason_by_subject: dict[str, str] = msgspec.field(default_factory=dict, name="left")
