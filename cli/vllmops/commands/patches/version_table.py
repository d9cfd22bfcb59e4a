"""``vllmops patches list --versions``: what works with which version of vLLM, as tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...agent.patches.registry import PATCHES
from ...agent.versions.features import FEATURES, VersionResults, load_tested_versions
from ...model.patches import PatchState
from ...support.output import make_table, style_text

if TYPE_CHECKING:
    from rich.console import RenderableType

WORKS = "works"
CELLS = {WORKS: "yes", PatchState.APPLIED: "yes", PatchState.FIXED: "-"}
STYLES = {"yes": "green", "no": "bold red"}
TITLES = {name: feature.title for name, feature in FEATURES.items()}


def build_versions_data() -> dict[str, Any]:
    """The data for ``--json``: by feature or patch, then by version."""
    versions = load_tested_versions()
    rows = [
        {
            "id": name,
            "title": TITLES.get(name) or PATCHES[name].title,
            "versions": {version: row.results.get(name) for version, row in versions.items()},
        }
        for name in (*FEATURES, *PATCHES)
    ]
    live = {version: row.has_live_run for version, row in versions.items()}
    return {"features": rows, "live": live}


def render_versions() -> list[RenderableType]:
    """The table for a person."""
    versions = load_tested_versions()
    shown = make_table("", *(shorten_version(version) for version in versions))
    shown.padding = (0, 0)  # so that all of it fits into 80 columns
    for name in (*FEATURES, *PATCHES):
        cells = [format_cell(row, name) for row in versions.values()]
        shown.add_row(
            TITLES.get(name, name), *(style_text(text, STYLES.get(text, "")) for text in cells)
        )
    shown.add_row(
        "a server ran", *("yes" if row.has_live_run else "-" for row in versions.values())
    )
    return [shown, "", NOTE]


NOTE = (
    "yes: it works, or the patch removes the defect; -: fixed upstream, or no server ran; "
    "no: it is off, and vLLM works as without vllmops"
)


def shorten_version(version: str) -> str:
    """A version without its last number."""
    return version.rpartition(".")[0]


def format_cell(row: VersionResults, name: str) -> str:
    return CELLS.get(row.results.get(name, ""), "no")
