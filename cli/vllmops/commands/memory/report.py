"""``vllmops memory report``: judge a saved recording again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...model.findings import Severity
from ...model.memory import MemoryRecording
from ...observe.memory import plot
from ...observe.memory.recorder import read_recording
from ...support.errors import VllmopsError
from ...support.files import is_gzip
from ...support.output import Json, Result, print_result
from ..findings_view import FailOn
from .trend_result import Plot, Tolerance, make_recording_result


@print_result
def report(
    file: Annotated[
        Path,
        typer.Argument(readable=False, help="What `memory record --save` wrote, or a bundle."),
    ],
    *,
    tolerance: Tolerance = None,
    plot_: Plot = None,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """Judge a saved recording again; the verdict is that of `memory record`."""
    if plot_:
        plot.require_writable_plot(plot_)
    recording = load_bundled_recording(file) if is_gzip(file) else read_recording(file)
    if plot_:
        plot.draw_plot(recording, plot_)
    return make_recording_result(recording, tolerance, fail_on, plot_)


def load_bundled_recording(file: Path) -> MemoryRecording:
    """The recording in a bundle.

    Raises:
        VllmopsError: as `bundle_file.load_bundle` does, or ``bundle.no-memory``.
    """
    from ...bundle import bundle_file  # noqa: PLC0415 - slow to import, and needed for a bundle only

    recording = bundle_file.load_bundle(file).memory
    if recording is None:
        raise VllmopsError(
            "bundle.no-memory",
            f"{file} contains no recording",
            "a bundle has one if vllmops memory record ran before",
        )
    return recording
