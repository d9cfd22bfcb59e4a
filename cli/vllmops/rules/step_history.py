"""What a recording of an engine's steps tells: since when it stands, and what came just before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import msgspec

from ..model.ranks import format_process
from ..model.step_recording import Step, StepsRecording
from ..support.numbers import format_count

ROWS = 20
ROW_S = (1, 2, 5, 10, 15, 30, 60, 300, 3600)  # seconds that a row stands for
PAUSE_S = 1.0


class StepInterval(msgspec.Struct, frozen=True):
    """The steps that began within some seconds.

    Args:
        began_at: seconds since the epoch.
        seconds: how long.
        steps, tokens: how many began, and what they scheduled.
        longest_s: the longest record.
        requests: most that a step scheduled.
        running, waiting, deferred: most at once.
        kv_cache_usage: the highest, None if unknown.
    """

    began_at: float = msgspec.field(name="at")
    seconds: float
    steps: int
    tokens: int
    longest_s: float
    requests: int
    running: int
    waiting: int
    deferred: int
    kv_cache_usage: float | None


class Pause(msgspec.Struct, frozen=True):
    """A time without steps.

    Args:
        began_at: seconds since the epoch.
        seconds: how long.
        pending: requests that were there meanwhile; 0 if the engine was idle.
    """

    began_at: float = msgspec.field(name="at")
    seconds: float
    pending: int


def format_utc_time(timestamp: float) -> str:
    """A time of the day; UTC, as it may be read on another machine."""
    return f"{datetime.fromtimestamp(timestamp, UTC):%H:%M:%S.%f}"[:-3] + "Z"


def describe_step_work(step: Step) -> str:
    """What was scheduled."""
    if step.phase == "scheduling" and step.steps == 1:
        return "the scheduler had not chosen its requests"
    shared = f" in {step.steps} steps" if step.steps > 1 else ""
    return f"{format_count(step.requests, 'request')}, {format_count(step.tokens, 'token')}{shared}"


def format_step_range(first_step: int, last_step: int) -> str:
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def describe_recording_end(recording: StepsRecording) -> str:
    """How a recording ends, in a sentence; empty without steps."""
    if not recording.steps:
        return ""
    step = recording.open_step or recording.steps[-1]
    last = step.number + step.steps - 1
    if recording.open_step:
        ended = "never ended"
        if recording.alive:
            ended = f"has not ended for {max(recording.read_at - step.began_at, 0):.1f} s"
        # Those that share a record end in their order.
        which = format_step_range(step.number + step.ended, last)
        return (
            f"{which} began at {format_utc_time(step.began_at)} and {ended}: "
            f"{describe_step_work(step)}"
        )
    left = step.running + step.waiting + step.deferred
    pending = f"{format_count(left, 'request')} pending" if left else "no request was pending"
    return (
        f"the last step, {last}, ended at {format_utc_time(step.ended_at)}: "
        f"{describe_step_work(step)}; then {pending}"
    )


def describe_previous_step(recording: StepsRecording) -> str:
    """What came before the open step, or before the last one; empty if nothing is known."""
    last = recording.open_step or (recording.steps[-1] if recording.steps else None)
    done = [
        step for step in recording.steps if step.is_complete and last and step.number < last.number
    ]
    if not done:
        return ""
    step = done[-1]
    which = format_step_range(step.number, step.number + step.steps - 1)
    return f"before it, {which} took {step.seconds:.3f} s: {describe_step_work(step)}"


def describe_last_steps(recordings: Sequence[StepsRecording], subject: str) -> str:
    """The same for a process, named as by `format_process`; empty without a recording."""
    for recording in recordings:
        if format_process(recording) == subject and (ending := describe_recording_end(recording)):
            return "; ".join(filter(None, (ending, describe_previous_step(recording))))
    return ""


def group_steps_by_time(recording: StepsRecording) -> list[StepInterval]:
    """The steps in some rows of equal time, oldest first; also those without a step."""
    steps = recording.steps
    if not steps:
        return []
    first, last = min(s.began_at for s in steps), max(s.began_at for s in steps)
    width = float(next((s for s in ROW_S if (last - first) / s < ROWS), last - first))
    start = first // width * width
    groups: dict[int, list[Step]] = {}
    for step in steps:
        groups.setdefault(int((step.began_at - start) // width), []).append(step)
    return [
        make_step_interval(start + number * width, width, groups.get(number, []))
        for number in range(max(groups) + 1)
    ]


def make_step_interval(began_at: float, width: float, steps: Sequence[Step]) -> StepInterval:
    usages = [step.kv_cache_usage for step in steps if step.kv_cache_usage is not None]
    return StepInterval(
        began_at,
        width,
        sum(step.steps for step in steps),
        sum(step.tokens for step in steps),
        max((step.seconds for step in steps), default=0.0),
        max((step.requests for step in steps), default=0),
        max((step.running for step in steps), default=0),
        max((step.waiting for step in steps), default=0),
        max((step.deferred for step in steps), default=0),
        max(usages, default=None),
    )


def find_pauses(recording: StepsRecording) -> Iterator[Pause]:
    """The times without steps, oldest first."""
    for step, following in pairwise(recording.steps):
        seconds = following.began_at - step.ended_at
        if step.is_complete and seconds >= PAUSE_S:
            yield Pause(step.ended_at, seconds, step.running + step.waiting + step.deferred)
