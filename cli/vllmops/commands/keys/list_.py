"""``vllmops keys list``."""

from __future__ import annotations

import os

from ... import output
from ...keys import file
from ...output import Result, command
from .keyring import Keyring, result


@command
def list_(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """List the keys, without their secrets.

    The `primary` seals. It, `next` and `verify-only` open what they have
    sealed; a `revoked` key opens nothing.
    """
    source = file.source(os.environ, keyring)
    return result(source.load(), str(source))
