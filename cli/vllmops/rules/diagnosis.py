"""All findings of a server, worst first; pure, from one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..model.agent_state import Heartbeat
from ..model.findings import Finding, Severity
from ..model.pasted_stacks import PastedStacks
from ..model.ranks import make_process_key
from ..model.server_snapshot import RasCapture, ServerSample, ServerSnapshot
from ..model.stacks import StacksSnapshot
from ..model.step_recording import StepsRecording
from . import (
    cache_comparison,
    caches,
    memory_growth,
    progress,
    requests,
    server_state,
    step_history,
)
from .stacks import explanation as stacks
from .stacks.progress_facts import make_metrics_facts
from .stacks.signatures import load_signatures

# Of two findings with one severity the cause comes before the symptom: a higher number comes later.
SYMPTOMS = {"engine.no-progress": 1, "engine.unreached": 1, "api.silent": 1, "canary.failed": 2}
# A finding hides those that say less about the same thing.
HIDES = {
    "engine.missing": {"stack.engine-core-missing", "api.unhealthy", "process.ended"},
    "process.ended": {"process.dead"},
    "process.stopped": {"process.no-python", "api.silent", "agent.silent"},
    "process.no-python": {"agent.silent"},
}


# Findings that explain a stall, besides those of stacks.
CAUSES = {"process.stopped", "engine.missing"}


class Check(msgspec.Struct, frozen=True):
    """A kind of finding, as ``doctor --list`` shows it."""

    code: str
    severity: Severity
    title: str


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of a diagnosis.

    Args:
        findings: worst first.
        stalls: what has stopped.
        explanation: what the stacks say; None without stacks.
    """

    findings: tuple[Finding, ...]
    stalls: tuple[progress.Stall, ...]
    explanation: stacks.Explanation | None


def list_checks() -> list[Check]:
    """Every kind of finding, by code."""
    rules = [*caches.CATALOGUE.values(), *memory_growth.RULES, *progress.RULES, *requests.RULES]
    rules += [rule for rule in server_state.CATALOGUE.values() if rule not in rules]
    found = [Check(rule.code, rule.severity, rule.title) for rule in rules]
    found += [Check(s.code, s.severity, s.title) for s in load_signatures() if s.hang]
    found.append(Check("stack.crash", Severity.ERROR, "a traceback shows why a process ended"))
    return sorted(found, key=lambda check: check.code)


def diagnose_snapshot(
    snapshot: ServerSnapshot, patience_s: float = progress.PATIENCE_S
) -> Diagnosis:
    """All findings of a snapshot.

    Args:
        snapshot: of a server, live or from a bundle.
        patience_s: seconds that a server may make no progress while requests are pending.
    """
    explained = explain_snapshot(snapshot, patience_s)
    stopped = select_confirmed_stalls(snapshot, explained, patience_s)
    findings = [
        *make_stall_findings(stopped, snapshot.recordings),
        *select_hang_findings(explained),
        *server_state.diagnose_server(snapshot),
    ]
    findings += requests.make_lost_load_findings(snapshot.lost_loads)
    if snapshot.caches:
        findings += caches.diagnose_caches(snapshot.caches)
    for comparison in snapshot.comparisons:
        findings += cache_comparison.diagnose_comparison(comparison) if comparison.samples else []
    if snapshot.memory:
        findings += memory_growth.diagnose_memory(
            snapshot.memory, memory_growth.compute_trends(snapshot.memory)
        )
    return Diagnosis(tuple(rank_findings(findings)), tuple(stopped), explained)


def find_cause(stalls_: Sequence[progress.Stall], diagnosis: Diagnosis) -> Finding:
    """The finding that explains stalls best; there is at least one."""
    for finding in diagnosis.findings:
        if finding.code.startswith("stack.") or finding.code in CAUSES:
            return finding
    rules = {rule.code: rule for rule in progress.RULES}
    return rules[stalls_[0].code].make_finding(stalls_[0].subject, stalls_[0].evidence)


def explain_snapshot(
    snapshot: ServerSnapshot, patience_s: float = progress.PATIENCE_S
) -> stacks.Explanation | None:
    """What the stacks show, together with the samples' figures; None without stacks."""
    if not snapshot.stacks:
        return None
    return explain_samples(snapshot.stacks, snapshot.samples, patience_s, snapshot.ras)


def explain_samples(
    samples: Sequence[StacksSnapshot],
    server_samples: Sequence[ServerSample],
    patience_s: float = progress.PATIENCE_S,
    ras: Sequence[RasCapture] = (),
) -> stacks.Explanation:
    """What the stacks of all processes show, together with the samples' figures and NCCL's."""
    pasted = PastedStacks(tuple(samples), complete=True, ras=tuple(ras))
    known = collect_facts(server_samples, patience_s)
    alone = stacks.explain_stacks(pasted)
    # The gauge of running requests keeps its value when the last request is aborted, so stacks that
    # show an idle engine count more. An engine that waits for deferred requests looks idle, too.
    if (
        alone.verdict == "idle"
        and not list_engine_heartbeats(server_samples)
        and known.get("deferred", "0") == "0"
    ):
        return alone
    return stacks.explain_stacks(pasted, known)


def list_engine_heartbeats(samples: Sequence[ServerSample]) -> list[Heartbeat]:
    """The last heartbeats of processes that have a scheduler."""
    last = samples[-1].heartbeats if samples else ()
    return [pulse.heartbeat for pulse in last if pulse.heartbeat.still_s is not None]


def collect_facts(samples: Sequence[ServerSample], patience_s: float) -> dict[str, str]:
    """Facts for the stacks' signatures; an agent's are fresh, those of metrics may be stale."""
    if not samples:
        return {}
    known = make_metrics_facts(
        samples[0].metrics, samples[-1].metrics, samples[-1].at_s - samples[0].at_s
    )
    if beats := list_engine_heartbeats(samples):
        known["running"] = str(sum(beat.running or 0 for beat in beats))
        known["waiting"] = str(sum(beat.waiting or 0 for beat in beats))
        if known.get("progress") == "frozen":
            del known["progress"]
    if any(
        stall.alternative in {"", "writing"} for stall in progress.find_stalls(samples, patience_s)
    ):
        known["progress"] = "frozen"
    return known | collect_pace_facts(samples)


def collect_pace_facts(samples: Sequence[ServerSample]) -> dict[str, str]:
    """How long the slowest engine has made no progress, and whether its steps go on."""
    fresh = [
        pulse
        for pulse in progress.select_live_heartbeats(samples[-1])
        if pulse.age_s < progress.LATE_S
    ]
    still = {
        make_process_key(pulse): pulse.heartbeat.still_s
        for pulse in fresh
        if pulse.heartbeat.still_s is not None
    }
    if not still or len(samples) < 2:
        return {}
    slowest = max(
        (p for p in fresh if make_process_key(p) in still),
        key=lambda pulse: still[make_process_key(pulse)],
    )
    steps = "moving" if progress.has_step_progress(samples, slowest) else "frozen"
    return {"steps": steps, "still": f"{still[make_process_key(slowest)]:.0f}"}


def select_confirmed_stalls(
    snapshot: ServerSnapshot, explanation: stacks.Explanation | None, patience_s: float
) -> list[progress.Stall]:
    """What has stopped; a doubtful stall counts only if stacks and agents confirm it."""
    verdict = explanation.verdict if explanation else None
    answered = {progress.format_role_and_pid(report) for report in snapshot.reports}
    stalls_ = progress.find_stalls(snapshot.samples, patience_s)
    return [stall for stall in stalls_ if stall.is_confirmed(verdict, answered)]


def make_stall_findings(
    stalls_: Sequence[progress.Stall], recordings: Sequence[StepsRecording]
) -> Iterator[Finding]:
    """A finding for each stall, with what the recording of its steps shows."""
    rules = {rule.code: rule for rule in progress.RULES}
    for stall in stalls_:
        recorded = step_history.describe_last_steps(recordings, stall.subject)
        yield rules[stall.code].make_finding(
            stall.subject, "; ".join(filter(None, (stall.evidence, recorded)))
        )


def select_hang_findings(explanation: stacks.Explanation | None) -> Iterator[Finding]:
    """The hangs that the stacks show; a possible one is none, because work looks the same."""
    for finding in explanation.findings if explanation else ():
        if finding.hang and finding.confidence != "possible":
            yield finding


def rank_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Every finding once, worst first; the cause before its symptoms."""
    hidden = {code for finding in findings for code in HIDES.get(finding.code, ())}
    once = {
        (finding.code, finding.subject): finding
        for finding in findings
        if finding.code not in hidden
    }
    return sorted(
        once.values(),
        key=lambda finding: (-finding.severity.rank, SYMPTOMS.get(finding.code, 0)),
    )
