"""Shows a recording of memory to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ...model.findings import Finding
from ...model.memory import MemoryRecording, MemorySample, ProcessMemory
from ...model.ranks import format_process
from ...rules.memory_growth import FLAT, GROWING, OPEN, TOTAL, MemoryTrend
from ...support import output
from ...support.output import format_bytes, format_duration
from ..findings_view import render_findings

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = 4  # in one table, so that it fits 60 characters
ROWS = 12
SPARKS = 30
BARS = "▁▂▃▄▅▆▇█"
STYLES = {GROWING: "bold red", FLAT: "green", OPEN: "yellow"}
LATE_S = 120.0  # an agent that is there from the start counts requests sooner than this
WARM_UP = 1  # the round that warms up


def render_recording(
    recording: MemoryRecording, trends: Sequence[MemoryTrend], findings: Sequence[Finding]
) -> Iterator[RenderableType]:
    """Tables, verdicts, notes and findings of a recording."""
    from rich.text import Text  # noqa: PLC0415

    sizes = collect_rss(recording)
    names = list(sizes)
    for start in range(0, len(names), COLUMNS):
        yield make_rss_table(recording, sizes, names[start : start + COLUMNS], trends)
        yield ""
    yield make_figures_table(recording)
    yield ""
    for trend in trends:
        verdict = Text.assemble(trend.subject, ": ", (trend.result, STYLES[trend.result]))
        yield verdict.append(f"  {format_sparkline(sizes[trend.subject], trend.tolerance)}")
        for line in explain_trend(trend):
            yield f"  {line}"
    for note in collect_notes(recording):
        yield output.style_text(f"note: {note}", "yellow")
    yield from render_findings(findings)


def group_by_process(recording: MemoryRecording) -> dict[str, list[ProcessMemory]]:
    """The parts of each process in all samples, by its name."""
    parts = zip(*(sample.processes for sample in recording.samples), strict=True)
    return {format_process(part[0]): list(part) for part in parts}


def collect_rss(recording: MemoryRecording) -> dict[str, list[int | None]]:
    """Bytes of RSS in each sample, in total and by process; None if a process is gone."""
    own = {
        name: [sample.rss_bytes for sample in part]
        for name, part in group_by_process(recording).items()
    }
    rows = list(zip(*own.values(), strict=True))
    return {TOTAL: [None if None in row else sum(filter(None, row)) for row in rows], **own}


def make_rss_table(
    recording: MemoryRecording,
    sizes: dict[str, list[int | None]],
    names: Sequence[str],
    trends: Sequence[MemoryTrend],
) -> RenderableType:
    """RSS: a line for each round, or for some of the samples; then the growth."""
    table = output.make_table("RSS", *names, right_columns=names)
    count = len(recording.samples)
    some = {round(row * (count - 1) / (ROWS - 1)) for row in range(ROWS)}
    for index in sorted(some) if count > ROWS else range(count):
        head = format_sample_label(recording, recording.samples[index])
        table.add_row(head, *(format_bytes(sizes[name][index]) for name in names))
    by_name = {trend.subject: trend for trend in trends}
    if trends and trends[0].rss_growth is not None:
        table.add_section()
        last = recording.samples[-1].round
        title = f"growth R{WARM_UP + 1}-R{last}" if last else "growth"
        table.add_row(title, *(format_signed_bytes(by_name[name].rss_growth) for name in names))
        title = f"mean per {trends[0].per}"
        table.add_row(title, *(format_signed_bytes(by_name[name].rss_mean) for name in names))
    return table


def format_sample_label(recording: MemoryRecording, sample: MemorySample) -> str:
    """When a sample was taken."""
    if sample.round is None:
        return f"after {format_duration(sample.taken_at - recording.head.started_at)}"
    if sample.round == 0:
        return "idle"
    return f"after R{sample.round}" + (" (warm-up)" if sample.round == WARM_UP else "")


def format_signed_bytes(count: float | None) -> str:
    return "-" if count is None else f"{'+' if count >= 0 else ''}{format_bytes(count)}"


def make_figures_table(recording: MemoryRecording) -> RenderableType:
    """Everything but RSS in the first and the last sample, process by process."""
    table = output.make_table("", "first", "last", right_columns=("first", "last"))
    for name, part in group_by_process(recording).items():
        for label_, figure in FIGURES.items():
            values = [value for sample in part if (value := figure(sample)) is not None]
            if values:
                table.add_row(f"{name}: {label_}", values[0], values[-1])
    gpus = [sample.gpus_bytes for sample in recording.samples if sample.gpus_bytes]
    for number, (first, last) in enumerate(zip(gpus[0], gpus[-1], strict=True) if gpus else ()):
        table.add_row(f"GPU {number}, all processes", format_bytes(first), format_bytes(last))
    return table


def format_optional_bytes(count: int | None) -> str | None:
    return None if count is None else format_bytes(count)


def format_live_requests(process: ProcessMemory) -> str | None:
    requests = process.agent.requests if process.agent else None
    return f"{requests.alive_requests} ({requests.finished_alive})" if requests else None


def make_cache_formatter(kind: str) -> Callable[[ProcessMemory], str | None]:
    """A function that shows a process's caches of a kind."""

    def format_caches(process: ProcessMemory) -> str | None:
        caches = process.agent.caches if process.agent else ()
        held = [cache for cache in caches if cache.kind.startswith(kind) and cache.entries]
        if not held:
            return None
        used = [format_bytes(cache.bytes) for cache in held if cache.bytes is not None]
        used += [f"{cache.slots} slots" for cache in held if cache.slots is not None]
        return f"{sum(cache.entries or 0 for cache in held)} ({', '.join(used)})"

    return format_caches


def format_collections(process: ProcessMemory) -> str | None:
    generations = process.agent.gc if process.agent else ()
    return "/".join(str(generation.collections) for generation in generations) or None


def format_stored_objects(process: ProcessMemory) -> str | None:
    store = process.agent.store if process.agent else None
    counts = (store.responses, store.messages, store.events) if store else ()
    return "/".join(map(str, counts)) if any(counts) else None


FIGURES: dict[str, Callable[[ProcessMemory], str | None]] = {
    "PSS": lambda process: format_optional_bytes(process.pss_bytes),
    "USS": lambda process: format_optional_bytes(process.uss_bytes),
    "GPU": lambda process: format_optional_bytes(process.gpu_bytes),
    "requests (finished)": format_live_requests,
    "mm cache": make_cache_formatter("mm"),
    "encoder cache": make_cache_formatter("encoder"),
    "gc runs, gen 0/1/2": format_collections,
    "stored resp./msg./events": format_stored_objects,
}


def format_sparkline(values: Sequence[int | None], min_range: float) -> str:
    """Bars from the lowest to the highest value; flat if they differ by less than `min_range`."""
    known = [value for value in values if value is not None]
    if len(known) > SPARKS:
        bounds = [round(bar * len(known) / SPARKS) for bar in range(SPARKS + 1)]
        known = [max(known[start:end]) for start, end in pairwise(bounds)]
    if not known:
        return ""
    low, reach = min(known), max(max(known) - min(known), min_range, 1)
    return "".join(BARS[int((value - low) / reach * (len(BARS) - 1))] for value in known)


def explain_trend(trend: MemoryTrend) -> Iterator[str]:
    """The figures behind a verdict."""
    if trend.mean is None or trend.low is None or trend.high is None:
        yield f"{trend.steps} steps are too few"
    else:
        yield (
            f"{format_signed_bytes(trend.mean)} per {trend.per}, 95 %: "
            f"{format_signed_bytes(trend.low)} to "
            f"{format_signed_bytes(trend.high)}; tolerated {format_bytes(trend.tolerance)}"
        )
    if trend.cache_growth:
        yield f"not counted: {format_signed_bytes(trend.cache_growth)} that caches hold"
    if trend.remaining_length:
        rounds = f"{trend.remaining_length:.0f} round{'s' if trend.remaining_length > 1 else ''}"
        yield (
            "probably enough: "
            f"{rounds if trend.per == 'round' else format_duration(trend.remaining_length)} "
            "more"
        )


def collect_notes(recording: MemoryRecording) -> list[str]:
    """What limits the recording: a missing end, silent agents, other requests."""
    samples, remarks = recording.samples, []
    if recording.end is None:
        remarks.append("the recording has no end: it was killed, or it still runs")
    elif recording.end.reason:
        remarks.append(f"cut short: {recording.end.reason}")
    for name, part in group_by_process(recording).items():
        silent = [sample.gap_reason for sample in part if sample.gap_reason]
        if silent:
            remarks.append(
                f"{name} did not answer at {len(silent)} of {len(samples)} samples: {silent[-1]}"
            )
        answers = [sample.agent for sample in part if sample.agent]
        problems = dict.fromkeys(problem for answer in answers for problem in answer.problems)
        remarks += [f"{name}: {problem}" for problem in problems]
        late_s = next((answer.requests.late_s for answer in answers if answer.requests), 0.0)
        if late_s > LATE_S:
            remarks.append(
                f"{name}: the agent was loaded {format_duration(late_s)} after the start and "
                "counts requests "
                "since then; older ones that are still alive are not counted"
            )
    noisy = sum(sample.quiet is False for sample in samples if sample.round is not None)
    if noisy:
        remarks.append(f"other requests were in flight at {noisy} of {len(samples)} samples")
    return remarks
