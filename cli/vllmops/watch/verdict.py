"""What the looks at a server say of it to an orchestrator: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..diagnose.doctor import Diagnosis, cause
from ..diagnose.findings import Finding
from ..diagnose.progress import ENDED, UNHEALTHY, Stall, living
from ..instances.record import State
from ..instances.servers import Server
from ..protocol.probe import Verdict, judge
from ..protocol.server import Observation, ServerSnapshot

# Whatever it is, so long without progress is no work: not a prompt of many tokens.
LONG_S = 120.0
CERTAIN = {ENDED.code, UNHEALTHY.code}
# No work ever looks like these, however busy the process is.
PROOFS = {
    *("engine.missing", "process.stopped", "stack.admission-deadlock", "stack.crash"),
    *("stack.dp-collective-mismatch", "stack.engine-core-missing", "stack.input-thread-dead"),
    *("stack.lost-broadcast", "stack.mm-cache-eviction-spin", "stack.schedule-livelock"),
    "stack.tool-parser-regex",
}
BUSY = 0.1  # of a core, or of a GPU's time; one that is blocked still beats and is looked into
WINDOW_S = 8.0
NUMBER = re.compile(r"\d+")


def is_sure(found: Sequence[Stall], snapshot: ServerSnapshot, diagnosis: Diagnosis) -> bool:
    """Whether the evidence proves stalls, so that nobody needs to wait any longer.

    A step of a long prompt keeps one place in the stacks for half a minute, as a hang does. What
    tells it from a hang is that the processor or the GPU works.
    """
    if any(stall.code in CERTAIN for stall in found):
        return True
    why = cause(found, diagnosis)
    if why.code in PROOFS:
        return True
    explained = diagnosis.explanation
    return explained is not None and explained.verdict == "hang" and not works(snapshot, why)


def works(snapshot: ServerSnapshot, why: Finding) -> bool:
    """Whether the processes that a finding is about compute; all of them if it names none."""
    pids = set(map(int, NUMBER.findall(why.subject)))
    first, last = dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()
    for look in snapshot.looks:
        if snapshot.looks[-1].at_s - look.at_s <= WINDOW_S:
            for process in look.processes:
                first.setdefault(process.pid, (look.at_s, process.cpu_s))
                last[process.pid] = (look.at_s, process.cpu_s)
    shares = {
        pid: (cpu_s - first[pid][1]) / (at_s - first[pid][0])
        for pid, (at_s, cpu_s) in last.items()
        if at_s > first[pid][0]
    }
    named = {pid: share for pid, share in shares.items() if pid in pids} or shares
    gpus = snapshot.machine.gpus
    return (
        not named
        or max(named.values()) >= BUSY
        or any(gpu.busy is None or gpu.busy >= BUSY for gpu in gpus)
    )


def likely(found: Sequence[Stall]) -> str:
    """The first stall that can hardly be anything else, in words; empty without one."""
    return next((stall.evidence for stall in found if not stall.doubt), "")


def has_begun(look: Observation) -> bool:
    """Whether a server that has no record is up: its front end runs, or its engines schedule."""
    engines = [pulse.beat for pulse in look.pulses if pulse.role == "engine"]
    return (
        look.health == 200
        or any(pulse.beat.loop_s is not None for pulse in look.pulses)
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
