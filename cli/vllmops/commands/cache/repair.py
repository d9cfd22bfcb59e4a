"""``vllmops cache repair``: repair the LRU caches of running processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...actions import cache_repair
from ...actions.cache_repair import RepairReport
from ...model.cache_repairs import CacheChange, CacheDefect
from ...model.findings import Severity, find_worst_severity
from ...model.ranks import format_process
from ...model.ranks import make_process_fields as ranked
from ...rules import caches
from ...servers.discovery import resolve_server
from ...support import output
from ...support.errors import ExitCode
from ...support.output import Progress, Result
from ..findings_view import render_findings
from ..multi_target import run_per_target
from ..options import Target

if TYPE_CHECKING:
    from rich.console import RenderableType


@run_per_target
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
    server = resolve_server(target)
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: searching for faults")
        report = cache_repair.repair_caches(server, dry_run=dry_run)
    findings = caches.diagnose_caches(report.snapshot_after)
    failed = find_worst_severity(findings) is Severity.ERROR or any(
        cache.reason for process in report.repairs for cache in process.caches
    )
    data = {
        "server": server.label,
        "dry_run": dry_run,
        "repairs": [
            {**ranked(process), **msgspec.to_builtins(cache)}
            for process in report.repairs
            for cache in process.caches
        ],
        "silent": report.gaps,
        "seconds": sum(process.seconds for process in report.repairs),
        "findings": findings,
    }
    code = ExitCode.FAILED if failed else ExitCode.OK
    return Result(data, lambda: list(render_repairs(report, data)), code)


def render_repairs(report: RepairReport, data: dict[str, Any]) -> Iterator[RenderableType]:
    """The data of `repair` for a person."""
    verb = "would repair" if data["dry_run"] else "repaired"
    for process in report.repairs:
        for cache in process.caches:
            yield output.style_text(
                f"{format_process(process)}, {cache.side} ({cache.name})", "bold"
            )
            for change in cache.changes:
                yield f"  {'found' if cache.reason else verb}: {describe_change(change)}"
            if cache.reason:
                yield output.style_text(f"  not repaired: {cache.reason}", "yellow")
    if not data["repairs"]:
        yield output.style_text("Nothing to repair.", "green")
    for silent in data["silent"]:
        yield output.style_text(
            f"{format_process(silent)} did not answer: {silent.reason}", "yellow"
        )
    if data["findings"]:
        yield "Checked again:"
        yield from render_findings(data["findings"])
    else:
        yield output.style_text("Checked again: no findings.", "green")


def describe_change(change: CacheChange) -> str:
    """A change in words."""
    if change.defect is CacheDefect.SIZE_SUM:
        return f"{change.defect}: {change.count:+,.0f} bytes"
    shown = ", ".join(map(caches.shorten_key, change.keys))
    more = ", …" if change.count > len(change.keys) else ""
    return f"{change.count:,.0f} {change.defect} ({shown}{more})"
