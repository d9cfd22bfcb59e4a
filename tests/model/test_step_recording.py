"""The file with an engine's last steps, whole, torn and hostile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from vllmops.commands.step_history_view import BAR, Bar
from vllmops.model import step_recording
from vllmops.model.step_recording import ENDED, EXECUTING, StepsHead
from vllmops.rules import step_history

HEAD = msgspec.json.encode(StepsHead(pid=7, start_ticks=9, boot="b", started_at=1.0))


RUN = step_recording.StepAccumulator(
    sequence=0,
    number=1,
    began=0.0,
    began_at=1000.0,
    seconds=0.5,
    steps=1,
    ended=1,
    tokens=512,
    requests=3,
    running=3,
    waiting=2,
    deferred=1,
    kv_cache_usage=0.25,
    phase=ENDED,
)


def record(sequence: int, **fields: Any) -> bytes:
    of_it = {"sequence": sequence, "number": sequence + 1, "began_at": 1000.0 + sequence}
    return step_recording.pack_record(replace(RUN, **of_it | fields))


def content(records: dict[int, bytes]) -> bytes:
    made = bytearray(HEAD.ljust(step_recording.HEAD_BYTES))
    for sequence, one in sorted(
        records.items(), key=lambda item: step_recording.compute_record_offset(item[0])
    ):
        made = made.ljust(step_recording.compute_record_offset(sequence), b"\0") + one
    return bytes(made)


def test_written_step_is_parsed_unchanged() -> None:
    (read,) = step_recording.parse_recording(content({0: record(0)}), 7, "engine").steps
    assert (read.number, read.began_at, read.seconds) == (1, 1000.0, 0.5)
    assert (read.tokens, read.requests, read.running, read.waiting) == (512, 3, 3, 2)
    assert (read.deferred, read.kv_cache_usage, read.phase) == (1, 0.25, "ended")


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", -1), ("seconds", -1.0), ("seconds", 1e12), ("requests", 1 << 63)],
)
def test_step_with_impossible_values_is_rejected(field: str, value: float) -> None:
    (read,) = step_recording.parse_recording(content({0: record(0)}), 7, "engine").steps
    odd = msgspec.json.encode(msgspec.structs.replace(read, **{field: value}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(odd, type=step_recording.Step)


@pytest.mark.parametrize("share", [-1e8, 0.5, 1e8])
def test_a_bar_is_as_long_as_there_is_room(share: float) -> None:
    console = Console(width=30)
    (drawn,) = Bar(share).__rich_console__(console, console.options)
    assert len(drawn) <= BAR


def test_the_ring_fits_and_lasts() -> None:
    assert (
        step_recording.compute_record_offset(step_recording.SLOTS - 1) + step_recording.RECORD.size
        <= step_recording.FILE_BYTES
    )
    assert step_recording.SLOTS * step_recording.SHARED_S >= step_recording.RECORDED_S
    assert step_recording.SHARED_S < 0.01


def test_the_newest_round_counts() -> None:
    first, last = step_recording.SLOTS - 1, step_recording.SLOTS
    read = step_recording.parse_recording(
        content({last: record(last), first: record(first)}), 7, "engine"
    )
    assert [step.number for step in read.steps] == [first + 1, last + 1]
    # A leftover of two rounds ago is older than the ring is long.
    old = content({3 * step_recording.SLOTS: record(3 * step_recording.SLOTS), 1: record(1)})
    assert [step.number for step in step_recording.parse_steps(old)] == [
        3 * step_recording.SLOTS + 1
    ]


def test_large_numbers_are_cut() -> None:
    (read,) = step_recording.parse_steps(
        content({0: record(0, requests=10**9, kv_cache_usage=9.0)})
    )
    assert (read.requests, read.kv_cache_usage) == (step_recording.MOST, None)


def test_an_open_step_is_told() -> None:
    made = content({0: record(0), 1: record(1, ended=0, phase=EXECUTING, seconds=0.01)})
    read = step_recording.parse_recording(made, 7, "engine", alive=False)
    assert read.open_step is not None
    assert (
        step_history.describe_recording_end(read)
        == "step 2 began at 00:16:41.000Z and never ended: 3 requests, 512 tokens"
    )
    assert (
        step_history.describe_previous_step(read)
        == "before it, step 1 took 0.500 s: 3 requests, 512 tokens"
    )


def test_a_pause_is_told() -> None:
    made = content({0: record(0, running=0, waiting=0, deferred=0), 1: record(1, began_at=1010.0)})
    (pause,) = step_history.find_pauses(step_recording.parse_recording(made, 7, "engine"))
    assert (pause.seconds, pause.pending) == (9.5, 0)


@given(st.binary(max_size=6000))
@settings(max_examples=100, deadline=None)
def test_anything_is_read_without_an_error(noise: bytes) -> None:
    for whole in (noise, HEAD.ljust(step_recording.HEAD_BYTES) + noise):
        read = step_recording.parse_recording(whole, 7, "engine")
        assert [
            step_history.describe_recording_end(read),
            step_history.describe_previous_step(read),
            step_history.group_steps_by_time(read),
        ]
        assert msgspec.json.encode(read)


@given(st.integers(0, 9), st.integers(0, step_recording.RECORD.size - 1), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_a_torn_record_costs_only_itself(torn: int, at: int, change: int) -> None:
    made = bytearray(content({number: record(number) for number in range(10)}))
    made[step_recording.compute_record_offset(torn) + at] ^= change
    numbers = [step.number for step in step_recording.parse_steps(bytes(made))]
    assert numbers == [number + 1 for number in range(10) if number != torn]


@given(st.integers(0, 3000))
@settings(max_examples=50, deadline=None)
def test_a_cut_file_keeps_what_is_whole(length: int) -> None:
    made = content({number: record(number) for number in range(10)})[:length]
    most = max(length - step_recording.HEAD_BYTES, 0) // step_recording.RECORD.size
    read = step_recording.parse_recording(made, 7, "engine")
    assert len(read.steps) == (min(most, 10) if read.head else 0)


def test_hostile_numbers_are_dropped() -> None:
    for fields in (
        {"began_at": float("nan")},
        {"began_at": 1e300},
        {"seconds": float("inf")},
        {"seconds": -1.0},
        {"steps": 0},
        {"phase": 77},
    ):
        assert step_recording.parse_steps(content({0: record(0, **fields)})) == (), fields
    other = msgspec.json.encode(StepsHead(format=99, pid=1))
    assert step_recording.parse_head(other) is None
    assert step_recording.parse_head(bytes(range(150, 200))) is None
