"""The events that a watch reports."""

from __future__ import annotations

from typing import Literal

import msgspec


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a server.

    Args:
        event: ``stalled``, ``recovered``, ``repaired``, ``healed``, ``restarting``, ``failed`` (it
            ended, and not because somebody wanted that), ``ended``, ``away`` (it stops, or starts),
            ``ready``, or ``trouble``: another node does not answer, or the watch could not do
            something.
        happened_at: seconds since the epoch.
        server: its name, or the pid of its first process.
        text: all of it in a line.
        url: where it answers, None if unknown.
        model: as given to vLLM.
        number: the number of the stall, from 1; 0 if the event is about none.
        seconds: how long the stall has lasted.
        code: of the finding that explains it best.
        title: of that finding.
        subject: what it is about.
        victims: the processes that wait for the subject, and are not the cause.
        evidence: of that finding.
        next_step: what to do.
        reference: an upstream issue or pull request.
        findings: codes of all findings.
        bundle: where the evidence is; empty if it could not be written.
    """

    event: Literal[
        "stalled",
        "recovered",
        "repaired",
        "healed",
        "restarting",
        "failed",
        "ended",
        "away",
        "ready",
        "trouble",
    ]
    happened_at: float = msgspec.field(name="at")
    server: str
    text: str
    url: str | None = None
    model: str | None = None
    number: int = 0
    seconds: float = 0.0
    code: str = ""
    title: str = ""
    subject: str = ""
    victims: tuple[str, ...] = ()
    evidence: str = ""
    next_step: str = msgspec.field(default="", name="next")
    reference: str = ""
    findings: tuple[str, ...] = ()
    bundle: str = ""
