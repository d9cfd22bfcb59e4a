"""``vllmops keys list``."""

from __future__ import annotations

import os

from vllmops.model.environment import find_keyring_source
from vllmops.support import output
from vllmops.support.output import Result, print_result

from ...keys import keyring_file
from .keyring_options import Keyring, make_keyring_result


@print_result
def list_keys(*, keyring: Keyring = None, json_: output.Json = False) -> Result:
    """List the keys, without their secrets.

    New state is sealed with the `primary`. State sealed with a `primary`, `next`
    or `verify-only` key is accepted; with a `revoked` key it is refused.
    """
    source = find_keyring_source(os.environ, keyring)
    return make_keyring_result(keyring_file.load_keyring_source(source), str(source))
