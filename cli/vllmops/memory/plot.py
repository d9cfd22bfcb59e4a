"""Plots of recordings, by matplotlib, which not everybody has."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .. import files
from ..diagnose.memory import TOTAL
from ..errors import Exit, VllmopsError
from ..output import size
from ..protocol.memory import Recording

SUFFIXES = (".png", ".svg")
MIB = 1 << 20


def check(path: Path) -> None:
    """Raise where a plot could not be written, before anything is recorded for it.

    Raises:
        VllmopsError: ``plot.format`` (exit code 2), ``plot.no-matplotlib`` or ``plot.not-written``.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise VllmopsError(
            "plot.format",
            f"{path} is neither {' nor '.join(SUFFIXES)}",
            f"--plot {path.stem or 'memory'}.png",
            exit_code=Exit.USAGE,
        )
    if not find_spec("matplotlib"):
        raise VllmopsError(
            "plot.no-matplotlib",
            "a plot needs matplotlib, which is not installed",
            "pip install 'vllmops-cli[plot]'",
        )
    try:
        files.check(path)
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> VllmopsError:
    hint = "choose another place with --plot"
    return files.not_written(path, error, "plot.not-written", hint)


def draw(recording: Recording, path: Path) -> None:
    """Plot how RSS has changed, and the finished requests still alive, where they are counted.

    Raises:
        VllmopsError: ``plot.not-written``.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    head = recording.head
    samples = [s for s in recording.samples if all(each.rss_bytes for each in s.processes)]
    rounds = head.rounds is not None
    x = [float(s.round or 0) if rounds else (s.taken_at - head.started_at) / 60 for s in samples]
    counted = any(
        each.agent and each.agent.requests for sample in samples for each in sample.processes
    )
    figure = Figure(figsize=(9, 6.5 if counted else 4.5), layout="constrained")
    top, *below = figure.subplots(
        2 if counted else 1, sharex=True, squeeze=False, height_ratios=[3, 1] if counted else [1]
    )[:, 0]
    marker = "o" if len(samples) <= 50 else ""

    def resident(name: str, sizes: Sequence[int], color: str | None = None) -> None:
        # From zero on, growth would hardly be seen beside the weights.
        since = [(each - sizes[0]) / MIB for each in sizes]
        label = f"{name}, {size(sizes[-1])} at last"
        top.plot(x, since, color=color, marker=marker, label=label)

    rows = [[each.rss_bytes or 0 for each in sample.processes] for sample in samples]
    resident(TOTAL, [sum(row) for row in rows], "black")
    for number, column in enumerate(zip(*(each.processes for each in samples), strict=True)):
        name = f"{column[0].role} {column[0].pid}"
        resident(name, [row[number] for row in rows], f"C{number}")
        finished = [
            each.agent.requests.finished_alive if each.agent and each.agent.requests else None
            for each in column
        ]
        if below and any(each is not None for each in finished):
            known = [float("nan") if each is None else each for each in finished]
            below[0].plot(x, known, color=f"C{number}", marker=marker)
    top.set_title(f"Memory of {head.server}" + (f", load: {head.load}" if head.load else ""))
    top.set_ylabel("RSS since the first sample (MiB)")
    top.legend()
    for axes in (top, *below):
        axes.grid(alpha=0.3)
    if below:
        below[0].set_ylabel("finished requests\nstill alive")
        below[0].set_ylim(bottom=0)
    lowest = below[0] if below else top
    lowest.set_xlabel("rounds (0: idle, 1: warm-up)" if rounds else "minutes")
    if rounds:
        lowest.xaxis.get_major_locator().set_params(integer=True)
    try:
        with files.written(path) as file:
            figure.savefig(file, dpi=120, format=path.suffix[1:].lower())
    except OSError as error:
        raise not_written(path, error) from error
