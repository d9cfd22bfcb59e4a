"""``vllmops cache repair``: repair the LRU caches of running processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ... import output
from ...caches import repair as repairs
from ...caches.repair import Report
from ...diagnose import caches as judge
from ...diagnose.findings import Severity, worst
from ...errors import Exit
from ...instances.servers import resolve
from ...output import Progress, Result
from ...protocol.place import row as ranked
from ...protocol.place import who
from ...protocol.repairs import Change, Fault
from ..findings import lines
from ..options import Target
from ..several import per_target

if TYPE_CHECKING:
    from rich.console import RenderableType


@per_target
def repair(
    *,
    target: Target = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be repaired; change nothing.")
    ] = False,
    json_: output.Json = False,
) -> Result:
    """Repair the multimodal caches of a server while it runs, or hangs.

    It removes keys without data from the LRU order, puts lost keys back,
    drops sizes and pins without data, and recomputes the total size. If no
    request is in flight, it also drops front-end entries that the engine
    does not have. A thread that spins in an eviction continues, and so do
    its requests; nothing is restarted. Only a fault that persists is
    repaired; a healthy cache is not changed. The exit code is 1 if an
    error remains, or with --dry-run if there is one.
    """
    server = resolve(target)
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: searching for faults")
        report = repairs.repair(server, dry_run=dry_run)
    findings = judge.diagnose(report.after)
    failed = worst(findings) is Severity.ERROR or any(
        cache.left for process in report.repairs for cache in process.caches
    )
    data = {
        "server": server.label,
        "dry_run": dry_run,
        "repairs": [
            {**ranked(process), **msgspec.to_builtins(cache)}
            for process in report.repairs
            for cache in process.caches
        ],
        "silent": report.silent,
        "seconds": sum(process.seconds for process in report.repairs),
        "findings": findings,
    }
    code = Exit.FAILED if failed else Exit.OK
    return Result(data, lambda: list(text(report, data)), code)


def text(report: Report, data: dict[str, Any]) -> Iterator[RenderableType]:
    """The data of `repair` for a person."""
    verb = "would repair" if data["dry_run"] else "repaired"
    for process in report.repairs:
        for cache in process.caches:
            yield output.styled(f"{who(process)}, {cache.side} ({cache.name})", "bold")
            for change in cache.changes:
                yield f"  {'found' if cache.left else verb}: {words(change)}"
            if cache.left:
                yield output.styled(f"  not repaired: {cache.left}", "yellow")
    if not data["repairs"]:
        yield output.styled("Nothing to repair.", "green")
    for silent in data["silent"]:
        yield output.styled(f"{who(silent)} did not answer: {silent.why}", "yellow")
    if data["findings"]:
        yield "Checked again:"
        yield from lines(data["findings"])
    else:
        yield output.styled("Checked again: no findings.", "green")


def words(change: Change) -> str:
    """A change in words."""
    if change.fault is Fault.SIZE_SUM:
        return f"{change.fault}: {change.count:+,.0f} bytes"
    shown = ", ".join(map(judge.short, change.keys))
    more = ", …" if change.count > len(change.keys) else ""
    return f"{change.count:,.0f} {change.fault} ({shown}{more})"
