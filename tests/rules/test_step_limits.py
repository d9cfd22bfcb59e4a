"""How long an open step may take, by the steps before it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from vllmops.model.step_recording import Step, StepsRecording
from vllmops.rules.step_limits import FEWEST, compute_step_deadline

NOW = 1000.0


def make_steps_recording(*sizes: tuple[int, float], open_: int, **fields: Any) -> StepsRecording:
    """Steps of so many tokens that took so long, and an open one of so many.

    Args:
        sizes: tokens and seconds of each step.
        open_: tokens of the open one.
        fields: of all steps.
    """
    numbers = itertools.count(1)

    def step(tokens: int, seconds: float, **more: Any) -> Step:
        known: dict[str, Any] = {
            "number": next(numbers),
            "began_at": NOW,
            "seconds": seconds,
            "steps": 1,
            "ended": 1,
            "tokens": tokens,
            "requests": 1,
            "running": 1,
            "waiting": 0,
            "deferred": 0,
            "kv_cache_usage": 0.1,
            "phase": "ended",
        }
        return Step(**(known | fields | more))

    done = tuple(step(*size) for size in sizes)
    return StepsRecording(pid=1, steps=(*done, step(open_, 0.0, ended=0, phase="executing")))


def after_s(found: StepsRecording, **words: Any) -> float | None:
    known = compute_step_deadline(found, **words)
    return known.after_s if known else None


def test_step_deadline_needs_enough_steps() -> None:
    found = make_steps_recording(*FEWEST * [(1, 0.1)], open_=1)
    assert after_s(found) == pytest.approx(2.0)
    assert compute_step_deadline(StepsRecording(pid=1)) is None
    assert compute_step_deadline(StepsRecording(pid=1, steps=found.steps[1:])) is None


def test_no_step_may_be_missing_where_none_follows() -> None:
    ended = StepsRecording(
        pid=1, steps=make_steps_recording(*(FEWEST + 1) * [(1, 0.1)], open_=1).steps[:-1]
    )
    assert after_s(ended, current_step=FEWEST + 1) == pytest.approx(2.0)
    assert after_s(ended, current_step=FEWEST + 2) is None  # it was not recorded
    assert after_s(ended) is None


def test_more_tokens_may_take_longer() -> None:
    decoding = 100 * [(1, 0.015)]
    assert after_s(make_steps_recording(*decoding, open_=2000)) == pytest.approx(20 * 2000 * 0.015)
    prompts = [*decoding, *FEWEST * [(1000, 0.2)]]
    assert after_s(make_steps_recording(*prompts, open_=2000)) == pytest.approx(20 * 2 * 0.2)
    assert after_s(make_steps_recording(*prompts, open_=1)) == pytest.approx(20 * 0.015)


def test_a_longer_context_may_take_longer() -> None:
    found = make_steps_recording(*FEWEST * [(1, 0.01)], open_=1, kv_cache_usage=0.001)
    last = msgspec.structs.replace(found.steps[-1], kv_cache_usage=0.9)
    found = msgspec.structs.replace(found, steps=(*found.steps[:-1], last))
    assert after_s(found) == pytest.approx(20 * 900 * 0.01)


def test_many_requests_that_get_a_token_each_share_the_cache() -> None:
    fields = {"requests": 64, "running": 64, "kv_cache_usage": 0.9}
    assert after_s(
        make_steps_recording(*FEWEST * [(64, 0.05)], open_=64, **fields)
    ) == pytest.approx(1.0)


def test_a_batch_of_prompts_is_like_the_ones_before_it() -> None:
    fields = {"requests": 10, "running": 10, "kv_cache_usage": 1.0}
    steps = 10 * [*20 * [(10, 0.01)], (334, 0.04), (334, 0.04)]
    found = compute_step_deadline(make_steps_recording(*steps, open_=334, **fields))
    assert found
    assert "by 20 earlier steps of its size" in found.reason
    assert found.after_s == pytest.approx(20 * 0.04)


def test_step_deadline_allows_for_earlier_long_steps() -> None:
    steps = [*500 * [(1, 0.01)], (1, 12.0)]
    assert after_s(make_steps_recording(*steps, open_=1)) == pytest.approx(36.0)
    stalled = make_steps_recording(*steps, open_=1)
    long = msgspec.structs.replace(stalled.steps[-2], began_at=NOW + 100)
    stalled = msgspec.structs.replace(stalled, steps=(*stalled.steps[:-2], long, stalled.steps[-1]))
    assert after_s(stalled, stall_periods=[(NOW + 99, NOW + 130)]) == pytest.approx(0.2)


def test_steps_of_which_nothing_was_scheduled_tell_no_pace() -> None:
    assert after_s(make_steps_recording(*500 * [(0, 0.001)], open_=1)) is None
