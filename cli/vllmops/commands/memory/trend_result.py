"""The options and the result that `memory record` and `memory report` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...model.findings import Severity
from ...model.memory import MemoryRecording
from ...rules import memory_growth
from ...support.output import Result
from ..findings_view import choose_exit_code
from ..options import parse_size, validate_output_path
from .trend_view import collect_notes, render_recording

Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        readable=False,
        callback=validate_output_path,
        help="Draw the recording to this .png or .svg file.",
    ),
]
Tolerance = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Growth per round or hour that is not reported: 500K, 2M, 1G. "
        "Default: 0.1 % of a process's RSS per round, 1 % per hour.",
    ),
]


def make_recording_result(
    recording: MemoryRecording,
    tolerance_bytes: int | None,
    fail_on: Severity,
    plot_path: Path | None,
) -> Result:
    """What both commands show of a recording that has ended."""
    trends = memory_growth.compute_trends(recording, tolerance_bytes)
    findings = memory_growth.diagnose_memory(recording, trends)
    data = {
        **msgspec.to_builtins(recording.head),
        "ended_at": recording.end.ended_at if recording.end else None,
        "cut_short": recording.end.reason if recording.end else "it was killed",
        "samples": recording.samples,
        "trends": trends,
        "findings": findings,
        "notes": collect_notes(recording),
        "plot": str(plot_path) if plot_path else None,
    }
    return Result(
        data,
        lambda: list(render_recording(recording, trends, findings)),
        choose_exit_code(findings, fail_on),
    )
