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
        bool, typer.Option("--force", help="Promote even if a server has not confirmed loading it.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Make a key the primary; the old primary becomes verify-only.

    The command fails while a running server has not loaded the key. A
    verify-only key can become primary again.
    """
    path = ring_path(keyring)
    seconds = period(overlap, path).seconds
    file.load(path).promote(kid, time.time(), seconds)
    if not force and (why := not_loaded(path, kid)):
        raise VllmopsError(
            "keys.not-loaded",
            f"not every server has loaded {kid}: {'; '.join(why)}",
            "try again in some seconds: servers load keys within 2 s; see vllmops keys status",
        )
    ring = file.change(path, lambda ring: ring.promote(kid, time.time(), seconds))
    return result(ring, str(path), *after(path, ring))
