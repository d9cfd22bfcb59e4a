"""Checks the keys and the store of a server before ``vllmops serve`` starts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vllmops.collect.machine.server_address import find_option
from vllmops.model.environment import KEYRING, KeyringSource, locate_default_keyring
from vllmops.support.errors import make_usage_error
from vllmops.support.output import print_to_stderr

from .keys import keyring_file
from .keys.keyring import Key, KeyStatus, generate_secret

if TYPE_CHECKING:
    from .store.response_store import ResponseStore

STORE_TIMEOUT_S = 10.0


def load_keys(source: KeyringSource) -> None:
    """Load the keys of a server, as it will itself; raises as `load_keyring_source`."""
    keyring_file.load_keyring_source(source)


def validate_settings(environment: Mapping[str, str]) -> None:
    """Refuse what can't be; raises as `settings.validate_settings`."""
    from .store import settings  # noqa: PLC0415 - slow, and keys alone need no store

    settings.validate_settings(environment)


def validate_store(environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuse wrong settings of store or carriers; a store that is only down may come up later.

    Args:
        environment: of the server.
        arguments: of vLLM.

    Raises:
        VllmopsError: ``usage``, ``store.driver`` or ``store.schema``.
    """
    from .store import settings  # noqa: PLC0415
    from .store.response_store import ResponseStore  # noqa: PLC0415

    settings.validate_settings(environment)
    if not settings.is_store_configured(environment):
        return
    backend = settings.make_backend_from_env(environment)
    several = find_option(arguments, "--api-server-count") not in {None, "1"}
    if several and backend.url.startswith("memory:"):
        raise make_usage_error(
            "memory:// works for one process only: with several API servers use another --store",
            "vllmops serve --help",
        )
    asyncio.run(print_store_caveats(ResponseStore(backend, deadline_s=STORE_TIMEOUT_S)))


async def print_store_caveats(store: ResponseStore) -> None:
    """Open a store, and print how it could lose responses that it has acknowledged, or is away."""
    async with store:
        if not store.is_open:
            print_to_stderr(
                f"warning: {store.problem}; until it is back, what must be stored gets 503"
            )
        else:
            with suppress(*store.backend.unavailable, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    for caveat in await store.backend.list_caveats():
                        print_to_stderr(f"the store: {caveat}")


def create_default_keyring(environment: Mapping[str, str], *, quiet: bool) -> None:
    """Create the default keyring, with one key, if the server uses it and it does not exist.

    So client-held conversation state works at once, and is valid on all servers of this home.

    Args:
        environment: of the server.
        quiet: whether to print nothing.

    Raises:
        VllmopsError: as `keyring_file.change_keyring`.
    """
    path = locate_default_keyring()
    if environment.get(KEYRING) != str(path) or path.exists():
        return
    key = Key.from_secret(generate_secret(), KeyStatus.PRIMARY, time.time())
    # Another serve may have created it meanwhile.
    ring = keyring_file.change_keyring(
        path, lambda ring: ring if ring.keys else ring.add(key), create=True
    )
    if not quiet and ring.find(key.kid):
        what = "it protects client-held conversation state; to have none: --keyring none"
        print_to_stderr(f"made a key, {key.kid}, in {path}: {what}")
