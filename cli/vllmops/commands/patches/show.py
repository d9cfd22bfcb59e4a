"""``vllmops patches show``: what one patch is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...agent.patches.registry import known
from ...output import Json, Result, command, table
from ..options import patch_ids

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def show(
    patch: Annotated[
        str, typer.Argument(metavar="ID", help="The patch.", autocompletion=patch_ids)
    ],
    json_: Json = False,
) -> Result:
    """Show what a patch is about: the defect, who is hit, what changes."""
    found = known(patch)
    names = ("id", "title", "upstream", "hit", "changes", "modules", "live")
    data = {name: getattr(found, name) for name in names}
    return Result(data, lambda: facts(data))


def facts(data: dict[str, Any]) -> list[RenderableType]:
    """What a patch is, for a person."""
    from rich.text import Text  # noqa: PLC0415

    live = "can be applied" if data["live"] else "can't be applied"
    shown = table("", "")
    shown.show_header = False
    for label, text in (
        ("defect", data["title"]),
        ("upstream", data["upstream"]),
        ("who is hit", data["hit"]),
        ("changes", data["changes"]),
        ("in", ", ".join(data["modules"])),
        ("live", f"{live} to a server that already runs without it"),
        ("leave out", f"vllmops serve --no-patch {data['id']}"),
    ):
        shown.add_row(label, Text(text))
    return [Text(data["id"], style="bold"), shown]
