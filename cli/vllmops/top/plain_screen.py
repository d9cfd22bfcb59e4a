"""One screen of ``vllmops top``, without Textual; the full screen shares its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..collect.machine.server_address import format_url
from ..model.findings import Finding, Severity
from ..model.ranks import format_role_and_ranks
from ..observe.requests.listing import InFlightRequest
from ..rules.progress import LATE_S
from ..support.output import (
    FoldedLines,
    IndentedLine,
    format_bytes,
    format_duration,
    make_table,
    style_text,
)
from .table_rows import CacheRow, ProcessRow, ServerFigures, ServerRow

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_REQUESTS = 10
STYLES = {None: "green", Severity.INFO: "", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
FINDINGS = {**STYLES, None: ""}


def render_servers(rows: Sequence[ServerRow]) -> Iterator[RenderableType]:
    """All servers, for a person."""
    from rich.text import Text  # noqa: PLC0415

    if not rows:
        yield "no vLLM server runs here"
    for number, row in enumerate(rows):
        if number:
            yield ""
        yield Text.assemble((row.target, "bold"), "  ", (format_state(row), STYLES[row.severity]))
        if address := "  ".join(filter(None, (format_url(row.url) if row.url else "", row.model))):
            yield FoldedLines((IndentedLine(2, address),))
        if text := format_figures(row.figures):
            yield FoldedLines((IndentedLine(2, text),))
        if row.nodes:
            yield make_processes_table(row)
        yield FoldedLines(tuple(IndentedLine(2, format_cache(each)) for each in row.caches))
        if row.requests:
            yield make_requests_table(row.requests[:MOST_REQUESTS])
        if (more := len(row.requests) - MOST_REQUESTS) > 0:
            yield f"  {more:,} more: vllmops requests list -t {row.target}"
        yield FoldedLines(tuple(render_problems(row)))


def format_state(row: ServerRow) -> str:
    """A server's state and stage."""
    text = f"{row.state}: {row.stage}" if row.stage else row.state
    late = bool(row.nodes) and row.age_s is not None and row.age_s >= LATE_S
    return f"{text} (seen {format_duration(row.age_s)} ago)" if late else text


def format_figures(figures: ServerFigures) -> str:
    """A server's figures in one line; empty if none is known."""
    parts = (
        ("{:,.0f} tokens/s", figures.tokens_per_s),
        ("{:,.0f} running", figures.running),
        ("{:,.0f} waiting", figures.waiting),
        ("KV {:.0%}", figures.kv),
        ("prefix hits {:.0%}", figures.prefix_hits),
        ("multimodal hits {:.0%}", figures.mm_hits),
    )
    return ", ".join(text.format(value) for text, value in parts if value is not None)


def make_processes_table(row: ServerRow) -> RenderableType:
    """A table of a server's processes, by node."""
    made = make_table(
        *("  process", "pid", "state", "cpu", "rss"), right_columns=["pid", "cpu", "rss"]
    )
    several = len(row.nodes) > 1
    for node in row.nodes:
        if several:
            made.add_row(f"  {node.name or 'this node'}", "", "", "", "")
        for one in node.processes:
            made.add_row(
                f"{'    ' if several else '  '}{format_role_and_ranks(one.role, one)}",
                str(one.pid),
                style_text(
                    describe_activity(one) or "-", STYLES[one.severity] if one.severity else ""
                ),
                format_percent(one.cpu),
                format_bytes(one.rss_bytes),
            )
    return made


def describe_activity(row: ProcessRow) -> str:
    """What a process does: its state, and the requests of a scheduler."""
    counts = (
        f"{row.running} running" if row.running else "",
        f"{row.waiting} waiting" if row.waiting else "",
        f"step {row.step:,}" if row.step else "",
    )
    return ", ".join(filter(None, (row.state, *counts)))


def format_percent(cores: float | None) -> str:
    return "-" if cores is None else f"{cores:.0%}"


def format_cache(row: CacheRow) -> str:
    """A cache in one line."""
    parts = [f"{row.name} of {row.process}:"]
    if row.entries is not None:
        parts.append(f"{row.entries:,} entries,")
    used, capacity = (
        (format_bytes(row.usage), format_bytes(row.capacity))
        if row.unit == "bytes"
        else (f"{row.usage or 0:,.0f}", f"{row.capacity or 0:,.0f} slots")
    )
    parts.append(f"{used} of {capacity}" if row.capacity is not None else used)
    if row.queries:
        parts.append(f"({(row.hits or 0) / row.queries:.0%} hits)")
    return " ".join(parts)


def make_requests_table(rows: Sequence[InFlightRequest]) -> RenderableType:
    """A line for each request, of the width of a small terminal."""
    made = make_table(
        "  request", "state", "age", "prompt", "output", right_columns=["age", "prompt", "output"]
    )
    for row in rows:
        name, *cells = make_request_cells(row)
        made.add_row(f"  {name}", *cells)
    return made


def make_request_cells(row: InFlightRequest) -> tuple[str, str, str, str, str]:
    """A request: its id, state, age, and tokens of prompt and output."""
    where = " ".join(filter(None, (row.state, row.ranks)))
    return (
        row.http_id or row.id or "-",
        f"{where}, stuck" if row.stuck else where,
        format_duration(row.age_s),
        format_count(row.prompt_tokens),
        format_count(row.output_tokens),
    )


def format_count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def render_problems(row: ServerRow) -> Iterator[IndentedLine]:
    """Findings, then what could not be seen."""
    for found in row.findings:
        yield from render_finding(found)
    for part in row.gaps:
        yield IndentedLine(2, f"not seen: {part.part}: {part.reason}", "yellow")
        if part.hint:
            yield IndentedLine(4, f"hint: {part.hint}")


def render_finding(finding: Finding) -> Iterator[IndentedLine]:
    """A finding: what, where, what was seen, and what to do next."""
    yield IndentedLine(
        2, f"{finding.severity}: {finding.title} [{finding.code}]", FINDINGS[finding.severity]
    )
    yield IndentedLine(4, f"where: {finding.subject}")
    yield IndentedLine(4, f"seen: {finding.evidence}")
    yield IndentedLine(4, f"next: {finding.next_step}", "bold")
