"""``vllmops integrate systemd``: a unit file."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from ...support.output import Json, Result, VerbatimText, print_result

UNIT = Path(__file__).with_name("unit.service")
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


def validate_user_name(value: str) -> str:
    """A callback for the name of a user."""
    if not USER.fullmatch(value):
        raise typer.BadParameter(f"{value!r} is not the name of a user.")
    return value


def escape_unit_path(path: Path) -> str:
    """A path between the quotes of ``ExecStart``."""
    return str(path).replace("\\", r"\\").replace('"', r"\"").replace("%", "%%")


@print_result
def systemd(
    run_as: Annotated[
        str,
        typer.Option(
            callback=validate_user_name, metavar="USER", help="User that runs the servers."
        ),
    ] = "vllm",
    json_: Json = False,
) -> Result:
    """Print a systemd unit for servers that `vllmops serve` runs.

    It is a template: vllmops@NAME runs /etc/vllmops/NAME.toml, which `vllmops
    serve MODEL --dry-run --toml` writes. systemd is told when the server is ready,
    and restarts it if it fails or if a stall is sure; after 6 starts in an hour
    it gives up.
    """
    text = Template(UNIT.read_text("utf-8")).substitute(
        program=escape_unit_path(Path(sys.executable).parent / "vllmops"), user=run_as
    )
    return Result({"unit": text}, lambda: [VerbatimText(text.rstrip())])
