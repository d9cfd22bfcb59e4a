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

    New state is sealed with the `primary`. State sealed with a `primary`, `next`
    or `verify-only` key is accepted; with a `revoked` key it is refused.
    """
    source = file.source(os.environ, keyring)
    return result(source.load(), str(source))
