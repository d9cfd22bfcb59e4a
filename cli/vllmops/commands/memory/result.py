"""The options and the result that `memory record` and `memory report` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...diagnose import memory as judge
from ...diagnose.findings import Severity
from ...output import Result
from ...protocol.memory import Recording
from ..options import size_, to_write
from .view import notes, shown

Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        readable=False,
        callback=to_write,
        help="Draw it: a .png or an .svg.",
        show_default=False,
    ),
]
Tolerance = Annotated[
    int | None,
    typer.Option(
        parser=size_,
        help="Growth that counts as none, for each round or hour: 500K, 2M, 1G. "
        "0.1 % of a process's RSS for each round, 1 % for each hour.",
        show_default=False,
    ),
]


def result(
    recording: Recording, tolerance_bytes: int | None, fail_on: Severity, plotted: Path | None
) -> Result:
    """What both commands show, from a recording that is over."""
    trends = judge.trends(recording, tolerance_bytes)
    found = judge.diagnose(recording, trends)
    highest = worst(found)
    failed = highest is not None and highest.rank >= fail_on.rank
    data = {
        **msgspec.to_builtins(recording.head),
        "ended_at": recording.end.at if recording.end else None,
        "cut_short": recording.end.why if recording.end else "it was killed",
        "samples": recording.samples,
        "trends": trends,
        "findings": found,
        "notes": notes(recording),
        "plot": str(plotted) if plotted else None,
    }
    return Result(
        data,
        lambda: list(shown(recording, trends, found)),
        Exit.FAILED if failed else Exit.OK,
    )
