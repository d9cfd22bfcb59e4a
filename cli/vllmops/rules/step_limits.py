"""How long an engine's step may take, by this engine's own earlier steps.

A step that hangs on a device looks like one that works. But what a step costs is known before it
ends: the recording has its scheduled tokens and the use of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..model.step_recording import Step, StepsRecording

# No work takes so many times longer than 99 of 100 comparable steps, or than the longest of them.
USUAL_FACTOR, LONGEST_FACTOR = 20.0, 3.0
QUANTILE = 0.99
FEWEST = 20  # records to compare with
ALIKE = 4.0  # times the least difference in size
ONE_SIZE = 1.25  # times the smaller of two
LEAST_USAGE = 1e-4  # of the KV cache, as a record has it


class StepDeadline(NamedTuple):
    """A step whose size is known.

    Args:
        after_s: seconds that it may take.
        reason: the step and what it is compared with, in words.
    """

    after_s: float
    reason: str


def compute_step_deadline(
    recording: StepsRecording,
    current_step: int | None = None,
    stall_periods: Sequence[tuple[float, float]] = (),
) -> StepDeadline | None:
    """How long a step may take that does not end, or does not begin.

    Args:
        recording: of an engine that has requests.
        current_step: as its scheduler counts them; it tells whether the recording is complete.
        stall_periods: from when to when steps were stalled, in seconds since the epoch; those tell
            no pace.

    Returns:
        None with too little to compare it with.
    """
    last, lacks = recording.open_step, "has not ended"
    if last is None:
        if not recording.steps:
            return None
        last, lacks = recording.steps[-1], "is followed by none"
        if last.number + last.steps - 1 != current_step:
            return None
    known = sorted(
        (
            compute_time_ratio(last, step) * compute_time_ratio(step, last),
            compute_time_ratio(last, step) * step.seconds,
        )
        for step in recording.steps
        if step.is_complete
        and step.tokens
        and step.number < last.number
        and not any(begin <= step.ended_at and step.began_at <= end for begin, end in stall_periods)
    )
    if len(known) < FEWEST:
        return None
    alike = [row for row in known if row[0] <= ALIKE * known[0][0]]
    taken = sorted(seconds for _, seconds in max(alike, known[:FEWEST], key=len))
    usual, longest = taken[int(QUANTILE * (len(taken) - 1))], taken[-1]
    return StepDeadline(
        max(USUAL_FACTOR * usual, LONGEST_FACTOR * longest),
        f"step {last.number} with {last.tokens} tokens {lacks}; by {len(taken)} earlier steps of "
        f"its size, one takes {usual:.3f} s, {longest:.3f} s at most",
    )


def compute_time_ratio(step: Step, other_step: Step) -> float:
    """How many times longer than another one a step may take, by their sizes; 1 at least.

    A part of a step's time is always the same, one grows with its tokens, and one with what they
    look back at: at most all that is in the KV cache for each token beyond one of each request, and
    in the other step the same share for each. Of two steps of one size that is known no better for
    one than for the other.
    """
    if has_similar_size(step, other_step):
        return 1.0
    back = max(step.tokens - step.requests + 1, 1) * (step.kv_cache_usage or 0.0)
    before = other_step.tokens * (other_step.kv_cache_usage or 0.0) / max(other_step.running, 1)
    return max(step.tokens / max(other_step.tokens, 1), back / max(before, LEAST_USAGE), 1.0)


def has_similar_size(step: Step, other_step: Step) -> bool:
    sizes = (
        (step.tokens, other_step.tokens),
        (step.requests, other_step.requests),
        (step.kv_cache_usage or LEAST_USAGE, other_step.kv_cache_usage or LEAST_USAGE),
    )
    return all(max(pair) <= ONE_SIZE * min(pair) for pair in sizes)
