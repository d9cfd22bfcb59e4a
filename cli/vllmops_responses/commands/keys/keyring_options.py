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

from vllmops.commands.options import validate_duration
from vllmops.model.environment import KEYRING, OFF, find_keyring_source, locate_default_keyring
from vllmops.support.durations import format_utc_time
from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.output import Result, make_table, style_text

from ...keys import keyring_file
from ...keys.keyring import Key, KeyRing, KeyStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"primary": "green", "next": "cyan", "verify-only": "", "revoked": "red"}


def complete_kid(incomplete: str) -> list[str]:
    """Names of the keys, for completion."""
    with suppress(VllmopsError):
        ring = keyring_file.load_keyring_source(find_keyring_source(os.environ))
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
Kid = Annotated[str, typer.Argument(metavar="KID", help="Key ID.", autocompletion=complete_kid)]
Overlap = Annotated[
    str | None,
    typer.Option(
        parser=validate_duration,
        metavar="TIME",
        help="How long the old primary stays verify-only [default: lifetime of carriers: 30d or"
        " the longest `serve --carrier-ttl`].",
    ),
]


def find_keyring_path(keyring: Path | None) -> Path:
    """The file that a command changes; a key in the environment is not one.

    Raises:
        VllmopsError: ``usage``.
    """
    if str(keyring) == OFF:
        message = f"--keyring {OFF} is for vllmops serve: here it takes a file"
        hint = f"--keyring ./{OFF} for a file of that name"
        raise make_usage_error(message, hint)
    if str(keyring) == "-":
        message = "--keyring needs a file, not stdin: the command changes it"
        raise make_usage_error(message, "--keyring FILE")
    named = {KEYRING: os.environ.get(KEYRING, "")}
    return find_keyring_source(named, keyring).path or locate_default_keyring()


def make_keyring_result(
    keyring: KeyRing,
    location: str,
    extra_data: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """A ring as a result.

    Args:
        keyring: its secrets are left out.
        location: it is kept.
        extra_data: for ``--json``.
        notes: lines below it for a person.
    """
    data = {
        "keyring": location,
        "keys": [key.without_secret() for key in keyring.keys],
        **(extra_data or {}),
    }
    return Result(data, lambda: [*render_keyring(keyring, location), *notes])


def render_keyring(keyring: KeyRing, location: str) -> Sequence[RenderableType]:
    """A table of the keys."""
    if not keyring.keys:
        return [f"{location}: no keys"]
    shown = make_table("kid", "status", "created", "until", "fingerprint")
    for key in keyring.keys:
        shown.add_row(
            key.kid,
            style_text(key.status, STYLES[key.status]),
            format_utc_time(key.created_at),
            format_utc_time(key.not_after) + (", over" if key.is_expired(time.time()) else ""),
            key.fingerprint,
        )
    return [location, shown]


def make_primary_if_first(keyring: KeyRing, key: Key) -> Key:
    """The key; as primary if it is the first of the ring."""
    return key if keyring.keys else msgspec.structs.replace(key, status=KeyStatus.PRIMARY)
