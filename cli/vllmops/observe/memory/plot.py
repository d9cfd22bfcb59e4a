"""Plots of recordings; they need matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...model.memory import MemoryRecording, MemoryRecordingHead, MemorySample, ProcessMemory
from ...model.ranks import format_process
from ...rules.memory_growth import TOTAL
from ...support import files
from ...support.errors import VllmopsError
from ...support.output import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
MIB = 1 << 20
MOST_MARKED = 50  # samples: with more, a marker at each would hide the line


def require_writable_plot(path: Path) -> None:
    """Raise if a plot could not be written, before anything is recorded for it.

    Raises:
        VllmopsError: ``plot.format`` (exit code 2), ``plot.no-matplotlib`` or ``plot.not-written``.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise VllmopsError(
            "plot.format",
            f"{path} does not end in {' or '.join(SUFFIXES)}",
            f"--plot {path.stem or 'memory'}.png",
        )
    if not find_spec("matplotlib"):
        raise VllmopsError(
            "plot.no-matplotlib",
            "--plot needs matplotlib, which is not installed",
            "pip install 'vllmops-cli[plot]'",
        )
    try:
        files.require_writable(path)
    except OSError as error:
        raise make_not_written_error(path, error) from error


def make_not_written_error(path: Path, error: OSError) -> VllmopsError:
    hint = "choose another file with --plot"
    return files.make_not_written_error(path, error, "plot.not-written", hint)


def draw_plot(recording: MemoryRecording, path: Path) -> None:
    """Plot how RSS changes, and below it the finished requests still alive, if they are counted.

    Raises:
        VllmopsError: ``plot.not-written``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    samples = [s for s in recording.samples if all(part.rss_bytes for part in s.processes)]
    counted = any(
        count_finished_alive(part) is not None for sample in samples for part in sample.processes
    )
    figure = Figure(figsize=(9, 6.5 if counted else 4.5), layout="constrained")
    heights = [3, 1] if counted else [1]
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    x = compute_x_positions(recording.head, samples)
    marker = "o" if len(samples) <= MOST_MARKED else ""
    draw_rss(panels[0], x, samples, marker)
    panels[0].set_title(format_plot_title(recording.head))
    if counted:
        draw_finished_requests(panels[1], x, samples, marker)
    for panel in panels:
        panel.grid(alpha=0.3)
    if recording.head.rounds is None:
        panels[-1].set_xlabel("minutes")
    else:
        panels[-1].set_xlabel("rounds (0: idle, 1: warm-up)")
        panels[-1].xaxis.get_major_locator().set_params(integer=True)
    try:
        with files.open_atomically(path) as file:
            figure.savefig(file, dpi=120, format=path.suffix[1:].lower())
    except OSError as error:
        raise make_not_written_error(path, error) from error


def format_plot_title(head: MemoryRecordingHead) -> str:
    return f"Memory of {head.server}" + (f", load: {head.load}" if head.load else "")


def compute_x_positions(head: MemoryRecordingHead, samples: Sequence[MemorySample]) -> list[float]:
    """Where samples stand on the x axis: at their round, or at minutes since the start."""
    if head.rounds is not None:
        return [float(sample.round or 0) for sample in samples]
    return [(sample.taken_at - head.started_at) / 60 for sample in samples]


def count_finished_alive(part: ProcessMemory) -> int | None:
    """Finished requests of a process that are still alive; None if nobody counts them."""
    requests = part.agent.requests if part.agent else None
    return requests.finished_alive if requests else None


def draw_rss(axes: Axes, x: list[float], samples: Sequence[MemorySample], marker: str) -> None:
    """A line for the total RSS and one for each process, each since its first sample.

    From zero on, growth would be too small to see beside the model's weights.
    """
    if not samples:
        return
    table = [[part.rss_bytes or 0 for part in sample.processes] for sample in samples]
    names = [format_process(part) for part in samples[0].processes]
    lines = [(TOTAL, [sum(row) for row in table], "black")]
    lines += [
        (name, [row[number] for row in table], f"C{number}") for number, name in enumerate(names)
    ]
    for name, sizes, color in lines:
        since = [(bytes_ - sizes[0]) / MIB for bytes_ in sizes]
        label = f"{name}, {format_bytes(sizes[-1])} at last"
        axes.plot(x, since, color=color, marker=marker, label=label)
    axes.set_ylabel("RSS since the first sample (MiB)")
    axes.legend()


def draw_finished_requests(
    axes: Axes, x: list[float], samples: Sequence[MemorySample], marker: str
) -> None:
    """A line for each process that counts finished requests which are still alive."""
    for number, column in enumerate(zip(*(sample.processes for sample in samples), strict=True)):
        counts = [count_finished_alive(part) for part in column]
        if any(count is not None for count in counts):
            known = [float("nan") if count is None else count for count in counts]
            axes.plot(x, known, color=f"C{number}", marker=marker)
    axes.set_ylabel("finished requests\nstill alive")
    axes.set_ylim(bottom=0)
