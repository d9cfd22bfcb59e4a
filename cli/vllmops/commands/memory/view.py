"""Shows a recording of memory to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ... import output
from ...diagnose.findings import Finding
from ...diagnose.memory import FLAT, GROWING, OPEN, TOTAL, Trend
from ...output import size, span
from ...protocol.memory import MemorySample, ProcessMemory, Recording
from ...protocol.place import who
from ..findings import lines

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = 4  # in one table, so that it fits 60 characters
ROWS = 12
SPARKS = 30
BARS = "▁▂▃▄▅▆▇█"
STYLES = {GROWING: "bold red", FLAT: "green", OPEN: "yellow"}
LATE_S = 120.0  # an agent that is there from the start counts requests sooner than this
WARM_UP = 1  # the round that warms up


def shown(
    recording: Recording, trends: Sequence[Trend], findings: Sequence[Finding]
) -> Iterator[RenderableType]:
    """Tables, verdicts, notes and findings of a recording."""
    from rich.text import Text  # noqa: PLC0415

    sizes = rss(recording)
    names = list(sizes)
    for start in range(0, len(names), COLUMNS):
        yield resident(recording, sizes, names[start : start + COLUMNS], trends)
        yield ""
    yield other_figures(recording)
    yield ""
    for trend in trends:
        verdict = Text.assemble(trend.subject, ": ", (trend.verdict, STYLES[trend.verdict]))
        yield verdict.append(f"  {sparks(sizes[trend.subject], trend.tolerance)}")
        for line in explained(trend):
            yield f"  {line}"
    for note in notes(recording):
        yield output.styled(f"note: {note}", "yellow")
    yield from lines(findings)


def columns(recording: Recording) -> dict[str, list[ProcessMemory]]:
    """The parts of each process in all samples, by its name."""
    parts = zip(*(sample.processes for sample in recording.samples), strict=True)
    return {who(part[0]): list(part) for part in parts}


def rss(recording: Recording) -> dict[str, list[int | None]]:
    """Bytes of RSS in each sample, in total and by process; None if a process is gone."""
    own = {name: [sample.rss_bytes for sample in part] for name, part in columns(recording).items()}
    rows = list(zip(*own.values(), strict=True))
    return {TOTAL: [None if None in row else sum(filter(None, row)) for row in rows], **own}


def resident(
    recording: Recording,
    sizes: dict[str, list[int | None]],
    names: Sequence[str],
    trends: Sequence[Trend],
) -> RenderableType:
    """RSS: a line for each round, or for some of the samples; then the growth."""
    table = output.table("RSS", *names, right=names)
    count = len(recording.samples)
    some = {round(row * (count - 1) / (ROWS - 1)) for row in range(ROWS)}
    for index in sorted(some) if count > ROWS else range(count):
        head = label(recording, recording.samples[index])
        table.add_row(head, *(size(sizes[name][index]) for name in names))
    by_name = {trend.subject: trend for trend in trends}
    if trends and trends[0].rss_growth is not None:
        table.add_section()
        last = recording.samples[-1].round
        title = f"growth R{WARM_UP + 1}-R{last}" if last else "growth"
        table.add_row(title, *(signed(by_name[name].rss_growth) for name in names))
        title = f"mean per {trends[0].per}"
        table.add_row(title, *(signed(by_name[name].rss_mean) for name in names))
    return table


def label(recording: Recording, sample: MemorySample) -> str:
    """When a sample was taken."""
    if sample.round is None:
        return f"after {span(sample.taken_at - recording.head.started_at)}"
    if sample.round == 0:
        return "idle"
    return f"after R{sample.round}" + (" (warm-up)" if sample.round == WARM_UP else "")


def signed(count: float | None) -> str:
    return "-" if count is None else f"{'+' if count >= 0 else ''}{size(count)}"


def other_figures(recording: Recording) -> RenderableType:
    """Everything but RSS in the first and the last sample, process by process."""
    table = output.table("", "first", "last", right=("first", "last"))
    for name, part in columns(recording).items():
        for label_, figure in FIGURES.items():
            values = [value for sample in part if (value := figure(sample)) is not None]
            if values:
                table.add_row(f"{name}: {label_}", values[0], values[-1])
    gpus = [sample.gpus_bytes for sample in recording.samples if sample.gpus_bytes]
    for number, (first, last) in enumerate(zip(gpus[0], gpus[-1], strict=True) if gpus else ()):
        table.add_row(f"GPU {number}, all processes", size(first), size(last))
    return table


def amount(count: int | None) -> str | None:
    return None if count is None else size(count)


def live(process: ProcessMemory) -> str | None:
    requests = process.agent.requests if process.agent else None
    return f"{requests.alive} ({requests.finished_alive})" if requests else None


def cached(kind: str) -> Callable[[ProcessMemory], str | None]:
    """A function that shows a process's caches of a kind."""

    def figure(process: ProcessMemory) -> str | None:
        caches = process.agent.caches if process.agent else ()
        held = [cache for cache in caches if cache.kind.startswith(kind) and cache.entries]
        if not held:
            return None
        used = [size(cache.bytes) for cache in held if cache.bytes is not None]
        used += [f"{cache.slots} slots" for cache in held if cache.slots is not None]
        return f"{sum(cache.entries or 0 for cache in held)} ({', '.join(used)})"

    return figure


def collections(process: ProcessMemory) -> str | None:
    generations = process.agent.gc if process.agent else ()
    return "/".join(str(generation.collections) for generation in generations) or None


def stored(process: ProcessMemory) -> str | None:
    store = process.agent.store if process.agent else None
    counts = (store.responses, store.messages, store.events) if store else ()
    return "/".join(map(str, counts)) if any(counts) else None


FIGURES: dict[str, Callable[[ProcessMemory], str | None]] = {
    "PSS": lambda process: amount(process.pss_bytes),
    "USS": lambda process: amount(process.uss_bytes),
    "GPU": lambda process: amount(process.gpu_bytes),
    "requests (finished)": live,
    "mm cache": cached("mm"),
    "encoder cache": cached("encoder"),
    "gc runs, gen 0/1/2": collections,
    "stored resp./msg./events": stored,
}


def sparks(values: Sequence[int | None], least: float) -> str:
    """Bars from the lowest to the highest value; flat if they differ by less than `least`."""
    known = [value for value in values if value is not None]
    if len(known) > SPARKS:
        bounds = [round(bar * len(known) / SPARKS) for bar in range(SPARKS + 1)]
        known = [max(known[start:end]) for start, end in pairwise(bounds)]
    if not known:
        return ""
    low, reach = min(known), max(max(known) - min(known), least, 1)
    return "".join(BARS[int((value - low) / reach * (len(BARS) - 1))] for value in known)


def explained(trend: Trend) -> Iterator[str]:
    """The figures behind a verdict."""
    if trend.mean is None or trend.low is None or trend.high is None:
        yield f"{trend.steps} steps are too few"
    else:
        yield (
            f"{signed(trend.mean)} per {trend.per}, 95 %: {signed(trend.low)} to "
            f"{signed(trend.high)}; tolerated {size(trend.tolerance)}"
        )
    if trend.cache_growth:
        yield f"not counted: {signed(trend.cache_growth)} that caches hold"
    if trend.more:
        rounds = f"{trend.more:.0f} round{'s' if trend.more > 1 else ''}"
        yield f"probably enough: {rounds if trend.per == 'round' else span(trend.more)} more"


def notes(recording: Recording) -> list[str]:
    """What limits the recording: a missing end, silent agents, other requests."""
    samples, remarks = recording.samples, []
    if recording.end is None:
        remarks.append("the recording has no end: it was killed, or it still runs")
    elif recording.end.why:
        remarks.append(f"cut short: {recording.end.why}")
    for name, part in columns(recording).items():
        silent = [sample.silent for sample in part if sample.silent]
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
                f"{name}: the agent was loaded {span(late_s)} after the start and counts requests "
                "since then; older ones that are still alive are not counted"
            )
    noisy = sum(sample.quiet is False for sample in samples if sample.round is not None)
    if noisy:
        remarks.append(f"other requests were in flight at {noisy} of {len(samples)} samples")
    return remarks
