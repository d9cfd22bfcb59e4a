"""Whether memory grows, by recordings whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from vllmops.model.memory import (
    AgentMemory,
    CacheUsage,
    MemoryRecording,
    MemoryRecordingHead,
    MemorySample,
    ProcessMemory,
    RequestCounts,
    StoreCounts,
)
from vllmops.rules import memory_growth
from vllmops.rules.memory_growth import (
    FLAT,
    GROWING,
    OPEN,
    MemoryTrend,
    compute_trends,
    diagnose_memory,
)

MIB = 1 << 20
BASE = 1000 * MIB  # a round may add 1 MiB of it


def make_memory_recording(
    sizes: Sequence[float],
    *,
    rounds: bool = True,
    interval_s: float = 10.0,
    agents: Sequence[AgentMemory | None] = (),
    beside: Sequence[float] = (),
) -> MemoryRecording:
    """An engine of so many MiB above `BASE`, and a worker; the first size is the idle one."""
    agents = agents or [None] * len(sizes)
    beside = beside or [0] * len(sizes)
    head = MemoryRecordingHead(
        server="s",
        started_at=0.0,
        rounds=len(sizes) - 1 if rounds else None,
        interval_s=None if rounds else interval_s,
    )
    return MemoryRecording(
        head=head,
        samples=[
            MemorySample(
                taken_at=number * interval_s,
                round=number if rounds else None,
                processes=[
                    ProcessMemory(
                        role="engine", pid=1, rss_bytes=int(BASE + size * MIB), agent=told
                    ),
                    ProcessMemory(role="worker", pid=2, rss_bytes=int(BASE + other * MIB)),
                ],
            )
            for number, (size, told, other) in enumerate(zip(sizes, agents, beside, strict=True))
        ],
    )


def engine(made: MemoryRecording, tolerance: int | None = None) -> MemoryTrend:
    return next(item for item in compute_trends(made, tolerance) if item.subject == "engine 1")


def codes(made: MemoryRecording) -> list[tuple[str, str]]:
    return [(item.code, item.subject) for item in diagnose_memory(made, compute_trends(made))]


def test_the_table_of_the_seed() -> None:
    # EngineCore's growth by #34183: 11.10 GB after R1, 18.08 GB after R5.
    made = make_memory_recording([0, 7430, 9150, 10920, 12660, 14410])
    found = engine(made)
    assert (found.result, found.per, found.steps) == (GROWING, "round", 4)
    assert found.rss_growth == 6980 * MIB
    assert found.rss_mean == found.mean == 1745 * MIB
    # By hand: steps 1720 1770 1740 1750; s = 20.817, t(3) = 3.18245.
    assert found.low == pytest.approx((1745 - 3.18245 * 20.8167 / 2) * MIB, rel=1e-4)
    assert found.high == pytest.approx((1745 + 3.18245 * 20.8167 / 2) * MIB, rel=1e-4)
    assert codes(made) == [("memory.rss-growing", "engine 1")]


def test_the_warm_up_does_not_count() -> None:
    made = make_memory_recording([0, 500, 500, 500.1, 500.1, 500.1])
    assert [item.result for item in compute_trends(made)] == [FLAT] * 3
    assert codes(made) == []


def test_single_jump_is_not_a_memory_trend() -> None:
    found = engine(make_memory_recording([0, 500, 500, 540, 540, 540]))
    assert found.result == OPEN
    assert found.remaining_length is not None
    assert found.remaining_length > 0


def test_a_negative_slope_is_flat() -> None:
    assert engine(make_memory_recording([0, 900, 800, 700, 600, 500])).result == FLAT


@pytest.mark.parametrize("sizes", [[0], [0, 5], [0, 5, 5], [0, 5, 5, 5]])
def test_too_few_rounds(sizes: list[float]) -> None:
    made = make_memory_recording(sizes)
    assert {item.result for item in compute_trends(made)} <= {OPEN}
    if len(sizes) > 1:
        assert engine(made).remaining_length == 3 - max(len(sizes) - 2, 0)
    assert codes(made) == []


def test_rounds_that_go_back() -> None:
    """Nobody records them so, but a file of a stranger may have them."""
    made = make_memory_recording([0, 500, 510, 520])
    *rest, last = made.samples
    samples = (*rest, msgspec.structs.replace(last, round=1))
    assert engine(msgspec.structs.replace(made, samples=samples)).result == OPEN


def test_the_tolerance_can_be_told() -> None:
    made = make_memory_recording([0, 500, 502, 504, 506, 508])
    assert engine(made).result == GROWING
    assert engine(made, 5 * MIB).result == FLAT
    assert engine(made, 2 * MIB).result == OPEN
    assert engine(made, 2 * MIB).remaining_length is None  # it is just what is tolerated


def test_growth_of_a_cache_is_not_a_leak() -> None:
    def make_agent_memory(held: float) -> AgentMemory:
        cache = CacheUsage(
            kind="mm-lru", name="C", entries=1, bytes=int(held * MIB), is_own_memory=True
        )
        mirror = CacheUsage(kind="mm-lru", name="P", entries=1, bytes=7 * MIB)
        return AgentMemory(caches=(cache, mirror))

    sizes = [0, 100, 110, 120, 130, 140]
    found = engine(make_memory_recording(sizes, agents=[make_agent_memory(item) for item in sizes]))
    assert (found.result, found.cache_growth, found.rss_growth) == (FLAT, 40 * MIB, 40 * MIB)


def test_the_total_alone_can_grow() -> None:
    # Neither is sure by itself; what one gives the other takes, up to a trend.
    made = make_memory_recording([0, 0, 30, 10, 40, 20, 50], beside=[0, 0, -25, 0, -25, 0, -25])
    assert [item.result for item in compute_trends(made)] == [GROWING, OPEN, OPEN]
    assert codes(made) == [("memory.rss-growing", "total")]


def test_by_time_the_slope_is_for_an_hour() -> None:
    made = make_memory_recording([0.1 * number for number in range(61)], rounds=False)
    found = engine(made)
    assert (found.per, found.result, found.steps) == ("hour", GROWING, 20)
    assert found.mean == pytest.approx(36 * MIB, rel=0.01)
    assert found.rss_growth == 6 * MIB


def test_a_moment_without_a_change_is_no_proof() -> None:
    found = engine(make_memory_recording([0] * 6, rounds=False, interval_s=1))
    assert found.result == OPEN
    assert found.remaining_length is not None
    assert found.remaining_length > 10
    assert engine(make_memory_recording([0] * 60, rounds=False)).result == FLAT


def test_a_random_walk_is_seldom_taken_for_growth() -> None:
    dice = random.Random(7)
    verdicts = []
    for _ in range(300):
        size, sizes = 0.0, [0.0]
        for _ in range(200):
            size += dice.gauss(0, 1)
            sizes.append(size)
        verdicts.append(engine(make_memory_recording(sizes, rounds=False)).result)
    # One-sided 2.5 %, and a half as much again for chance.
    assert verdicts.count(GROWING) < 0.0375 * 300


def make_finished_recording(finished: Sequence[int]) -> MemoryRecording:
    agents = [
        AgentMemory(
            requests=RequestCounts(
                alive_requests=item + 1, finished_alive=item, known_requests=1, late_s=1.0
            )
        )
        for item in finished
    ]
    return make_memory_recording([0.0] * len(finished), agents=agents)


@pytest.mark.parametrize(
    ("finished", "told"),
    [
        ((0, 20, 40, 60, 80), True),
        ((0, 20, 40, 5, 25), True),  # the garbage collector came by
        ((0, 1, 1, 1, 1), False),  # what the last step holds
        ((0, 20, 0, 0, 0), False),
        ((50,), False),
    ],
)
def test_finished_requests_that_stay(finished: Sequence[int], told: bool) -> None:
    found = codes(make_finished_recording(finished))
    assert found == ([("memory.finished-requests-alive", "engine 1")] if told else [])


def test_a_store_that_only_grows() -> None:
    def diagnose_store_counts(*counts: int) -> list[tuple[str, str]]:
        agents = [AgentMemory(store=StoreCounts(responses=n, messages=n, events=0)) for n in counts]
        return codes(make_memory_recording([0.0] * len(counts), agents=agents))

    assert diagnose_store_counts(0, 20, 40, 60, 80) == [
        ("memory.responses-store-growing", "engine 1")
    ]
    assert diagnose_store_counts(0, 20, 40, 30, 50) == []
    assert diagnose_store_counts(0, 0, 0, 0, 0) == []


def test_the_end_of_a_process_is_left_out() -> None:
    made = make_memory_recording([0, 500, 500, 500, 500, 500])
    gone = ProcessMemory(role="worker", pid=2)
    made.samples.append(
        MemorySample(taken_at=99.0, round=6, processes=[made.samples[-1].processes[0], gone])
    )
    assert engine(made).result == FLAT


def test_rules_have_codes_of_their_own() -> None:
    assert len({rule.code for rule in memory_growth.RULES}) == len(memory_growth.RULES)
