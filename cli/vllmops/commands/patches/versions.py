"""``vllmops patches list --versions``: what works with which version of vLLM, as tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...agent.adapters.features import FEATURES, Tested, tested
from ...agent.patches.registry import PATCHES
from ...output import styled, table
from ...protocol.patches import State

if TYPE_CHECKING:
    from rich.console import RenderableType

WORKS = "works"
CELLS = {WORKS: "yes", State.APPLIED: "yes", State.FIXED: "-"}
STYLES = {"yes": "green", "no": "bold red"}
TITLES = {name: feature.title for name, feature in FEATURES.items()}


def report() -> dict[str, Any]:
    """The data for ``--json``: by feature or patch, then by version."""
    versions = tested()
    rows = [
        {
            "id": name,
            "title": TITLES.get(name) or PATCHES[name].title,
            "versions": {version: row.results.get(name) for version, row in versions.items()},
        }
        for name in (*FEATURES, *PATCHES)
    ]
    live = {version: row.live for version, row in versions.items()}
    return {"features": rows, "live": live}


def listing() -> list[RenderableType]:
    """The table for a person."""
    versions = tested()
    shown = table("", *(short(version) for version in versions))
    shown.padding = (0, 0)  # so that all of it fits into 80 columns
    for name in (*FEATURES, *PATCHES):
        cells = [cell(row, name) for row in versions.values()]
        shown.add_row(
            TITLES.get(name, name), *(styled(text, STYLES.get(text, "")) for text in cells)
        )
    shown.add_row("a server ran", *("yes" if row.live else "-" for row in versions.values()))
    return [shown, "", NOTE]


NOTE = (
    "yes: it works, or the patch removes the defect; -: fixed upstream, or no server ran; "
    "no: it is off, and vLLM works as without vllmops"
)


def short(version: str) -> str:
    """A version without its last number."""
    return version.rpartition(".")[0]


def cell(row: Tested, name: str) -> str:
    return CELLS.get(row.results.get(name, ""), "no")
