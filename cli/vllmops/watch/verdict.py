"""What the looks at a server say of it to an orchestrator: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from ..diagnose.doctor import Diagnosis
from ..diagnose.progress import ENDED, UNHEALTHY, Stall, living
from ..instances.record import State
from ..instances.servers import Server
from ..protocol.probe import Verdict, judge
from ..protocol.server import Observation

# Without another sign, so long without progress is no work: not a prompt of many tokens.
LONG_S = 120.0
CERTAIN = {ENDED.code, UNHEALTHY.code}
HANGS = {"hang", "crash"}


def is_sure(found: Sequence[Stall], diagnosis: Diagnosis) -> bool:
    """Whether the evidence proves stalls, so that nothing else but a restart may help."""
    explained = diagnosis.explanation
    return any(stall.code in CERTAIN for stall in found) or (
        explained is not None and explained.verdict in HANGS
    )


def likely(found: Sequence[Stall]) -> str:
    """The first stall that can hardly be anything else, in words; empty without one."""
    return next((stall.evidence for stall in found if not stall.doubt), "")


def has_begun(look: Observation) -> bool:
    """Whether a server that has no record is up: its front end runs, or its engines schedule."""
    beats = [pulse.beat for pulse in look.pulses]
    engines = [beat for beat in beats if beat.role == "engine"]
    return (
        look.health == 200
        or any(beat.loop_s is not None for beat in beats)
        or (bool(engines) and all(beat.current_step is not None for beat in engines))
    )


def verdict(
    server: Server,
    look: Observation | None,
    *,
    begun: bool = False,
    over: bool = False,
    stall: str = "",
    sure: bool = False,
    evidence: str = "",
    note: str = "",
) -> Verdict:
    """The verdict on a server.

    Args:
        server: as it is known now.
        look: the last one; None before the first one.
        begun: whether a server without a record was up before.
        over: whether a server without a record is gone.
        stall: what makes no progress, in words; empty without a stall.
        sure: whether that is proven.
        evidence: the bundle that was kept of it; empty without one.
        note: which of its nodes do not answer.
    """
    unready = dict.fromkeys(
        pulse.beat.unready for pulse in (living(look) if look else ()) if pulse.beat.unready
    )
    if record := server.record:
        state, stage = record.state, record.stage
    elif over:
        state, stage = State.FAILED, ""
    else:
        begun = begun or (look is not None and has_begun(look))
        state, stage = (State.READY if begun else State.STARTING), "it does not answer yet"
    return judge(
        state,
        stage,
        unready=unready,
        stall="; ".join(filter(None, (stall, note))),
        sure=sure,
        evidence=evidence,
    )
