"""How a recording of memory is shown to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ... import output
from ...diagnose.findings import Finding
from ...diagnose.memory import FLAT, GROWING, OPEN, TOTAL, Trend
from ...output import size, span
from ...protocol.memory import MemorySample, ProcessMemory, Recording
from ..findings import lines

if TYPE_CHECKING:
    from rich.console import RenderableType

ABREAST = 4  # columns in one table, so that it fits 60 columns
ROWS = 12
SPARKS = 30
BARS = "▁▂▃▄▅▆▇█"
STYLES = {GROWING: "bold red", FLAT: "green", OPEN: "yellow"}
LATE_S = 120.0  # by which a server that has the agent from the start counts in any case
WARM_UP = 1  # the round that warms up


def shown(
    recording: Recording, trends: Sequence[Trend], found: Sequence[Finding]
) -> Iterator[RenderableType]:
    """Tables, verdicts, notes, findings."""
    from rich.text import Text  # noqa: PLC0415

    sizes = rss(recording)
    names = list(sizes)
    for start in range(0, len(names), ABREAST):
        yield resident(recording, sizes, names[start : start + ABREAST], trends)
        yield Text()
    yield others(recording)
    yield Text()
    for trend in trends:
        verdict = Text.assemble(trend.subject, ": ", (trend.verdict, STYLES[trend.verdict]))
        yield verdict.append(f"  {sparks(sizes[trend.subject], trend.tolerance)}")
        for line in explained(trend):
            yield Text(f"  {line}")
    for note in notes(recording):
        yield Text(f"note: {note}", "yellow")
    yield from lines(found)


def columns(recording: Recording) -> dict[str, list[ProcessMemory]]:
    """Each process's part of all samples."""
    parts = zip(*(sample.processes for sample in recording.samples), strict=True)
    return {f"{part[0].role} {part[0].pid}": list(part) for part in parts}


def rss(recording: Recording) -> dict[str, list[int | None]]:
    """Bytes of RSS in each sample: the total's, None where a process is gone, and each one's."""
    own = {name: [one.rss_bytes for one in part] for name, part in columns(recording).items()}
    rows = list(zip(*own.values(), strict=True))
    return {TOTAL: [None if None in row else sum(filter(None, row)) for row in rows], **own}


def resident(
    recording: Recording,
    sizes: dict[str, list[int | None]],
    names: Sequence[str],
    trends: Sequence[Trend],
) -> RenderableType:
    """RSS: a line for each round, or for some of the samples; then how much it has grown."""
    table = output.table("RSS", *names, right=names)
    count = len(recording.samples)
    some = {round(each * (count - 1) / (ROWS - 1)) for each in range(ROWS)}
    for index in sorted(some) if count > ROWS else range(count):
        head = label(recording, recording.samples[index])
        table.add_row(head, *(size(sizes[name][index]) for name in names))
    of = {trend.subject: trend for trend in trends}
    if trends and trends[0].rss_growth is not None:
        table.add_section()
        last = recording.samples[-1].round
        title = f"growth R{WARM_UP + 1}-R{last}" if last else "growth"
        table.add_row(title, *(signed(of[name].rss_growth) for name in names))
        title = f"mean per {trends[0].per}"
        table.add_row(title, *(signed(of[name].rss_mean) for name in names))
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


def others(recording: Recording) -> RenderableType:
    """Everything else, at first and at last, process by process."""
    table = output.table("", "first", "last", right=("first", "last"))
    for name, part in columns(recording).items():
        for what, of in FIGURES.items():
            told = [value for each in part if (value := of(each)) is not None]
            if told:
                table.add_row(f"{name}: {what}", told[0], told[-1])
    gpus = [sample.gpus_bytes for sample in recording.samples if sample.gpus_bytes]
    for number, (first, last) in enumerate(zip(gpus[0], gpus[-1], strict=True) if gpus else ()):
        table.add_row(f"GPU {number}, everybody", size(first), size(last))
    return table


def amount(count: int | None) -> str | None:
    return None if count is None else size(count)


def live(process: ProcessMemory) -> str | None:
    told = process.agent.requests if process.agent else None
    return f"{told.alive} ({told.finished_alive})" if told else None


def cached(kind: str) -> Callable[[ProcessMemory], str | None]:
    """What shows the caches of a kind."""

    def of(process: ProcessMemory) -> str | None:
        told = process.agent.caches if process.agent else ()
        held = [each for each in told if each.kind.startswith(kind) and each.entries]
        if not held:
            return None
        used = [size(each.bytes) for each in held if each.bytes is not None]
        used += [f"{each.slots} slots" for each in held if each.slots is not None]
        return f"{sum(each.entries or 0 for each in held)} ({', '.join(used)})"

    return of


def collections(process: ProcessMemory) -> str | None:
    told = process.agent.gc if process.agent else ()
    return "/".join(str(each.collections) for each in told) or None


def stored(process: ProcessMemory) -> str | None:
    told = process.agent.store if process.agent else None
    counts = (told.responses, told.messages, told.events) if told else ()
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
    """Bars from the lowest to the highest; flat where these are less than `least` bytes apart."""
    known = [each for each in values if each is not None]
    if len(known) > SPARKS:
        bounds = [round(each * len(known) / SPARKS) for each in range(SPARKS + 1)]
        known = [max(known[start:end]) for start, end in pairwise(bounds)]
    if not known:
        return ""
    low, reach = min(known), max(max(known) - min(known), least, 1)
    return "".join(BARS[int((each - low) / reach * (len(BARS) - 1))] for each in known)


def explained(trend: Trend) -> Iterator[str]:
    """What a verdict rests on."""
    if trend.mean is None or trend.low is None or trend.high is None:
        yield f"{trend.steps} steps are too few"
    else:
        yield (
            f"{signed(trend.mean)} per {trend.per}, 95 %: {signed(trend.low)} to "
            f"{signed(trend.high)}; tolerated {size(trend.tolerance)}"
        )
    if trend.cache_growth:
        yield f"without {signed(trend.cache_growth)} that caches hold"
    if trend.more:
        rounds = f"{trend.more:.0f} round{'s' if trend.more > 1 else ''}"
        yield f"probably enough: {rounds if trend.per == 'round' else span(trend.more)} more"


def notes(recording: Recording) -> list[str]:
    """What makes the recording less than it might be."""
    samples, found = recording.samples, []
    if recording.end is None:
        found.append("the recording has no end: it was killed, or still goes on")
    elif recording.end.why:
        found.append(f"cut short: {recording.end.why}")
    for name, part in columns(recording).items():
        silent = [each.silent for each in part if each.silent]
        if silent:
            found.append(f"{name} did not tell at {len(silent)} of {len(samples)}: {silent[-1]}")
        told = [each.agent for each in part if each.agent]
        found += [f"{name}: {each}" for each in dict.fromkeys(p for a in told for p in a.problems)]
        late_s = next((each.requests.late_s for each in told if each.requests), 0.0)
        if late_s > LATE_S:
            found.append(
                f"{name}: requests are counted since {span(late_s)} after its start, when the "
                "agent came; what was left over from before is not among them"
            )
    noisy = sum(sample.quiet is False for sample in samples if sample.round is not None)
    if noisy:
        found.append(f"other requests were in flight at {noisy} of {len(samples)} samples")
    return found
