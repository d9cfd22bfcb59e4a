"""What the commands on keys share: which keyring, and how it is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...errors import Exit, VllmopsError
from ...keys import file
from ...keys.ring import Key, Ring, Status, when
from ...output import Result, table
from ..options import time_

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"primary": "green", "next": "cyan", "verify-only": "", "revoked": "red"}


def kids(incomplete: str) -> list[str]:
    """Names of the keys, for completion."""
    with suppress(VllmopsError):
        ring = file.source(os.environ).load()
        return [key.kid for key in ring.keys if key.kid.startswith(incomplete)]
    return []


Keyring = Annotated[
    Path | None,
    typer.Option(
        "--keyring",
        readable=False,
        metavar="FILE",
        help="The keyring; otherwise VLLMOPS_KEYRING, or keyring.json in VLLMOPS_HOME.",
        show_default=False,
    ),
]
Kid = Annotated[str, typer.Argument(metavar="KID", help="The key.", autocompletion=kids)]
Overlap = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="For how long the old primary opens what it sealed [as long as carriers live: 30d, or"
        " the longest `serve --carrier-ttl`].",
        show_default=False,
    ),
]


def ring_path(keyring: Path | None) -> Path:
    """The file that a command changes; a key in the environment is not one.

    Raises:
        VllmopsError: ``usage``.
    """
    if str(keyring) == file.OFF:
        message = f"--keyring {file.OFF} is for vllmops serve: here it takes a file"
        hint = f"--keyring ./{file.OFF} for a file of that name"
        raise VllmopsError("usage", message, hint, exit_code=Exit.USAGE)
    if str(keyring) == "-":
        message = "--keyring - is no file: a keyring is kept, and replaced when it changes"
        raise VllmopsError("usage", message, "--keyring FILE", exit_code=Exit.USAGE)
    named = {file.PLACE: os.environ.get(file.PLACE, "")}
    return file.source(named, keyring).path or file.default_path()


def result(
    ring: Ring, where: str, more: dict[str, Any] | None = None, notes: Sequence[str] = ()
) -> Result:
    """A ring as a result.

    Args:
        ring: its secrets are left out.
        where: it is kept.
        more: for ``--json``.
        notes: lines below it for a person.
    """
    from rich.text import Text  # noqa: PLC0415

    data = {"keyring": where, "keys": [key.told() for key in ring.keys], **(more or {})}
    return Result(data, lambda: [*listing(ring, where), *map(Text, notes)])


def listing(ring: Ring, where: str) -> Sequence[RenderableType]:
    """A line for each key."""
    from rich.text import Text  # noqa: PLC0415

    if not ring.keys:
        return [Text(f"{where}: no keys")]
    shown = table("kid", "status", "created", "until", "fingerprint")
    for key in ring.keys:
        shown.add_row(
            key.kid,
            Text(key.status, STYLES[key.status]),
            when(key.created_at),
            when(key.not_after) + (", over" if key.over(time.time()) else ""),
            key.fingerprint,
        )
    return [Text(where), shown]


def first(ring: Ring, key: Key) -> Key:
    """A key, as the primary where it is a ring's first."""
    return key if ring.keys else msgspec.structs.replace(key, status=Status.PRIMARY)
