"""``vllmops keys retire``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ... import output
from ...keys import file
from ...output import Result, command
from .keyring import Keyring, Kid, result, ring_path
from .servers import after


@command
def retire(
    kid: Kid,
    *,
    force: Annotated[
        bool,
        typer.Option("--force", help="Retire even if conversations sealed with it may continue."),
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Remove a key from the keyring after its overlap has ended."""
    path = ring_path(keyring)
    ring = file.change(path, lambda ring: ring.retire(kid, time.time(), force=force))
    return result(ring, str(path), *after(path, ring))
