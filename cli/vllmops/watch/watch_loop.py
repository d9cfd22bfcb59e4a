"""Watches a server: detects a stall, keeps the evidence, reports, and acts if it may."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..actions.cache_repair import RepairReport
from ..actions.healing import HealResult
from ..collect.machine.swap import SwapMonitor
from ..model.cache_repairs import CacheChange, ProcessRepair
from ..model.probe import ProbeResult
from ..model.ranks import format_process
from ..model.server_snapshot import ServerSample, ServerSnapshot
from ..model.watch_events import WatchEvent
from ..redaction.redactor import Redactor
from ..rules import diagnosis as doctor
from ..rules import progress
from ..rules.progress import PATIENCE_S, Stall
from ..rules.stacks.explanation import StackFinding
from ..rules.stall_detector import (
    CHECKS,
    INTERVAL_S,
    StallDetector,
    list_stall_subjects,
    make_stall_key,
)
from ..servers.discovery import Server
from ..support import background
from ..support.background import ErrorReporter
from ..support.errors import VllmopsError
from . import liveness
from .watch_target import ServerPhase

# After a false alarm: reading stacks stops the processes for a moment.
DOUBT_S = 60.0
# This process was suspended or got no CPU, and so perhaps did the server.
SLIP_S = 5.0
LEAST_REST = 0.25  # of the time between two checks
AWAY_S = 0.5  # between two checks of whether a server is back
# A repaired server has this long to make progress before it is restarted.
MENDING_S = 20.0
# After how many seconds of a stall that is reported to heal it; and how often in an hour at most
# where it does not help.
HEAL_AFTER_S = (0.0, 15.0, 60.0)
HEALS, HOUR_S = 20, 3600.0
# How often to look for what is stuck while others go on, which no stall shows.
SWEEP_S = 10.0
KEPT = 1000  # events
REPAIRABLE = {"mm-cache.ghost-keys"}
# Fields of an event that may quote a log.
QUOTING = ("title", "evidence")


@dataclass(frozen=True)
class WatchPlan:
    """How to watch, and what to do.

    Args:
        folder: where evidence goes.
        interval_s: seconds between checks.
        checks: checks in a row without progress that make a stall.
        patience_s: how long a server may make no progress while requests are pending.
        once: end with the first stall.
        for_s: end after so many seconds; None for no end.
        repair: repair a cache that is proven to be broken.
        heal: heal what is proven, as ``vllmops heal`` does.
        restart: restart a stalled instance, once the evidence is on the disk.
    """

    folder: Path
    interval_s: float = INTERVAL_S
    checks: int = CHECKS
    patience_s: float = PATIENCE_S
    once: bool = False
    for_s: float | None = None
    repair: bool = False
    heal: bool = False
    restart: bool = False


class WatchSubject(Protocol):
    """What is watched; see `watch_target.WatchedServer`."""

    server: Server

    @property
    def is_final(self) -> bool: ...
    @property
    def has_failed(self) -> bool: ...
    @property
    def down_reason(self) -> str: ...
    @property
    def note(self) -> str: ...
    def read_phase(self) -> ServerPhase: ...
    def take_sample(self, *, ask: bool) -> ServerSample: ...
    def prepare_evidence(self) -> None: ...
    def take_snapshot(
        self,
        samples: Sequence[ServerSample],
        patience_s: float,
        stop: threading.Event,
        *,
        needs_all_evidence: bool,
    ) -> ServerSnapshot: ...
    def save_evidence(self, folder: Path) -> Path: ...
    def repair_caches(self) -> RepairReport: ...
    def heal_server(self, *, only_without_stall: bool = False) -> HealResult: ...
    def restart(self) -> None: ...


@dataclass
class OngoingStall:
    """A stall that lasts.

    Args:
        number: from 1.
        began: by the monotonic clock.
        evidence_path: where its evidence is; empty if it could not be written.
        text: what makes no progress.
        proof: from when on it is sure.
        subjects: what it is about, as `stall_detector.list_stall_subjects` gives it.
        restart_at: when to restart, by the monotonic clock; None for never.
        heal_at: when to heal next, by the monotonic clock, the next times first.
    """

    number: int
    began: float
    evidence_path: str
    text: str
    proof: liveness.StallProof
    subjects: frozenset[str]
    restart_at: float | None = None
    heal_at: list[float] = field(default_factory=list)


@dataclass
class EventHistory:
    """The events reported: the count of each, and the last ones."""

    counts: Counter[str] = field(default_factory=Counter)
    events: deque[WatchEvent] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def incident_count(self) -> int:
        """Stalls and failures."""
        return self.counts["stalled"] + self.counts["failed"]


class Watch:
    """One watch.

    Args:
        subject: what is watched.
        plan: how.
        send_event: called with each event at once.
        stop: once it is set the watch ends.
        flush: waits until all events are delivered.
        publish: called with the verdict of each look.
        swapping: whether the machine swaps.
        now: the monotonic clock, in seconds.
        wait: waits for that many seconds, or until `stop`.
        call_in_background: calls something that may take long, beside the checks.
    """

    def __init__(
        self,
        subject: WatchSubject,
        plan: WatchPlan,
        send_event: Callable[[WatchEvent], None],
        *,
        stop: threading.Event | None = None,
        flush: Callable[[], None] = lambda: None,
        publish: Callable[[ProbeResult, float | None], None] = lambda *_: None,
        swapping: Callable[[], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
        call_in_background: Callable[
            [Callable[[], HealResult]], Future[HealResult]
        ] = background.call_in_thread,
    ) -> None:
        self.subject = subject
        self.plan = plan
        self.send_event = send_event
        self.stop = stop or threading.Event()
        self.flush = flush
        self.publish = publish
        self.swapping = swapping or SwapMonitor().is_swapping
        self.now = now
        self.wait = wait or self.stop.wait
        self.call_in_background = call_in_background
        self.stall_detector = StallDetector(plan.interval_s, plan.checks, plan.patience_s)
        self.diary = EventHistory()
        self.phase: ServerPhase | None = None
        self.note = ""
        self.was_up = False  # a server without a record has been up
        self.ongoing_stall: OngoingStall | None = None
        self.doubt_until = 0.0
        self.heals: deque[float] = deque(maxlen=HEALS)  # that did not help
        self.sweep_at = self.sweep_s = 0.0
        self.sweeping: Future[HealResult] | None = None
        # Stalls that were sure, in seconds since the epoch.
        self.stall_periods: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.ask = True  # once at the beginning, to know the processes
        self.failures = ErrorReporter("a check failed, and the watch continues", self.report_text)

    def run(self) -> EventHistory:
        """Watch until the plan's end, or until nothing is left to watch."""
        began = self.now()
        while not self.stop.is_set():
            round_at, after_s = self.now(), self.plan.interval_s
            try:
                self.report_phase_change(self.subject.read_phase())
                self.report_note(self.subject.note)
                if self.phase is not ServerPhase.UP:
                    self.publish_result()  # how far it is, and that somebody looks
                    after_s = min(after_s, AWAY_S)
                if self.phase is ServerPhase.OVER and self.subject.is_final:
                    break
                if self.phase is ServerPhase.UP:
                    after_s = self.run_check()
            except Exception as error:
                # Nobody else watches: the next check may succeed.
                self.failures.report(error)
            if self.plan.once and self.diary.incident_count:
                break
            left_s = began + (self.plan.for_s or float("inf")) - self.now()
            if left_s <= 0:
                break
            # A server that does not answer makes a check last longer: the next one is as soon.
            after_s = max(round_at + after_s - self.now(), LEAST_REST * after_s)
            self.wait_for_next_check(min(after_s, left_s))
        return self.diary

    def publish_result(self, stall: str = "") -> None:
        """Publish the verdict.

        Args:
            stall: what seems to make no progress, in words; empty without.
        """
        server, ongoing, look = (
            self.subject.server,
            self.ongoing_stall,
            next(reversed(self.stall_detector.samples), None),
        )
        sure = False
        if ongoing:
            lasted_s = self.now() - ongoing.began
            sure = lasted_s >= ongoing.proof.after_s and not self.swapping()
            stall = "; ".join(filter(None, (ongoing.text, ongoing.proof.reason if sure else "")))
        found = liveness.judge_server(
            server,
            look,
            was_up=self.was_up,
            is_over=self.phase is ServerPhase.OVER,
            stall=stall,
            is_certain=sure,
            evidence=ongoing.evidence_path if ongoing else "",
            note=self.note,
        )
        self.was_up = found.started
        self.publish(found, server.record.started_at if server.record else None)

    def report_text(self, text: str) -> None:
        self.report_event("trouble", f"{self.subject.server.label}: {text}")

    def wait_for_next_check(self, seconds: float) -> None:
        """Wait; after a much longer pause, earlier checks no longer count."""
        due = self.now() + seconds
        self.wait(seconds)
        if self.now() - due > SLIP_S and not self.ongoing_stall:
            self.stall_detector.reset()

    # -- its life ----------------------------------------------------------------------------

    def report_phase_change(self, phase: ServerPhase) -> None:
        """Report that the server has gone, or is back."""
        before, self.phase = self.phase, phase
        if phase is ServerPhase.UP and phase is not before:
            self.subject.prepare_evidence()
        if before is None or phase is before:
            return
        looks = self.stall_detector.samples
        self.stall_detector.reset()
        self.ongoing_stall, self.ask = None, True
        self.publish_result()
        label, why = self.subject.server.label, self.subject.down_reason
        if phase is ServerPhase.UP:
            self.report_event("ready", f"{label} is ready; watching it")
        elif phase is ServerPhase.AWAY:
            self.report_event("away", f"{label} is not serving: {why}")
        elif self.subject.has_failed:
            self.handle_unexpected_end(looks)
        else:
            self.report_event("ended", f"{label} has ended: {why}")

    def report_note(self, note: str) -> None:
        """Report what the supervisor says, once."""
        before, self.note = self.note, note
        if note and note != before:
            self.report_text(note)

    def handle_unexpected_end(self, samples: Sequence[ServerSample]) -> None:
        """The server ended unexpectedly: keep what it left as evidence."""
        self.subject.take_snapshot(
            samples, self.plan.patience_s, self.stop, needs_all_evidence=True
        )
        kept = self.save_evidence()
        label, why = self.subject.server.label, self.subject.down_reason
        step = f"vllmops logs {label}; then vllmops restart {label}"
        text = f"{label} has ended: {why}"
        self.report_event(
            "failed", text, code="server.failed", title=why, next_step=step, bundle=kept
        )

    # -- looking -----------------------------------------------------------------------------

    def run_check(self) -> float:
        """Check once, and act; returns the seconds until the next check."""
        found = self.stall_detector.add_sample(self.subject.take_sample(ask=self.ask))
        if self.sweeping and self.sweeping.done():
            self.finish_sweep(self.sweeping)
        if self.ongoing_stall:
            self.handle_ongoing_stall(self.ongoing_stall)
        elif found and not (all(s.alternative for s in found) and self.now() < self.doubt_until):
            self.publish_result(
                liveness.describe_likely_stall(found)
            )  # to collect the evidence takes a while
            self.handle_new_stall(found)
        elif (
            self.plan.heal
            and self.now() >= self.sweep_at
            # An image that comes slowly may be there at any time.
            and all(stall.alternative == "work" for stall in self.stall_detector.current_stalls)
        ):
            self.start_sweep()
        self.publish_result()
        step = self.stall_detector.plan_next_sample()
        self.ask = step.ask
        return step.after_s

    def handle_ongoing_stall(self, stall: OngoingStall) -> None:
        """During a known stall: check whether it is over, or whether to restart."""
        if not self.stall_detector.is_stall_ongoing(stall.subjects):
            self.ongoing_stall = None
            lasted = self.now() - stall.began
            label = self.subject.server.label
            text = f"{label} makes progress again after {lasted:.0f} s"
            self.report_event("recovered", text, number=stall.number, seconds=lasted)
            if lasted >= stall.proof.after_s:
                self.stall_periods.append((time.time() - lasted, time.time()))
        elif stall.heal_at and self.now() >= stall.heal_at[0]:
            stall.heal_at.pop(0)
            self.heal_stall(stall)
        elif stall.restart_at is not None and self.now() >= stall.restart_at:
            stall.restart_at = None
            self.restart_instance(stall)

    def handle_new_stall(self, stalls: list[Stall]) -> None:
        """Keep the evidence, explain it, report, and act if the plan says so."""
        began = self.now() - max(stall.since_s for stall in stalls)
        before = len(self.stall_detector.samples)
        # A heartbeat that is so late is hardly ever the disk's fault.
        sure = any(stall.alternative in {"", "writing"} for stall in stalls)
        self.swapping()  # from here on
        snapshot = self.subject.take_snapshot(
            self.stall_detector.samples, self.plan.patience_s, self.stop, needs_all_evidence=sure
        )
        if any(look.compilers for look in snapshot.samples[before:]):
            self.stall_detector.row = 0
            return
        diagnosis = doctor.diagnose_snapshot(snapshot, self.plan.patience_s)
        confirmed = [stall for stall in stalls if is_stall_confirmed(stall, snapshot, diagnosis)]
        if not confirmed:
            if not liveness.is_cpu_starved(snapshot):  # else it may show more later
                self.stall_detector.dismiss(stalls)
            self.doubt_until = self.now() + DOUBT_S
            return
        kept = self.save_evidence()
        number = self.diary.counts["stalled"] + 1
        self.ongoing_stall = OngoingStall(
            number,
            began,
            kept,
            stalls[0].evidence,
            liveness.prove_stalls(stalls, snapshot, diagnosis, self.stall_periods),
            list_stall_subjects(confirmed),
        )
        self.publish_result()
        seconds = self.now() - began
        why = doctor.find_cause(stalls, diagnosis)
        label = self.subject.server.label
        self.report_event(
            "stalled",
            f"{label} has stalled for {seconds:.0f} s: {why.title} [{why.code}], {why.subject}",
            number=number,
            seconds=seconds,
            code=why.code,
            title=why.title,
            subject=why.subject,
            victims=why.victims if isinstance(why, StackFinding) else (),
            evidence=why.evidence,
            next_step=why.next_step,
            reference=why.reference,
            findings=tuple(finding.code for finding in diagnosis.findings),
            bundle=kept,
        )
        repaired = self.plan.repair and self.repair_caches(diagnosis)
        if self.plan.heal:
            self.ongoing_stall.heal_at = [self.now() + seconds for seconds in HEAL_AFTER_S]
        if self.plan.restart:
            self.ongoing_stall.restart_at = self.now() + (MENDING_S if repaired else 0.0)
        self.stall_detector.add_sample(
            self.subject.take_sample(ask=True)
        )  # the last look is older than the evidence
        self.handle_ongoing_stall(self.ongoing_stall)

    # -- acting ------------------------------------------------------------------------------

    def save_evidence(self) -> str:
        """Write a bundle; returns where it is, empty if it could not be written."""
        try:
            return str(self.subject.save_evidence(self.plan.folder))
        except VllmopsError as error:
            self.report_failure(error)
            return ""

    def repair_caches(self, diagnosis: doctor.Diagnosis) -> bool:
        """Repair what was found, if it can be; returns whether anything was."""
        if not any(finding.code in REPAIRABLE for finding in diagnosis.findings):
            return False
        label = self.subject.server.label
        try:
            report = self.subject.repair_caches()
        except VllmopsError as error:
            self.report_failure(error)
            return False
        done = [
            describe_repair(repair, cache.changes, cache.reason)
            for repair in report.repairs
            for cache in repair.caches
        ]
        self.report_event(
            "repaired", f"{label}: {'; '.join(done) or 'there was nothing to repair'}"
        )
        return any(not cache.reason for repair in report.repairs for cache in repair.caches)

    def heal_stall(self, stall: OngoingStall) -> None:
        """Heal what is proven; a server that stalls again and again is left alone for a while."""
        label, now = self.subject.server.label, self.now()
        if len(self.heals) == HEALS and now - self.heals[0] < HOUR_S:
            stall.heal_at.clear()
            self.report_event(
                "trouble", f"{label} is not healed: it did not help {HEALS} times within an hour"
            )
            return
        try:
            found = self.subject.heal_server()
        except VllmopsError as error:
            self.heals.append(now)
            self.report_failure(error)
            return
        self.report_event("healed", f"{label}: {describe_healing(found)}", number=stall.number)
        if not any(outcome.done for outcome in found.outcomes):
            self.heals.append(now)
        elif stall.restart_at is not None:
            stall.restart_at = self.now() + MENDING_S

    def start_sweep(self) -> None:
        """Begin to heal what is stuck while others go on, unless nothing is in flight."""
        beats = [pulse.heartbeat for pulse in self.stall_detector.samples[-1].heartbeats]
        busy = any(beat.engine_requests or beat.running or beat.waiting for beat in beats)
        if busy and not self.sweeping:
            # An agent may not answer, and the next check must not wait for that.
            self.sweeping = self.call_in_background(
                partial(self.subject.heal_server, only_without_stall=True)
            )

    def finish_sweep(self, sweeping: Future[HealResult]) -> None:
        """Tell what was healed so; what can't be healed is tried ever less often."""
        self.sweeping, found = None, None
        with suppress(VllmopsError):  # a stall is told; a server without agents has no such look
            found = sweeping.result()
        left = found is None or any(not outcome.done for outcome in found.outcomes)
        self.sweep_s = min(2 * self.sweep_s or SWEEP_S, HOUR_S) if left else SWEEP_S
        self.sweep_at = self.now() + self.sweep_s
        if found and found.outcomes:
            self.report_event("healed", f"{self.subject.server.label}: {describe_healing(found)}")

    def restart_instance(self, stall: OngoingStall) -> None:
        """Restart the instance, but never before its evidence is on the disk."""
        label = self.subject.server.label
        if not stall.evidence_path:
            self.report_event(
                "trouble", f"{label} is not restarted, because its evidence could not be written"
            )
            return
        text = f"{label} restarts because it stalled"
        self.report_event("restarting", text, number=stall.number)
        start = self.get_run_id()
        # A receiver may want to examine the server before, or restart it itself.
        self.flush()
        if (
            self.subject.read_phase() is not self.phase
            or self.get_run_id() != start
            or self.is_stall_over(stall)
        ):
            self.report_event("trouble", f"{label} is not restarted: it has changed meanwhile")
            return
        try:
            self.subject.restart()
        except VllmopsError as error:
            self.report_failure(error)

    def get_run_id(self) -> str:
        """Names the start of an instance; empty for a server that vllmops did not start."""
        record = self.subject.server.record
        return record.run if record else ""

    def is_stall_over(self, stall: OngoingStall) -> bool:
        """Whether a stall is over by a new look."""
        self.stall_detector.add_sample(self.subject.take_sample(ask=True))
        return not self.stall_detector.is_stall_ongoing(stall.subjects)

    def report_failure(self, error: VllmopsError) -> None:
        self.report_event(
            "trouble", f"{self.subject.server.label}: {error.message}", next_step=error.hint
        )

    def report_event(self, event: Any, text: str, **fields: Any) -> None:
        """Report an event, and keep it in the diary."""
        server = self.subject.server
        # Chat services show it, and an exception's message may repeat a prompt or a key.
        fields |= {
            name: Redactor().redact_log(fields[name]) for name in QUOTING if fields.get(name)
        }
        reported = WatchEvent(
            event=event,
            happened_at=time.time(),
            server=server.label,
            url=server.url,
            model=server.model,
            text=Redactor().redact_log(text),
            **fields,
        )
        self.diary.counts[reported.event] += 1
        self.diary.events.append(reported)
        self.send_event(reported)


def is_stall_confirmed(stall: Stall, snapshot: ServerSnapshot, diagnosis: doctor.Diagnosis) -> bool:
    """Whether a stall is confirmed by stacks, agents, and what was seen meanwhile."""
    if stall.alternative == "writing" and stall.since_s < progress.SURE_S:
        still = map(make_stall_key, progress.find_stalls(snapshot.samples, 0.0))
        # A heartbeat may only be late: it has come, or the machine had no time for it.
        if make_stall_key(stall) not in still or liveness.is_cpu_starved(snapshot):
            return False
    verdict = diagnosis.explanation.verdict if diagnosis.explanation else None
    return stall.is_confirmed(
        verdict, {progress.format_role_and_pid(agent) for agent in snapshot.reports}
    )


def describe_healing(result: HealResult) -> str:
    """What was healed, in a line."""
    done = [
        f"{outcome.action}, {outcome.process}, {outcome.subject}: {outcome.evidence}; "
        + (f"not healed: {outcome.reason}" if outcome.reason else outcome.did)
        for outcome in result.outcomes
    ]
    return "; ".join((*done, *result.problems)) or "nothing is proven that could be healed"


def describe_repair(
    process: ProcessRepair, changes: Sequence[CacheChange], unrepaired_reason: str | None
) -> str:
    """What was repaired in a cache."""
    repaired = ", ".join(f"{change.count:,.0f} {change.defect}" for change in changes)
    return f"{format_process(process)}: {repaired}" + (
        f", left as it is: {unrepaired_reason}" if unrepaired_reason else " repaired"
    )
