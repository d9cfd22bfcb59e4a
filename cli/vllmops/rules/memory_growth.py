"""Whether a server's memory grows; pure, from recordings.

RSS is a random walk and not a line with noise: neighbouring points depend on each other, and a
fitted line would be far too certain. Therefore the steps from point to point count. Their mean is
the slope, with a confidence interval by Student's t. A recording by time is first pooled into a few
blocks, so that its steps are nearly independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from ..model.findings import Finding, Rule, Severity
from ..model.memory import AgentMemory, MemoryRecording, MemorySample, ProcessMemory
from ..model.ranks import format_process
from .student_t import compute_t_quantile

CONFIDENCE = 0.95
LEAST_STEPS = 3
BLOCKS = 20
# Allocators take memory in steps of about this size: less scatter is chance.
STEP_BYTES = 64 << 10
# What an item of a cache may take beyond its bytes: Python objects and fragmentation.
ITEM_BYTES = 64 << 10
# The share of its size by which a process may grow and still count as flat.
SHARE_PER_ROUND = 0.001
SHARE_PER_HOUR = 0.01
MOST_STEPS = 1000
FEW_REQUESTS = 2  # the engine's last step may hold so many
GROWING, FLAT, OPEN = "growing", "flat", "can't say yet"
TOTAL = "total"

RSS_GROWING = Rule(
    "memory.rss-growing",
    Severity.ERROR,
    "resident memory grows",
    "see which figures grow with it (finished requests, caches, stored responses) and "
    "whether vllmops patches list shows a patch that is off; record longer with the same "
    "load to be more certain",
)
FINISHED_ALIVE = Rule(
    "memory.finished-requests-alive",
    Severity.ERROR,
    "finished requests stay in memory with their inputs",
    "the patch request-hash-cycle removes the known cause: vllmops patches list shows "
    "whether it is on; a restart without --no-patch turns it on",
    "https://github.com/vllm-project/vllm/pull/34183",
)
STORE_GROWING = Rule(
    "memory.responses-store-growing",
    Severity.WARNING,
    "the number of stored responses only grows",
    "vLLM's own store never removes a response: use vllmops serve --store, or start without "
    "VLLM_ENABLE_RESPONSES_API_STORE=1; a restart empties the store",
    "https://github.com/vllm-project/vllm/pull/34738",
)
RULES = (RSS_GROWING, FINISHED_ALIVE, STORE_GROWING)


class MemoryTrend(msgspec.Struct, frozen=True, kw_only=True):
    """How the memory of one process, or of all, changes; in bytes.

    Args:
        subject: ``total``, or a role and a pid.
        per: the unit of `mean`, `low`, `high` and `tolerance`: ``round`` or ``hour``.
        result: ``growing``, ``flat`` or ``can't say yet``.
        rss_growth: of RSS since the warm-up, from the first sample to the last; None without two.
        rss_mean: the same per round or hour.
        cache_growth: the part of `rss_growth` that filling caches explain; the rest is judged.
        mean: growth per round or hour without caches; None without two points.
        low, high: the 95 % confidence interval of `mean`; None with too few points. `low` leaves
            out what new items in caches may take beyond their bytes.
        tolerance: growth that counts as none.
        steps: the number of steps between points.
        remaining_length: further rounds, or seconds, after which a verdict is likely; None if there
            is one, or if no recording of reasonable length is enough.
    """

    subject: str
    per: str
    result: str = msgspec.field(name="verdict")
    rss_growth: int | None = None
    rss_mean: float | None = None
    cache_growth: int | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    tolerance: float
    steps: int = 0
    remaining_length: float | None = msgspec.field(default=None, name="more")


Point = tuple[float, float]


def diagnose_memory(recording: MemoryRecording, trends: Sequence[MemoryTrend]) -> list[Finding]:
    """What a recording and its `compute_trends` show."""
    findings = list(check_growth(trends))
    findings += check_finished_requests(recording)
    findings += check_response_stores(recording)
    return findings


def check_growth(trends: Sequence[MemoryTrend]) -> Iterator[Finding]:
    grown = [trend for trend in trends if trend.result == GROWING]
    # If a process can be named, the total adds nothing.
    for trend in [trend for trend in grown if trend.subject != TOTAL] or grown:
        yield RSS_GROWING.make_finding(
            trend.subject,
            f"{format_mib(trend.mean)} per {trend.per}, between {format_mib(trend.low)} and "
            f"{format_mib(trend.high)} "
            f"with {CONFIDENCE:.0%} confidence; up to {format_mib(trend.tolerance)} counts as flat",
        )


def list_agent_reports(samples: Sequence[tuple[float, ProcessMemory]]) -> Iterable[AgentMemory]:
    """A process's reports from its agent, each once: samples in between repeat the last one."""
    agents = (process.agent for _, process in samples)
    return {id(agent): agent for agent in agents if agent}.values()


def check_finished_requests(recording: MemoryRecording) -> Iterator[Finding]:
    for subject, samples in group_samples_by_process(recording).items():
        counts = [
            memory.requests.finished_alive
            for memory in list_agent_reports(samples)
            if memory.requests
        ]
        # The later half: a request that has just finished is released within a moment.
        late = counts[len(counts) // 2 :]
        if len(counts) > 1 and statistics.median(late) > FEW_REQUESTS:
            yield FINISHED_ALIVE.make_finding(
                subject,
                f"{counts[-1]} at the end; the median of the last {len(late)} samples is "
                f"{statistics.median(late):g}; garbage collection can reduce it for a while",
            )


def check_response_stores(recording: MemoryRecording) -> Iterator[Finding]:
    for subject, samples in group_samples_by_process(recording).items():
        counts = [memory.store.responses for memory in list_agent_reports(samples) if memory.store]
        steps = [after - before for before, after in pairwise(counts)]
        if sum(step > 0 for step in steps) >= LEAST_STEPS and min(steps) >= 0:
            yield STORE_GROWING.make_finding(
                subject, f"{counts[0]} at the start, {counts[-1]} at the end"
            )


def compute_trends(
    recording: MemoryRecording, tolerance_bytes: int | None = None
) -> list[MemoryTrend]:
    """The trend of the total, then of each process.

    Args:
        recording: finished or not.
        tolerance_bytes: instead of the recording's own or the default.
    """
    if tolerance_bytes is None:
        tolerance_bytes = recording.head.tolerance_bytes
    by_subject = group_samples_by_process(recording)
    parts = {
        name: [(at, [process]) for at, process in samples] for name, samples in by_subject.items()
    }
    rows = zip(*by_subject.values(), strict=True)
    total = [(row[0][0], [process for _, process in row]) for row in rows]
    return [
        compute_trend(
            recording,
            subject,
            [(at, float(sum(p.rss_bytes or 0 for p in processes))) for at, processes in points],
            [float(sum(map(count_cache_bytes, processes))) for _, processes in points],
            [sum(map(count_cached_items, processes)) for _, processes in points],
            tolerance_bytes,
        )
        for subject, points in {TOTAL: total, **parts}.items()
        if points
    ]


def group_samples_by_process(
    recording: MemoryRecording,
) -> dict[str, list[tuple[float, ProcessMemory]]]:
    """The samples of each process after the warm-up, each with its round or its hours."""
    series: dict[str, list[tuple[float, ProcessMemory]]] = {}
    for sample in recording.samples:
        at = compute_sample_position(recording, sample)
        if at is None or not all(process.rss_bytes for process in sample.processes):
            continue
        for process in sample.processes:
            before = series.setdefault(format_process(process), [])
            # Not every sample has the agent's report; the last one counts until the next.
            agent = process.agent or (before[-1][1].agent if before else None)
            before.append((at, msgspec.structs.replace(process, agent=agent)))
    return series


def compute_sample_position(recording: MemoryRecording, sample: MemorySample) -> float | None:
    """A sample's round, or its hours since the start; None before the end of the warm-up."""
    if sample.round is None:
        return (sample.taken_at - recording.head.started_at) / 3600
    return float(sample.round) if sample.round else None


def count_cache_bytes(process: ProcessMemory) -> int:
    """Bytes of a process that caches hold: caches stop growing by themselves."""
    if process.agent is None:
        return 0
    return sum(cache.bytes or 0 for cache in process.agent.caches if cache.is_own_memory)


def count_cached_items(process: ProcessMemory) -> int:
    """The number of items in a process's multimodal cache; the largest of several."""
    caches = process.agent.caches if process.agent else ()
    return max((cache.entries or 0 for cache in caches if cache.kind.startswith("mm")), default=0)


def compute_trend(
    recording: MemoryRecording,
    subject: str,
    rss: Sequence[Point],
    cache_bytes: Sequence[float],
    entries: Sequence[int],
    tolerance_bytes: int | None,
) -> MemoryTrend:
    """The trend of RSS without what caches hold."""
    by_rounds = recording.head.rounds is not None
    share = SHARE_PER_ROUND if by_rounds else SHARE_PER_HOUR
    tolerance = share * rss[-1][1] if tolerance_bytes is None else float(tolerance_bytes)
    points = [(at, size - cached) for (at, size), cached in zip(rss, cache_bytes, strict=True)]
    if not by_rounds:
        points = pool_points(points)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points) if x1 > x0]
    trend_ = MemoryTrend(
        subject=subject,
        per="round" if by_rounds else "hour",
        result=OPEN,
        tolerance=tolerance,
        steps=len(slopes),
        remaining_length=float(LEAST_STEPS - len(slopes)) if by_rounds else None,
    )
    if not slopes or rss[-1][0] <= rss[0][0]:
        return trend_
    apart = (points[-1][0] - points[0][0]) / len(slopes)
    mean = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    trend_ = msgspec.structs.replace(
        trend_,
        mean=mean,
        rss_growth=int(rss[-1][1] - rss[0][1]),
        rss_mean=(rss[-1][1] - rss[0][1]) / (rss[-1][0] - rss[0][0]),
        cache_growth=int(cache_bytes[-1] - cache_bytes[0]),
    )
    if len(slopes) < LEAST_STEPS:
        return trend_
    scatter = statistics.stdev(slopes)
    half = compute_halfwidth(scatter, len(slopes), apart)
    new = max(entries[-1] - entries[0], 0) / (rss[-1][0] - rss[0][0])
    low, high = mean - half - ITEM_BYTES * new, mean + half
    verdict = GROWING if low > tolerance else FLAT if high < tolerance else OPEN
    more = None
    if verdict == OPEN:
        most = MOST_STEPS if by_rounds else BLOCKS
        steps = compute_missing_steps(scatter, len(slopes), apart, abs(mean - tolerance), most)
        more = steps and steps * (1 if by_rounds else 3600 * apart)
    return msgspec.structs.replace(
        trend_, result=verdict, low=low, high=high, remaining_length=more
    )


def pool_points(points: Sequence[Point]) -> list[Point]:
    """At most `BLOCKS` + 1 points, each the mean of neighbours."""
    count = min(len(points), BLOCKS + 1)
    bounds = [round(block * len(points) / count) for block in range(count + 1)]
    return [
        (statistics.fmean(x for x, _ in block), statistics.fmean(y for _, y in block))
        for block in (points[start:end] for start, end in pairwise(bounds))
    ]


def compute_halfwidth(scatter: float, count: int, slope_span: float) -> float:
    """Half the confidence interval of a mean slope.

    Args:
        scatter: the standard deviation of the slopes.
        count: the number of slopes.
        slope_span: the rounds or hours that each slope spans.
    """
    return (
        compute_t_quantile(CONFIDENCE, count - 1)
        * max(scatter, STEP_BYTES / slope_span)
        / math.sqrt(count)
    )


def compute_missing_steps(
    scatter: float, count: int, slope_span: float, distance: float, max_blocks: int
) -> int | None:
    """How many more steps make half the interval smaller than a distance; None if too many.

    Args:
        scatter: as in `compute_halfwidth`.
        count: as in `compute_halfwidth`.
        slope_span: as in `compute_halfwidth`.
        distance: in bytes per round or hour.
        max_blocks: steps in a trend; more are pooled, and then the slopes of a random walk scatter
            less.
    """
    for steps in range(count + 1, MOST_STEPS):
        blocks = min(steps, max_blocks)
        wide = steps / blocks
        if compute_halfwidth(scatter / math.sqrt(wide), blocks, slope_span * wide) < distance:
            return steps - count
    return None


def format_mib(count: float | None) -> str:
    """Bytes as MiB with a sign, for a person."""
    return f"{(count or 0.0) / (1 << 20):+.2f} MiB"
