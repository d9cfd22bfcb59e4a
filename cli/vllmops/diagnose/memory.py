"""Whether a server's memory grows; pure, from recordings.

RSS is a random walk rather than a line with noise round it: neighbours depend on each other, and a
fitted line would be far too sure of itself. Here the steps from point to point count. Their mean is
the slope, and its confidence interval is Student's; a recording by time is pooled into a few
blocks first, so that steps are nearly independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from ..protocol.memory import AgentMemory, MemorySample, ProcessMemory, Recording
from .findings import Finding, Rule, Severity
from .student import quantile

CONFIDENCE = 0.95
LEAST_STEPS = 3
BLOCKS = 20
# Allocators take memory in steps: less scatter than this is luck.
STEP_BYTES = 64 << 10
# What an item of a cache may take beyond its bytes: Python objects, and what lay beside it.
ITEM_BYTES = 64 << 10
# The share of its size by which a process may grow and still count as flat.
SHARE_PER_ROUND = 0.001
SHARE_PER_HOUR = 0.01
MOST_STEPS = 1000
FEW_REQUESTS = 2  # that the engine's last step may hold
GROWING, FLAT, OPEN = "growing", "flat", "can't say yet"
TOTAL = "total"

RSS_GROWING = Rule(
    "memory.rss-growing",
    Severity.ERROR,
    "resident memory grows",
    "look which figures grow with it (finished requests, caches, stored responses) and "
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


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """How one process's memory, or all of it, moves; in bytes.

    Args:
        subject: ``total``, or a role and a pid.
        per: what `mean` and the next ones are for: ``round`` or ``hour``.
        verdict: ``growing``, ``flat`` or ``can't say yet``.
        rss_growth: of RSS since the warm-up, from the first sample to the last; None without two.
        rss_mean: the same for each round or hour.
        cache_growth: what caches that fill account for of `rss_growth`; the rest is judged.
        mean: growth for each round or hour, caches left out; None without two points.
        low, high: the 95 % confidence interval of `mean`; None where there are too few points.
            Lower by what new items in caches may take beyond their bytes.
        tolerance: growth that counts as none.
        steps: between points that `mean` is of.
        more: further rounds, or seconds, after which a verdict is likely; None where there is one,
            or where no recording of any reasonable length would do.
    """

    subject: str
    per: str
    verdict: str
    rss_growth: int | None = None
    rss_mean: float | None = None
    cache_growth: int | None = None
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    tolerance: float
    steps: int = 0
    more: float | None = None


Point = tuple[float, float]


def diagnose(recording: Recording, trends: Sequence[Trend]) -> list[Finding]:
    """What is wrong, by a recording and its `trends`."""
    found = list(growing(trends))
    found += finished(recording)
    found += stores(recording)
    return found


def growing(trends: Sequence[Trend]) -> Iterator[Finding]:
    grown = [trend for trend in trends if trend.verdict == GROWING]
    # Where a process can be named, the total adds nothing.
    for trend in [each for each in grown if each.subject != TOTAL] or grown:
        yield RSS_GROWING.at(
            trend.subject,
            f"{mib(trend.mean)} a {trend.per}, between {mib(trend.low)} and {mib(trend.high)} by "
            f"{CONFIDENCE:.0%} confidence, where {mib(trend.tolerance)} would pass",
        )


def answers(samples: Sequence[tuple[float, ProcessMemory]]) -> Iterable[AgentMemory]:
    """What a process's agent said, each answer once: it stays where it was not asked again."""
    return {id(each.agent): each.agent for _, each in samples if each.agent}.values()


def finished(recording: Recording) -> Iterator[Finding]:
    for subject, samples in judged(recording).items():
        counts = [each.requests.finished_alive for each in answers(samples) if each.requests]
        # The later half: what has just finished is let go of within a moment.
        late = counts[len(counts) // 2 :]
        if len(counts) > 1 and statistics.median(late) > FEW_REQUESTS:
            yield FINISHED_ALIVE.at(
                subject,
                f"{counts[-1]} at the end, {statistics.median(late):g} in the middle of the later "
                f"{len(late)} samples; a collection of garbage can bring it down for a while",
            )


def stores(recording: Recording) -> Iterator[Finding]:
    for subject, samples in judged(recording).items():
        counts = [each.store.responses for each in answers(samples) if each.store]
        steps = [after - before for before, after in pairwise(counts)]
        if sum(each > 0 for each in steps) >= LEAST_STEPS and min(steps) >= 0:
            yield STORE_GROWING.at(subject, f"{counts[0]} at first, {counts[-1]} at the end")


def trends(recording: Recording, tolerance_bytes: int | None = None) -> list[Trend]:
    """The total's trend, then each process's.

    Args:
        recording: at whatever stage.
        tolerance_bytes: instead of the recording's own or the default.
    """
    if tolerance_bytes is None:
        tolerance_bytes = recording.head.tolerance_bytes
    by_subject = judged(recording)
    parts = {name: [(at, [each]) for at, each in own] for name, own in by_subject.items()}
    rows = zip(*by_subject.values(), strict=True)
    whole = [(row[0][0], [each for _, each in row]) for row in rows]
    return [
        trend(
            recording,
            subject,
            [(at, float(sum(each.rss_bytes or 0 for each in some))) for at, some in points],
            [float(sum(map(filled, some))) for _, some in points],
            [sum(map(items, some)) for _, some in points],
            tolerance_bytes,
        )
        for subject, points in {TOTAL: whole, **parts}.items()
        if points
    ]


def judged(recording: Recording) -> dict[str, list[tuple[float, ProcessMemory]]]:
    """For each process its samples after the warm-up, each with its round or its hours."""
    found: dict[str, list[tuple[float, ProcessMemory]]] = {}
    for sample in recording.samples:
        at = position(recording, sample)
        if at is None or not all(each.rss_bytes for each in sample.processes):
            continue
        for each in sample.processes:
            before = found.setdefault(f"{each.role} {each.pid}", [])
            if each.agent is None and before:
                # Not every sample has it: what its caches held stays.
                each = msgspec.structs.replace(each, agent=before[-1][1].agent)  # noqa: PLW2901
            before.append((at, each))
    return found


def position(recording: Recording, sample: MemorySample) -> float | None:
    """Where a sample stands: its round, or hours since the start; None before the warm-up's end."""
    if sample.round is None:
        return (sample.taken_at - recording.head.started_at) / 3600
    return float(sample.round) if sample.round else None


def filled(process: ProcessMemory) -> int:
    """Bytes of its memory that caches hold: they stop growing by themselves."""
    if process.agent is None:
        return 0
    return sum(each.bytes or 0 for each in process.agent.caches if each.here)


def items(process: ProcessMemory) -> int:
    """Items in its multimodal cache: the largest, should there be several."""
    caches = process.agent.caches if process.agent else ()
    return max((each.entries or 0 for each in caches if each.kind.startswith("mm")), default=0)


def trend(
    recording: Recording,
    subject: str,
    rss: Sequence[Point],
    held: Sequence[float],
    entries: Sequence[int],
    tolerance_bytes: int | None,
) -> Trend:
    """The trend of RSS less what caches hold."""
    by_rounds = recording.head.rounds is not None
    share = SHARE_PER_ROUND if by_rounds else SHARE_PER_HOUR
    tolerance = share * rss[-1][1] if tolerance_bytes is None else float(tolerance_bytes)
    points = [(at, size - cached) for (at, size), cached in zip(rss, held, strict=True)]
    if not by_rounds:
        points = pooled(points)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points) if x1 > x0]
    told = Trend(
        subject=subject,
        per="round" if by_rounds else "hour",
        verdict=OPEN,
        tolerance=tolerance,
        steps=len(slopes),
        more=float(LEAST_STEPS - len(slopes)) if by_rounds else None,
    )
    if not slopes:
        return told
    apart = (points[-1][0] - points[0][0]) / len(slopes)
    mean = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    told = msgspec.structs.replace(
        told,
        mean=mean,
        rss_growth=int(rss[-1][1] - rss[0][1]),
        rss_mean=(rss[-1][1] - rss[0][1]) / (rss[-1][0] - rss[0][0]),
        cache_growth=int(held[-1] - held[0]),
    )
    if len(slopes) < LEAST_STEPS:
        return told
    scatter = statistics.stdev(slopes)
    half = halfwidth(scatter, len(slopes), apart)
    new = max(entries[-1] - entries[0], 0) / (rss[-1][0] - rss[0][0])
    low, high = mean - half - ITEM_BYTES * new, mean + half
    verdict = GROWING if low > tolerance else FLAT if high < tolerance else OPEN
    more = None
    if verdict == OPEN:
        most = MOST_STEPS if by_rounds else BLOCKS
        steps = enough(scatter, len(slopes), apart, abs(mean - tolerance), most)
        more = steps and steps * (1 if by_rounds else 3600 * apart)
    return msgspec.structs.replace(told, verdict=verdict, low=low, high=high, more=more)


def pooled(points: Sequence[Point]) -> list[Point]:
    """At most `BLOCKS` points, each the mean of neighbours."""
    count = min(len(points), BLOCKS + 1)
    bounds = [round(each * len(points) / count) for each in range(count + 1)]
    return [
        (statistics.fmean(x for x, _ in block), statistics.fmean(y for _, y in block))
        for block in (points[start:end] for start, end in pairwise(bounds))
    ]


def halfwidth(scatter: float, count: int, apart: float) -> float:
    """Half the confidence interval of a mean slope.

    Args:
        scatter: the slopes' standard deviation.
        count: of the slopes.
        apart: rounds or hours that each is over.
    """
    return quantile(CONFIDENCE, count - 1) * max(scatter, STEP_BYTES / apart) / math.sqrt(count)


def enough(scatter: float, count: int, apart: float, distance: float, most: int) -> int | None:
    """How many more steps bring the interval's half below a distance; None: no reasonable number.

    Args:
        scatter: as in `halfwidth`.
        count: as in `halfwidth`.
        apart: as in `halfwidth`.
        distance: in bytes for each round or hour.
        most: steps in a trend; more are pooled, and a random walk's slopes scatter less then.
    """
    for steps in range(count + 1, MOST_STEPS):
        blocks = min(steps, most)
        wide = steps / blocks
        if halfwidth(scatter / math.sqrt(wide), blocks, apart * wide) < distance:
            return steps - count
    return None


def mib(count: float | None) -> str:
    """Bytes with a sign, for a person."""
    return f"{(count or 0.0) / (1 << 20):+.2f} MiB"
