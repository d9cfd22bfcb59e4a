"""Whether a watched server has stalled: pure functions of successive samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ..model.server_snapshot import ServerSample
from .progress import (
    DEAD,
    FINAL,
    METRICS_FACTOR,
    NO_PROGRESS,
    PATIENCE_S,
    RENDERING,
    UNSEEN,
    Stall,
    find_stalls,
    has_fatal_stall,
)

INTERVAL_S = 2.0
CHECKS = 5
FEWEST = 3  # samples in a row, where they come late
# Metrics and health cost the server and vllmops some milliseconds.
ASK_S = 15.0
# A long step and a slow image look like these for some seconds in a server that works.
USUAL = {NO_PROGRESS.code, RENDERING.code}


class SamplingPlan(msgspec.Struct, frozen=True):
    """When and how to take the next sample.

    Args:
        after_s: seconds until then.
        ask: whether it asks the server for metrics and health, and looks for compilers.
    """

    after_s: float
    ask: bool


class StallDetector:
    """Looks at a server, and what they show together.

    A server has stalled if something has made no progress for `patience_s` and was seen so in
    several samples in a row. A machine that wakes from suspension gets time to recover that way;
    nothing that is dead does.

    Args:
        interval_s: seconds between checks.
        checks: samples in a row; fewer where those that come late take as long.
        patience_s: seconds that a server may make no progress while requests are pending.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        checks: int = CHECKS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.interval_s = interval_s
        self.checks = checks
        self.patience_s = patience_s
        self.reset()

    def reset(self) -> None:
        """Forget all samples: it is another server, or the last sample is old."""
        self.samples: list[ServerSample] = []
        self.row = 0
        self.stood_s = 0.0
        self.asked_s = -ASK_S
        self.dismissed_stall_keys: set[tuple[str, str]] = set()

    def add_sample(self, sample: ServerSample) -> list[Stall]:
        """Add a sample; returns the stalls that were not dismissed before."""
        self.samples.append(sample)
        if sample.metrics or sample.health is not None:
            self.asked_s = sample.at_s
        kept_s = METRICS_FACTOR * (self.patience_s + ASK_S)
        while sample.at_s - self.samples[0].at_s > kept_s:
            del self.samples[0]
        self.dismissed_stall_keys &= {
            make_stall_key(stall) for stall in find_stalls(self.samples, 0.0)
        }
        self.row = self.row + 1 if self.current_stalls else 0
        if self.row <= 1:
            self.stood_s = sample.at_s
        long = sample.at_s - self.stood_s >= (self.checks - 1) * self.interval_s
        enough = self.row >= self.checks or (long and self.row >= FEWEST)
        found = self.list_undismissed_stalls(self.patience_s)
        return [stall for stall in found if enough or stall.code in FINAL]

    def list_undismissed_stalls(self, seconds: float) -> list[Stall]:
        """What has stopped for so many seconds, without what was dismissed."""
        stalls_ = find_stalls(self.samples, seconds)
        return [
            stall for stall in stalls_ if make_stall_key(stall) not in self.dismissed_stall_keys
        ]

    def dismiss(self, stalls_: list[Stall]) -> None:
        """These are no stalls: ignore them until they change."""
        self.dismissed_stall_keys |= {make_stall_key(stall) for stall in stalls_}
        self.row = 0

    @property
    def current_stalls(self) -> list[Stall]:
        """What has stopped, for however short a time."""
        return self.list_undismissed_stalls(min(self.interval_s, self.patience_s))

    def is_stall_ongoing(self, subjects: Collection[str]) -> bool:
        """Whether a stall goes on; what a server at work shows, too, counts only if it is the same.

        Args:
            subjects: what the stall is about, as `list_stall_subjects` gives it.
        """
        lasting = (
            stall.code not in USUAL or get_stall_subject(stall) in subjects
            for stall in self.current_stalls
        )
        return is_node_unreachable(self.samples[-1]) or any(lasting)

    def plan_next_sample(self) -> SamplingPlan:
        """When and how to sample again; a server that makes progress is not asked."""
        last = self.samples[-1]
        beats = [pulse.heartbeat for pulse in last.heartbeats]
        blind = not any(beat.still_s is not None for beat in beats)
        dead = has_fatal_stall(self.samples)
        if self.current_stalls or dead or last.health in {0, 503}:
            late = bool(self.list_undismissed_stalls(self.patience_s / 2))
            return SamplingPlan(self.interval_s, blind or dead or last.health in {0, 503} or late)
        if is_node_unreachable(last):
            return SamplingPlan(self.interval_s, ask=True)  # has it ended?
        gone = bool(last.processes) and all(each.state in DEAD for each in last.processes)
        if blind and not gone:
            return SamplingPlan(max(self.interval_s, ASK_S), ask=True)
        # An agent of an older vllmops does not report whether the API server's event loop runs.
        asks = not any(beat.loop_s is not None for beat in beats)
        due = last.at_s + self.interval_s >= self.asked_s + ASK_S
        return SamplingPlan(self.interval_s, ask=asks and due)


def make_stall_key(stall: Stall) -> tuple[str, str]:
    """What stays the same while a stall is the same one."""
    return stall.code, stall.mark


def is_node_unreachable(sample: ServerSample) -> bool:
    """Whether nobody on the server's machine answered, which shows neither a stall nor progress."""
    return {process.state for process in sample.processes} == {UNSEEN} and not sample.heartbeats


def list_stall_subjects(stalls_: Sequence[Stall]) -> frozenset[str]:
    """What some stalls are about; work only if that is all, because it may go on without them."""
    others = [stall for stall in stalls_ if stall.alternative != "work"]
    return frozenset(map(get_stall_subject, others or stalls_))


def get_stall_subject(stall: Stall) -> str:
    """What has stopped: of work the request, else the process, whatever it shows."""
    return stall.mark if stall.alternative == "work" else stall.subject
