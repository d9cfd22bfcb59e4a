"""``vllmops keys add``."""

from __future__ import annotations

import time

from vllmops.support import output
from vllmops.support.output import Result, print_result

from ...keys import keyring_file
from ...keys.keyring import Key, KeyStatus, generate_secret
from .keyring_options import Keyring, find_keyring_path, make_keyring_result, make_primary_if_first


@print_result
def add(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """Add a fresh key without showing it.

    Its status is `next`: servers load it, and do not seal with it until it is
    promoted. The first key of a keyring becomes its primary.
    """
    path = find_keyring_path(keyring)
    key = Key.from_secret(generate_secret(), KeyStatus.NEXT, time.time())
    ring = keyring_file.change_keyring(
        path, lambda ring: ring.add(make_primary_if_first(ring, key)), create=True
    )
    if len(ring.keys) > 1 and not json_:
        output.print_to_stderr(
            f"vllmops keys rotate promotes {key.kid} when every server has loaded it"
        )
    return make_keyring_result(ring, str(path), {"kid": key.kid})
