"""Options that several commands share, and what completes them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from ..admin import PLACE
from ..errors import Exit, VllmopsError

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """Seconds of a duration such as ``90``, ``15m``, ``36h`` or ``30d``.

    Raises:
        VllmopsError: ``usage``.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if not found or not float(found[1]):
        raise VllmopsError(
            "usage", f"{text!r} is no duration", "write it as 15m, 36h or 30d", exit_code=Exit.USAGE
        )
    return float(found[1]) * UNITS[found[2]]


def running_names(incomplete: str) -> list[str]:
    """Names of the instances that run, for completion."""
    from ..instances.record import Folder  # noqa: PLC0415

    return [name for name in every_name(incomplete) if Folder(name).supervised()]


def every_name(incomplete: str) -> list[str]:
    """Names of all instances, those that are over included, for completion."""
    from ..instances.record import folders  # noqa: PLC0415

    with suppress(VllmopsError):  # nobody has asked for anything yet
        return [f.name for f in folders() if f.name.startswith(incomplete)]
    return []


def patch_ids(incomplete: str) -> list[str]:
    """Ids of the patches, for completion."""
    from ..patches.registry import PATCHES  # noqa: PLC0415

    return [name for name in PATCHES if name.startswith(incomplete)]


HELP = "Instance name, pid or URL of a server; not needed where only one runs."

Target = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", envvar="VLLMOPS_TARGET", help=HELP, autocompletion=running_names
    ),
]
# Not from the environment: the option below it is, and an argument stands before both.
TargetArgument = Annotated[
    str | None, typer.Argument(metavar="[TARGET]", help=HELP, autocompletion=every_name)
]
AdminToken = Annotated[
    Path | None,
    typer.Option(
        "--admin-token",
        metavar="FILE",
        envvar=PLACE,
        show_envvar=False,  # its name is too long for a narrow terminal
        help="A file, as keygen writes it: who has a copy may change the server's keys from afar.",
        show_default=False,
    ),
]
