"""``vllmops keys promote``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ... import output
from ...errors import VllmopsError
from ...keys import file
from ...output import Result, command
from .keyring import Keyring, Kid, Overlap, result, ring_path
from .servers import after, not_loaded, period


@command
def promote(
    kid: Kid,
    *,
    overlap: Overlap = None,
    force: Annotated[
        bool, typer.Option("--force", help="Though a server has not loaded it, or does not tell.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Have a key seal from now on; the primary so far opens what it sealed.

    Refused while a running server has not loaded it. A key that is
    verify-only can be gone back to.
    """
    path = ring_path(keyring)
    seconds = period(overlap, path).seconds
    file.load(path).promote(kid, time.time(), seconds)
    if not force and (why := not_loaded(path, kid)):
        raise VllmopsError(
            "keys.not-loaded",
            f"{kid} would seal what others can't open yet: {'; '.join(why)}",
            "try again in some seconds: servers load within 2 s; vllmops keys status shows which",
        )
    ring = file.change(path, lambda ring: ring.promote(kid, time.time(), seconds))
    return result(ring, str(path), *after(path, ring))
