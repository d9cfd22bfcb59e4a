"""``vllmops keys promote``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from vllmops.support import output
from vllmops.support.errors import VllmopsError
from vllmops.support.output import Result, print_result

from ...keys import keyring_file
from .keyring_options import Keyring, Kid, Overlap, find_keyring_path, make_keyring_result
from .keys_in_use import choose_overlap_period, collect_load_status, describe_not_loaded


@print_result
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
    path = find_keyring_path(keyring)
    seconds = choose_overlap_period(overlap, path).seconds
    keyring_file.load_keyring(path).promote(kid, time.time(), seconds)
    if not force and (why := describe_not_loaded(path, kid)):
        raise VllmopsError(
            "keys.not-loaded",
            f"not every server has loaded {kid}: {'; '.join(why)}",
            "try again in some seconds: servers load keys within 2 s; see vllmops keys status",
        )
    ring = keyring_file.change_keyring(path, lambda ring: ring.promote(kid, time.time(), seconds))
    return make_keyring_result(ring, str(path), *collect_load_status(path, ring))
