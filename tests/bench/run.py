"""Measures every figure as a ratio against a rival in the same run, and prints them.

    python tests/bench/run.py            all of them: more than half an hour, on an idle machine
    python tests/bench/run.py --short    for CI, 3 minutes: each measurement is made a few times;
                                         only a figure that is wrong by a multiple fails
    python tests/bench/run.py --only cache --json figures.json
    python tests/bench/run.py --only diagnosis FOLDER
                                         how often `stacks explain` names the hang of a labelled
                                         text; see tests/bench/diagnosis.py for the folder

Exit code 1 where a figure does not hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tests.bench` is found

from tests.bench import (
    agent,
    cache,
    carrier,
    diagnosis,
    doctor,
    fleet,
    memory,
    metrics,
    patches,
    ranks,
    recorder,
    requests,
    responses,
    stacks,
    startup,
    storage,
    watch,
    websocket,
)
from tests.bench.figure import Figure
from tests.bench.setting import Setting, open_setting

from vllmops.support import output

FIELD = Path(__file__).resolve().parents[1] / "rules/field"
GROUPS = {
    "startup": startup.measure,
    "agent": agent.measure,
    "recorder": recorder.measure,
    "requests": requests.measure,
    "stacks": stacks.measure,
    "doctor": doctor.measure,
    "ranks": ranks.measure,
    "fleet": fleet.measure,
    "cache": cache.measure,
    "memory": memory.measure,
    "watch": watch.measure,
    "metrics": metrics.measure,
    "patches": patches.measure,
    "carrier": carrier.measure,
    "storage": storage.measure,
    "responses": responses.measure,
    "websocket": websocket.measure,
}
# These wait most of their time, each for another server, and what they measure is CPU time, or far
# from its limit in the short form.
WAITING = ("metrics", "memory", "fleet")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure vllmops against its rivals.")
    parser.add_argument("--short", action="store_true", help="few rounds, wide limits")
    parser.add_argument(
        "--only",
        choices=[*GROUPS, "diagnosis"],
        metavar="NAME",
        help=f"one of {', '.join(GROUPS)}, diagnosis",
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIELD, help="of labelled texts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    given = parser.parse_args()
    if given.only == "diagnosis":
        return 0 if diagnosis.report(given.folder) else 1
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    with open_setting(short=given.short) as place:
        whole = given.short and not given.only
        if whole:
            place.ahead()
        for name in [given.only] if given.only else GROUPS:
            if not (whole and name in WAITING):
                output.print_to_stderr(f"measuring: {name}")
                figures += GROUPS[name](place)
        if whole:
            figures += side_by_side(place)
    if given.json:
        report = {
            "short": given.short,
            "machine": {
                "cpus": os.cpu_count(),
                "load_before": load,
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "figures": [figure.row() for figure in figures],
        }
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    show(figures)
    return 0 if all(figure.holds for figure in figures) else 1


def side_by_side(place: Setting) -> list[Figure]:
    """The figures of those that wait, measured at the same time."""
    output.print_to_stderr(f"measuring: {', '.join(WAITING)}")
    with ThreadPoolExecutor() as pool:
        measured = pool.map(lambda name: [*GROUPS[name](place)], WAITING)
        return [figure for item in measured for figure in item]


def show(figures: list[Figure]) -> None:
    """Print a table, a figure to the line."""
    numbers = ("value", "its value", "again", "ratio", "95 %", "at most", "n")
    table = output.make_table(
        "figure",
        "value",
        "rival",
        "its value",
        "again",
        "ratio",
        "95 %",
        "at most",
        "n",
        "holds",
        right_columns=numbers,
    )
    for item in figures:
        table.add_row(
            item.name,
            amount(item.value, item.unit),
            item.rival,
            amount(item.rival_value, item.unit),
            amount(item.control, item.unit),
            "-" if item.ratio is None else f"{item.ratio:.3f}",
            "-"
            if item.interval is None
            else "-".join(f"{end / item.rival_value:.3f}" for end in item.interval),
            amount(item.bound, item.unit),
            f"{item.n:,}",
            "yes" if item.holds else Text("no", "bold red"),
        )
    output.print_parts(table)


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s" and value < 1:
        return f"{1000 * value:.2f} ms" if value < 0.1 else f"{1000 * value:.0f} ms"
    return f"{value:.4g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
