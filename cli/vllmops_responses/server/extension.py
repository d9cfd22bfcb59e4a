"""Adds keys and stored responses, with their routes, to a server that starts."""

from __future__ import annotations

from vllmops.agent.extensions import Extension
from vllmops.agent.identity import detect_role

from .keyring import keyring_follower, keyring_routes
from .store_usage import StoreUsageCounter


def install() -> None:
    """Load the keys; in an API server, replace vLLM's routes of the Responses API.

    The keys first: whatever fails then, no child of this process inherits one.
    """
    keyring_follower.start_key_holder()
    if detect_role() == "api":
        from . import installation  # noqa: PLC0415 - other processes don't need the store

        installation.replace_routes_on_import(keyring_follower.get_keyring)


EXTENSION = Extension(
    install, keyring_routes.AGENT_GETS, keyring_routes.ADMIN_ROUTES, StoreUsageCounter().poll_usage
)
