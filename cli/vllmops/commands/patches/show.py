"""``vllmops patches show``: what one patch is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...agent.patches.registry import require_patch
from ...support import output
from ...support.output import Json, Result, print_result, style_text
from ..options import complete_patch_id

if TYPE_CHECKING:
    from rich.console import RenderableType


@print_result
def show(
    patch: Annotated[
        str,
        typer.Argument(metavar="ID", help="The ID of the patch.", autocompletion=complete_patch_id),
    ],
    json_: Json = False,
) -> Result:
    """Show a patch: the defect, who is affected, and what the patch changes."""
    shown = require_patch(patch)
    names = ("id", "title", "upstream", "hit", "changes", "modules", "live")
    data = {name: getattr(shown, name) for name in names}
    return Result(data, lambda: render_patch(data))


def render_patch(data: dict[str, Any]) -> list[RenderableType]:
    """The data of a patch, for a person."""
    live = "can be loaded" if data["live"] else "can't be loaded"
    rows = [
        ("defect", data["title"]),
        ("upstream", data["upstream"]),
        ("who is affected", data["hit"]),
        ("changes", data["changes"]),
        ("modules", ", ".join(data["modules"])),
        ("live", f"{live} into a server that runs without it"),
        ("leave out", f"vllmops serve --no-patch {data['id']}"),
    ]
    return [style_text(data["id"], "bold"), output.make_facts_table(rows)]
