"""Shared by the commands on keys: the keyring option, and how a keyring is shown."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ...errors import VllmopsError, usage
from ...keys import file
from ...keys.ring import Key, Ring, Status, when
from ...output import Result, styled, table
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
        help="The keyring file. Default: VLLMOPS_KEYRING, or keyring.json in VLLMOPS_HOME.",
    ),
]
Kid = Annotated[str, typer.Argument(metavar="KID", help="Key ID.", autocompletion=kids)]
Overlap = Annotated[
    str | None,
    typer.Option(
        parser=time_,
        metavar="TIME",
        help="How long the old primary stays verify-only [default: lifetime of carriers: 30d or"
        " the longest `serve --carrier-ttl`].",
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
        raise usage(message, hint)
    if str(keyring) == "-":
        message = "--keyring needs a file, not stdin: the command changes it"
        raise usage(message, "--keyring FILE")
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
    data = {"keyring": where, "keys": [key.public() for key in ring.keys], **(more or {})}
    return Result(data, lambda: [*listing(ring, where), *notes])


def listing(ring: Ring, where: str) -> Sequence[RenderableType]:
    """A table of the keys."""
    if not ring.keys:
        return [f"{where}: no keys"]
    shown = table("kid", "status", "created", "until", "fingerprint")
    for key in ring.keys:
        shown.add_row(
            key.kid,
            styled(key.status, STYLES[key.status]),
            when(key.created_at),
            when(key.not_after) + (", over" if key.over(time.time()) else ""),
            key.fingerprint,
        )
    return [where, shown]


def first(ring: Ring, key: Key) -> Key:
    """The key; as primary if it is the first of the ring."""
    return key if ring.keys else msgspec.structs.replace(key, status=Status.PRIMARY)
