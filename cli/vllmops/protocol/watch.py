"""What somebody who watches a server tells."""

from __future__ import annotations

from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a server.

    Args:
        event: ``stalled``, ``recovered``, ``repaired``, ``restarting``, ``failed`` (it ended, and
            not because somebody wanted that), ``ended``, ``away`` (it stops, or starts), ``ready``,
            or ``trouble``: what the watch itself could not do.
        at: seconds since the epoch.
        server: its name, or the pid of its first process.
        text: all of it in a line.
        url: where it answers, None where unknown.
        model: as given to vLLM.
        number: which stall, from 1; 0 where it is about none.
        seconds: how long the stall lasts by now, or has lasted.
        code: of the finding that explains it best.
        title: what that says.
        subject: what it is about.
        evidence: what was seen.
        next: what to do.
        reference: where upstream deals with it.
        findings: codes of everything that was found.
        bundle: where the evidence is; empty where it could not be written.
    """

    event: Literal[
        "stalled",
        "recovered",
        "repaired",
        "restarting",
        "failed",
        "ended",
        "away",
        "ready",
        "trouble",
    ]
    at: float
    server: str
    text: str
    url: str | None = None
    model: str | None = None
    number: int = 0
    seconds: float = 0.0
    code: str = ""
    title: str = ""
    subject: str = ""
    evidence: str = ""
    next: str = ""
    reference: str = ""
    findings: tuple[str, ...] = ()
    bundle: str = ""
