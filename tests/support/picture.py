"""Draws what ``vllmops doctor`` and ``top`` show: ``python -m tests.support.picture``.

The server of ``doctor`` is made of a stored dump of stacks, those of ``top`` are made up, so the
pictures are the same on every machine.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.terminal_theme import MONOKAI

from vllmops.collect.stacks.pasted_text import parse_stacks
from vllmops.commands.doctor import render_diagnosis
from vllmops.model.agent_state import EngineState
from vllmops.model.server_snapshot import Exposure
from vllmops.rules.diagnosis import diagnose_snapshot

from ..rules.sample_servers import healthy, make_agent_report

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "cli/vllmops/docs/doctor.svg"
DUMP = ROOT / "tests/rules/stacks/mm-cache-eviction-spin.txt"
COLUMNS = 100
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # a terminal may be without internet


def draw() -> str:
    """The picture, as SVG."""
    (sample, *_) = parse_stacks(DUMP.read_text()).samples
    engine = msgspec.structs.replace(
        make_agent_report("engine"), engine=EngineState(running=1, waiting=2, current_step=5)
    )
    snapshot = healthy(
        model="Qwen/Qwen2.5-VL-7B-Instruct",
        uptime_s=14_070.0,
        reports=(make_agent_report("api"), engine, make_agent_report("worker")),
        stacks=(sample,) * 3,
        guard=Exposure(addresses=("0.0.0.0",), exposed=True, is_open=True),
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print("[bold]$[/] vllmops doctor", highlight=False)
    for part in render_diagnosis(
        snapshot, diagnose_snapshot(snapshot).findings, has_skipped_checks=False
    ):
        console.print(part, highlight=False, markup=False)
    picture = console.export_svg(title="vllmops doctor", theme=MONOKAI, unique_id="doctor")
    return FONT.sub("", picture)


def draw_top() -> str:
    """The picture of ``top``, as SVG."""
    from ..top.screens import render_screenshot  # Textual may be absent

    return FONT.sub("", asyncio.run(render_screenshot()))


PICTURES: dict[Path, Callable[[], str]] = {
    PICTURE: draw,
    ROOT / "cli/vllmops/docs/top.svg": draw_top,
}

if __name__ == "__main__":
    for place, drawing in PICTURES.items():
        place.write_text(drawing())
