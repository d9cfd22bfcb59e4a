"""``vllmops cache compare``: both sides of a server's caches while it works."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import output
from ..caches import compare as compares
from ..diagnose import compares as judge
from ..diagnose.findings import Severity, worst
from ..errors import Exit
from ..instances.servers import resolve
from ..output import Progress, Result, command
from ..protocol.caches import Silent
from ..protocol.compares import CompareRequest, Comparison
from .findings import lines
from .options import Target, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

TITLES = {"mm-lru": "Multimodal cache, mirrored", "encoder": "Encoder cache"}


@command
def compare(
    *,
    target: Target = None,
    fail_on: Annotated[
        Severity, typer.Option(help="Exit code 1 from findings of this severity up.")
    ] = Severity.ERROR,
    apart: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds between the two looks.")
    ] = 0.5,
    timeout: Annotated[
        float, typer.Option(parser=seconds(1), help="Seconds for the engine to answer in.")
    ] = 10.0,
    json_: output.Json = False,
) -> Result:
    """Compare both sides of a server's caches while it works.

    Front end against engine, scheduler against worker at the same step.
    It looks twice, the second time once every request that was between
    front end and engine has got there, and counts only what no request in
    flight can explain; entries used meanwhile are left out. Exit code 1
    where there are findings from --fail-on up, 3 where the engine does
    not answer.
    """
    server = resolve(target)
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: looking twice")
        told, silent = compares.take(server, CompareRequest(apart_s=apart, timeout_s=timeout))
    data = report(server.label, told, silent)
    highest = worst(data["findings"])
    failed = highest is not None and highest.rank >= fail_on.rank
    return Result(data, lambda: list(text(data)), Exit.FAILED if failed else Exit.OK)


def report(server: str, told: Sequence[Comparison], silent: Sequence[Silent]) -> dict[str, Any]:
    """For ``--json``; several API servers share engines, so what each says is taken once."""
    lasts = [each.looks[-1] for each in told]
    engines = {
        process.pid: process
        for look in lasts
        for process in look.engines
        if process.unfinished is not None
    }
    return {
        "server": server,
        "step": max(
            (each.step for each in engines.values() if each.step is not None), default=None
        ),
        "samples": min(len(each.looks) for each in told),
        "in_flight": {
            "http": sum(look.front.in_flight or 0 for look in lasts),
            "rendering": sum(look.rendering for look in lasts),
            "handed_over": sum(look.handed for look in lasts),
            "engine": sum(each.unfinished or 0 for each in engines.values()),
        },
        "pairs": unique(pair for each in told for pair in judge.pairs(each)),
        "findings": unique(found for each in told for found in judge.drift(each)),
        "notes": unique(note for each in told for note in judge.notes(each)),
        "silent": silent,
        "problems": unique(problem for look in lasts for problem in look.problems),
    }


def unique(each: Iterator[Any]) -> list[Any]:
    return list(dict.fromkeys(each))


def text(data: dict[str, Any]) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    for pair in data["pairs"]:
        yield Text(TITLES[pair.kind], "bold")
        yield sides(pair)
        yield Text()
    flight = data["in_flight"]
    yield Text(
        f"in flight: {flight['http']} HTTP requests, {flight['rendering']} not yet handed to the "
        f"engine; {flight['engine']} in it, at step {data['step']}"
    )
    for note in data["notes"]:
        yield Text(f"note: {note.text}")
    for silent in data["silent"]:
        yield Text(f"{silent.role} {silent.pid} did not tell: {silent.why}", "yellow")
    for problem in data["problems"]:
        yield Text(problem, "yellow")
    yield from lines(data["findings"])
    if not data["findings"]:
        if not data["pairs"]:
            yield Text("Nothing to compare.", "yellow")
        else:
            partly = any(note.code in judge.PARTLY for note in data["notes"])
            partly = partly or data["silent"] or data["problems"]
            where = " in what could be judged" if partly else ""
            yield Text(f"No drift{where}.", "yellow" if where else "green")


def sides(pair: judge.Pair) -> RenderableType:
    """One column for each side."""
    heads = [
        f"{side}: {role} {pid}" if side != role else f"{role} {pid}"
        for side, role, pid in zip(pair.sides, pair.roles, pair.pids, strict=True)
    ]
    table = output.table("", *heads, right=heads)
    table.add_row("entries", *map(str, pair.entries))
    table.add_row("in common", *[str(pair.common)] * 2)
    table.add_row("only here", *map(str, pair.only))
    if pair.same_order is not None:
        table.add_row("same order", *["yes" if pair.same_order else "no"] * 2)
    return table
