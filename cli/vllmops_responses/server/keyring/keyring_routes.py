"""The routes of a server's keys: of the agent's socket, and for admins.

``GET`` lists the keys of the process that answers, without their secrets; ``POST`` sends it a
keyring.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllmops.agent.extensions import AdminRoute
from vllmops.model.admin_api import KEYS
from vllmops.model.keys import ProcessKeys
from vllmops.support.errors import VllmopsError
from vllmops.support.secret_files import MOST_BYTES

from ...keys import keyring_file
from ...keys.keyring import KeyRing
from .keyring_follower import merge_keyring, observe_keys


def accept_keyring(content: bytes) -> ProcessKeys:
    """Merge the keyring of an admin into the server's own.

    Raises:
        VllmopsError: as `parse_keyring` and `merge_keyring`.
    """
    return merge_keyring(parse_keyring(content))


def parse_keyring(content: bytes) -> KeyRing:
    """The keyring in the body of a request.

    Raises:
        VllmopsError: ``admin.no-ring``: the body is no keyring.
    """
    try:
        return keyring_file.decode_keyring(content, Path("the request body"))
    except VllmopsError as error:
        raise VllmopsError("admin.no-ring", error.message) from None


AGENT_GETS: dict[str, Callable[[], ProcessKeys]] = {
    "/keys": observe_keys,
    "/keys?reload=1": partial(observe_keys, reload=True),
}
ADMIN_ROUTES = {
    ("GET", KEYS): AdminRoute(lambda _: observe_keys()),
    ("POST", KEYS): AdminRoute(accept_keyring, MOST_BYTES, "admin.no-ring"),
}
