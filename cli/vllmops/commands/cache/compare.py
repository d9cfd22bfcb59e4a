"""``vllmops cache compare``: compare both sides of a server's caches while it works."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...model.cache_comparison import CacheComparison, CompareRequest
from ...model.caches import ProcessGap
from ...model.findings import Severity
from ...model.ranks import format_process, make_process_key
from ...observe.caches import comparison as compares
from ...rules import cache_comparison
from ...servers.discovery import resolve_server
from ...support import output
from ...support.output import Progress, Result
from ..findings_view import FailOn, choose_exit_code, render_findings
from ..multi_target import run_per_target
from ..options import Target, make_seconds_parser

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES = {"mm-lru": "Multimodal cache, mirrored", "encoder": "Encoder cache"}


@run_per_target
def compare(
    *,
    target: Target = None,
    fail_on: FailOn = Severity.ERROR,
    apart: Annotated[
        float, typer.Option(parser=make_seconds_parser(0.1), help="Seconds between the two reads.")
    ] = 0.5,
    timeout: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(1), help="Seconds to wait for the engine's answer."
        ),
    ] = 10.0,
    json_: output.Json = False,
) -> Result:
    """Compare both sides of a server's caches while it works.

    It compares the front end with the engine, and the scheduler with the
    workers at the same step. It reads both sides twice: the second time
    after every request on its way to the engine has arrived there. Only a
    difference that no request in flight explains is a finding; entries
    used in the meantime are ignored. The exit code is 1 if a finding has
    the severity --fail-on or a higher one, 3 if the engine does not answer.
    """
    server = resolve_server(target)
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: reading both sides twice")
        comparisons, silent = compares.compare_caches(
            server, CompareRequest(apart_s=apart, timeout_s=timeout)
        )
    data = build_comparison_data(server.label, comparisons, silent)
    return Result(
        data, lambda: list(render_comparison(data)), choose_exit_code(data["findings"], fail_on)
    )


def build_comparison_data(
    server: str, comparisons: Sequence[CacheComparison], gaps: Sequence[ProcessGap]
) -> dict[str, Any]:
    """The data for ``--json``.

    Several API servers share engines, so an engine and its notes count once.
    """
    lasts = [comparison.samples[-1] for comparison in comparisons]
    engines = {
        make_process_key(process): process
        for look in lasts
        for process in look.engines
        if process.unfinished_requests is not None
    }
    return {
        "server": server,
        "step": max(
            (engine.step for engine in engines.values() if engine.step is not None), default=None
        ),
        "samples": min(len(comparison.samples) for comparison in comparisons),
        "in_flight": {
            "http": sum(look.front.in_flight or 0 for look in lasts),
            "rendering": sum(look.rendering for look in lasts),
            "handed_over": sum(look.engine_requests for look in lasts),
            "engine": sum(engine.unfinished_requests or 0 for engine in engines.values()),
        },
        "pairs": merge_unique(map(cache_comparison.list_cache_pairs, comparisons)),
        "findings": merge_unique(map(cache_comparison.diagnose_comparison, comparisons)),
        "notes": merge_unique(map(cache_comparison.make_comparison_notes, comparisons)),
        "silent": gaps,
        "problems": merge_unique(look.problems for look in lasts),
    }


def merge_unique(groups: Iterable[Iterable[Any]]) -> list[Any]:
    """The members of all groups, each once."""
    return list(dict.fromkeys(chain.from_iterable(groups)))


def render_comparison(data: dict[str, Any]) -> Iterator[RenderableType]:
    """The data of `build_comparison_data` for a person."""
    for pair in data["pairs"]:
        yield output.style_text(TITLES[pair.kind], "bold")
        yield make_pair_table(pair)
        yield ""
    flight = data["in_flight"]
    yield (
        f"in flight: {flight['http']} HTTP requests, {flight['rendering']} of them not yet handed "
        f"to the engine; the engine has {flight['engine']}, at step {data['step']}"
    )
    for note in data["notes"]:
        yield f"note: {note.text}"
    for silent in data["silent"]:
        yield output.style_text(
            f"{format_process(silent)} did not answer: {silent.reason}", "yellow"
        )
    for problem in data["problems"]:
        yield output.style_text(problem, "yellow")
    yield from render_findings(data["findings"])
    if not data["findings"]:
        if not data["pairs"]:
            yield output.style_text("Nothing to compare.", "yellow")
        else:
            partly = any(note.code in cache_comparison.PARTLY for note in data["notes"])
            partly = partly or data["silent"] or data["problems"]
            where = " in what could be compared" if partly else ""
            yield output.style_text(f"No drift{where}.", "yellow" if where else "green")


def make_pair_table(pair: cache_comparison.CachePair) -> RenderableType:
    """A table with a column for each side."""
    titles = [
        " ".join(filter(None, ("" if side == role else f"{side}:", role, ranks, str(pid))))
        for side, role, ranks, pid in zip(
            pair.sides, pair.roles, pair.ranks, pair.pids, strict=True
        )
    ]
    table = output.make_table("", *titles, right_columns=titles)
    table.add_row("entries", *map(str, pair.entries))
    table.add_row("on both sides", *[str(pair.common_keys)] * 2)
    table.add_row("only on this side", *map(str, pair.exclusive_keys))
    if pair.same_order is not None:
        table.add_row("same order", *["yes" if pair.same_order else "no"] * 2)
    return table
