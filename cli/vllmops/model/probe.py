"""Whether a server lives, is ready and has started, for those who restart it or send it requests.

It imports nothing slow: a probe runs every few seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

# The longest time that a healthy server makes no progress with requests pending: a step, and more.
PATIENCE_S = 10.0
# The roles without which a server does not work.
VITAL = frozenset({"launcher", "api", "engine", "worker", "coordinator"})
# Somebody wants that a server makes no progress, or takes no requests.
WANTED = {"draining", "paused", "asleep"}
OVER = {"stopped", "failed"}
WORDS = {"liveness": "live", "readiness": "ready", "startup": "started"}


class ProbeResult(NamedTuple):
    """What is known of a server.

    Args:
        live: False only if it has ended, or if a stall is sure and the evidence is on the disk.
        ready: whether it is to get new requests.
        started: whether it has come up since its last start.
        reason: what is wrong, in words; empty if it is ready.
        evidence: the bundle that was kept; empty without one.
    """

    live: bool
    ready: bool
    started: bool
    reason: str = ""
    evidence: str = ""

    def format_answer(self, kind: str) -> str:
        """One line.

        Args:
            kind: one of `WORDS`.
        """
        word = WORDS[kind]
        said = word if self.has_passed(kind) else f"not {word}"
        return f"{said}: {self.reason}" if self.reason else said

    def has_passed(self, kind: str) -> bool:
        """The answer to one question.

        Args:
            kind: one of `WORDS`.
        """
        return bool(getattr(self, WORDS[kind]))


def judge_state(
    state: str,
    stage: str = "",
    *,
    unready: Collection[str] = (),
    stall: str = "",
    is_certain: bool = False,
    evidence: str = "",
) -> ProbeResult:
    """The verdict on a server, over all its ranks and nodes.

    Args:
        state: ``starting``, ``ready``, ``stopping``, ``stopped`` or ``failed``.
        stage: of a server that starts.
        unready: why its processes are no place for new requests.
        stall: what makes no progress, or who does not answer, in words; empty without.
        is_certain: whether that is a stall for sure.
        evidence: as in `ProbeResult`.
    """
    if state in OVER:
        return ProbeResult(live=False, ready=False, started=False, reason=f"it has {state}")
    if state == "starting":
        return ProbeResult(live=True, ready=False, started=False, reason=f"it is starting: {stage}")
    if state == "stopping":
        return ProbeResult(live=True, ready=False, started=True, reason="it is stopping")
    wanted = WANTED.intersection(unready)
    dead = bool(stall and is_certain and evidence and not wanted)
    reason = "; ".join(filter(None, (*unready, stall)))
    return ProbeResult(
        live=not dead, ready=not reason, started=True, reason=reason, evidence=evidence
    )
