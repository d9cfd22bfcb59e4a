"""One screen of ``vllmops top``, without Textual; the full screen shares its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..diagnose.findings import Finding, Severity
from ..diagnose.progress import LATE_S
from ..host.shape import shown
from ..output import Folded, Line, size, span, styled, table
from ..protocol.place import named
from ..requests.listing import Row
from .rows import CacheRow, Figures, ProcessRow, ServerRow

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_REQUESTS = 10
STYLES = {None: "green", Severity.INFO: "", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
FINDINGS = {**STYLES, None: ""}


def screen(rows: Sequence[ServerRow]) -> Iterator[RenderableType]:
    """All servers, for a person."""
    from rich.text import Text  # noqa: PLC0415

    if not rows:
        yield "no vLLM server runs here"
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield Text.assemble((row.target, "bold"), "  ", (state(row), STYLES[row.severity]))
        if address := "  ".join(filter(None, (shown(row.url) if row.url else "", row.model))):
            yield Folded((Line(2, address),))
        if text := figures(row.figures):
            yield Folded((Line(2, text),))
        if row.nodes:
            yield processes(row)
        yield Folded(tuple(Line(2, cache(each)) for each in row.caches))
        if row.requests:
            yield requests(row.requests[:MOST_REQUESTS])
        if (more := len(row.requests) - MOST_REQUESTS) > 0:
            yield f"  {more:,} more: vllmops requests list -t {row.target}"
        yield Folded(tuple(problems(row)))


def state(row: ServerRow) -> str:
    """A server's state and stage."""
    text = f"{row.state}: {row.stage}" if row.stage else row.state
    late = bool(row.nodes) and row.age_s is not None and row.age_s >= LATE_S
    return f"{text} (seen {span(row.age_s)} ago)" if late else text


def figures(told: Figures) -> str:
    """A server's figures in one line; empty if none is known."""
    parts = (
        ("{:,.0f} tokens/s", told.tokens_per_s),
        ("{:,.0f} running", told.running),
        ("{:,.0f} waiting", told.waiting),
        ("KV {:.0%}", told.kv),
        ("prefix hits {:.0%}", told.prefix_hits),
        ("multimodal hits {:.0%}", told.mm_hits),
    )
    return ", ".join(text.format(value) for text, value in parts if value is not None)


def processes(row: ServerRow) -> RenderableType:
    """A table of a server's processes, by node."""
    made = table(*("  process", "pid", "state", "cpu", "rss"), right=["pid", "cpu", "rss"])
    several = len(row.nodes) > 1
    for node in row.nodes:
        if several:
            made.add_row(f"  {node.name or 'this node'}", "", "", "", "")
        for one in node.processes:
            made.add_row(
                f"{'    ' if several else '  '}{named(one.role, one)}",
                str(one.pid),
                styled(doing(one) or "-", STYLES[one.severity] if one.severity else ""),
                percent(one.cpu),
                size(one.rss_bytes),
            )
    return made


def doing(row: ProcessRow) -> str:
    """What a process does: its state, and the requests of a scheduler."""
    counts = (
        f"{row.running} running" if row.running else "",
        f"{row.waiting} waiting" if row.waiting else "",
        f"step {row.step:,}" if row.step else "",
    )
    return ", ".join(filter(None, (row.state, *counts)))


def percent(cores: float | None) -> str:
    return "-" if cores is None else f"{cores:.0%}"


def cache(row: CacheRow) -> str:
    """A cache in one line."""
    parts = [f"{row.name} of {row.process}:"]
    if row.entries is not None:
        parts.append(f"{row.entries:,} entries,")
    used, capacity = (
        (size(row.used), size(row.capacity))
        if row.unit == "bytes"
        else (f"{row.used or 0:,.0f}", f"{row.capacity or 0:,.0f} slots")
    )
    parts.append(f"{used} of {capacity}" if row.capacity is not None else used)
    if row.queries:
        parts.append(f"({(row.hits or 0) / row.queries:.0%} hits)")
    return " ".join(parts)


def requests(rows: Sequence[Row]) -> RenderableType:
    """A line for each request, of the width of a small terminal."""
    made = table("  request", "state", "age", "prompt", "output", right=["age", "prompt", "output"])
    for row in rows:
        name, *cells = request(row)
        made.add_row(f"  {name}", *cells)
    return made


def request(row: Row) -> tuple[str, str, str, str, str]:
    """A request: its id, state, age, and tokens of prompt and output."""
    where = " ".join(filter(None, (row.state, row.ranks)))
    return (
        row.http_id or row.id or "-",
        f"{where}, stuck" if row.stuck else where,
        span(row.age_s),
        count(row.prompt_tokens),
        count(row.output_tokens),
    )


def count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def problems(row: ServerRow) -> Iterator[Line]:
    """Findings, then what could not be seen."""
    for found in row.findings:
        yield from finding(found)
    for part in row.unseen:
        yield Line(2, f"not seen: {part.part}: {part.why}", "yellow")
        if part.hint:
            yield Line(4, f"hint: {part.hint}")


def finding(found: Finding) -> Iterator[Line]:
    """A finding: what, where, what was seen, and what to do next."""
    yield Line(2, f"{found.severity}: {found.title} [{found.code}]", FINDINGS[found.severity])
    yield Line(4, f"where: {found.subject}")
    yield Line(4, f"seen: {found.evidence}")
    yield Line(4, f"next: {found.next}", "bold")
