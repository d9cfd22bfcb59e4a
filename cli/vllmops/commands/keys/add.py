"""``vllmops keys add``."""

from __future__ import annotations

import time

from ... import output
from ...keys import file
from ...keys.ring import Key, Status, fresh
from ...output import Result, command
from .keyring import Keyring, first, result, ring_path


@command
def add(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """Add a fresh key without showing it.

    Its status is `next`: servers load it, and do not seal with it until it is
    promoted. The first key of a keyring becomes its primary.
    """
    path = ring_path(keyring)
    key = Key.of(fresh(), Status.NEXT, time.time())
    ring = file.change(path, lambda ring: ring.add(first(ring, key)), create=True)
    if len(ring.keys) > 1 and not json_:
        output.say(f"vllmops keys rotate promotes {key.kid} when every server has loaded it")
    return result(ring, str(path), {"kid": key.kid})
