"""Everything that is wrong with a server, worst first; pure, from one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..protocol.engine import Beat
from ..protocol.pasted import Pasted
from ..protocol.server import Look, ServerSnapshot
from ..protocol.stacks import StacksSnapshot
from . import caches, compares, memory, progress, server, stacks
from .findings import Finding, Severity
from .signatures import catalogue

# Among the equally bad the cause comes before what only shows it.
SHOWS = {"engine.no-progress": 1, "engine.unreached": 1, "api.silent": 1, "canary.failed": 2}
# What says less about the same, by what says more.
HIDES = {
    "engine.missing": {"stack.engine-core-missing", "api.unhealthy", "process.ended"},
    "process.ended": {"process.dead"},
    "process.stopped": {"process.no-python", "api.silent", "agent.silent"},
    "process.no-python": {"agent.silent"},
}


class Check(msgspec.Struct, frozen=True):
    """A kind of finding, as ``doctor --list`` shows it."""

    code: str
    severity: Severity
    title: str


class Diagnosis(msgspec.Struct, frozen=True):
    """The answer.

    Args:
        findings: worst first.
        stalls: what has stopped.
        explanation: what the stacks say; None where there are none.
    """

    findings: tuple[Finding, ...]
    stalls: tuple[progress.Stall, ...]
    explanation: stacks.Explanation | None


def checks() -> list[Check]:
    """Every kind of finding, by code."""
    rules = [*caches.CATALOGUE.values(), *memory.RULES, *progress.RULES]
    rules += [rule for rule in server.CATALOGUE.values() if rule not in rules]
    found = [Check(rule.code, rule.severity, rule.title) for rule in rules]
    found += [Check(s.code, s.severity, s.title) for s in catalogue() if s.hang]
    found.append(Check("stack.crash", Severity.ERROR, "a traceback ends a process"))
    return sorted(found, key=lambda each: each.code)


def examine(snapshot: ServerSnapshot, patience_s: float = progress.PATIENCE_S) -> Diagnosis:
    """All findings of a snapshot.

    Args:
        snapshot: of a server, live or from a bundle.
        patience_s: how long a server may show no sign while requests are there.
    """
    explained = explanation(snapshot, patience_s)
    stopped = stalled(snapshot, explained, patience_s)
    found = [*stalls(stopped), *hung(explained), *server.diagnose(snapshot)]
    if snapshot.caches:
        found += caches.diagnose(snapshot.caches)
    for comparison in snapshot.comparisons:
        found += compares.drift(comparison)
    if snapshot.memory:
        found += memory.diagnose(snapshot.memory, memory.trends(snapshot.memory))
    return Diagnosis(tuple(ranked(found)), tuple(stopped), explained)


def explanation(
    snapshot: ServerSnapshot, patience_s: float = progress.PATIENCE_S
) -> stacks.Explanation | None:
    """What the stacks say, with the figures that were taken beside them; None without stacks."""
    return explain(snapshot.stacks, snapshot.looks, patience_s) if snapshot.stacks else None


def explain(
    samples: Sequence[StacksSnapshot],
    looks: Sequence[Look],
    patience_s: float = progress.PATIENCE_S,
) -> stacks.Explanation:
    """What stacks of all processes say, and looks that were taken beside them."""
    pasted = Pasted(tuple(samples), complete=True)
    known = facts(looks, patience_s)
    alone = stacks.explain(pasted)
    # The gauge of running requests keeps its value when the last one is aborted; an idle engine
    # that was seen three times is surer. Deferred requests are what it waits for without a sign.
    if alone.verdict == "idle" and not engines(looks) and known.get("deferred", "0") == "0":
        return alone
    return stacks.explain(pasted, known)


def engines(looks: Sequence[Look]) -> list[Beat]:
    """The last heartbeats of processes that have a scheduler."""
    last = looks[-1].pulses if looks else ()
    return [pulse.beat for pulse in last if pulse.beat.still_s is not None]


def facts(looks: Sequence[Look], patience_s: float) -> dict[str, str]:
    """Figures for the stacks' signatures; an agent's are fresh, the metrics' may be stale."""
    if not looks:
        return {}
    found = stacks.figures(looks[0].metrics, looks[-1].metrics, looks[-1].at_s - looks[0].at_s)
    if beats := engines(looks):
        found["running"] = str(sum(beat.running or 0 for beat in beats))
        found["waiting"] = str(sum(beat.waiting or 0 for beat in beats))
        if found.get("progress") == "frozen":
            del found["progress"]
    if any(stall.doubt in {"", "writing"} for stall in progress.stalls(looks, patience_s)):
        found["progress"] = "frozen"
    return found | pace(looks)


def pace(looks: Sequence[Look]) -> dict[str, str]:
    """For how long the engine stands still that does so longest, and whether it takes steps."""
    telling = [p for p in progress.living(looks[-1]) if p.age_s < progress.LATE_S]
    still = {p.pid: p.beat.still_s for p in telling if p.beat.still_s is not None}
    if not still or len(looks) < 2:
        return {}
    slowest = max(telling, key=lambda pulse: still.get(pulse.pid, -1.0))
    steps = "moving" if progress.stepping(looks, slowest) else "frozen"
    return {"steps": steps, "still": f"{still[slowest.pid]:.0f}"}


def stalled(
    snapshot: ServerSnapshot, explained: stacks.Explanation | None, patience_s: float
) -> list[progress.Stall]:
    """What has stopped; a doubtful one as far as stacks and agents bear it out."""
    verdict = explained.verdict if explained else None
    answered = {progress.named(each) for each in snapshot.told}
    found = progress.stalls(snapshot.looks, patience_s)
    return [each for each in found if each.stands(verdict, answered)]


def stalls(found: Sequence[progress.Stall]) -> Iterator[Finding]:
    rules = {rule.code: rule for rule in progress.RULES}
    for each in found:
        yield rules[each.code].at(each.subject, each.evidence)


def hung(explained: stacks.Explanation | None) -> Iterator[Finding]:
    """What the stacks prove: a signature that work fits, too, is none."""
    for each in explained.findings if explained else ():
        if each.hang and each.confidence != "possible":
            yield each


def ranked(found: Sequence[Finding]) -> list[Finding]:
    """Each once, worst first; the cause before what only shows it."""
    here = {each.code for each in found}
    hidden = {code for each in here for code in HIDES.get(each, ())}
    once = {(each.code, each.subject): each for each in found if each.code not in hidden}
    return sorted(once.values(), key=lambda each: (-each.severity.rank, SHOWS.get(each.code, 0)))
