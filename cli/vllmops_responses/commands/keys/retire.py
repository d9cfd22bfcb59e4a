"""``vllmops keys retire``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from vllmops.support import output
from vllmops.support.output import Result, print_result

from ...keys import keyring_file
from .keyring_options import Keyring, Kid, find_keyring_path, make_keyring_result
from .keys_in_use import collect_load_status


@print_result
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
    path = find_keyring_path(keyring)
    ring = keyring_file.change_keyring(
        path, lambda ring: ring.retire(kid, time.time(), force=force)
    )
    return make_keyring_result(ring, str(path), *collect_load_status(path, ring))
