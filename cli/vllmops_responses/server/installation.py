"""Replaces vLLM's serving of the Responses API where the environment names a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.hooks.import_hook import when_imported
from vllmops.agent.versions import features, module_locations
from vllmops.support.errors import VllmopsError

from ..keys.keyring import KeyRing
from ..store import settings

# Turns on vLLM's own store, which keeps responses in the memory of one process.
STOCK = "VLLM_ENABLE_RESPONSES_API_STORE"


def replace_routes_on_import(get_keyring: Callable[[], KeyRing | None]) -> None:
    """Wait for vLLM's routes of the Responses API, where the environment names a store.

    Args:
        get_keyring: gives the keys that seal and open carriers, None if there are none.
    """
    if not settings.is_store_configured():
        return
    module = module_locations.find_symbol_module("responses-routes")
    if module and features.RESPONSES not in features.find_missing_features():
        when_imported(module, partial(replace_routes, get_keyring))
    else:
        enable_vllm_store()


def replace_routes(get_keyring: Callable[[], KeyRing | None], module: ModuleType) -> None:
    """Replace vLLM's routes; an error is reported, and vLLM's routes and store stay."""
    try:
        # They import vLLM; the former adds to the latter.
        from .http import conversation_routes, routes  # noqa: PLC0415, F401

        routes.install_routes(
            module,
            settings.make_backend_from_env(),
            settings.parse_carrier_settings(),
            get_keyring,
            settings.parse_websocket_limits(),
        )
    except VllmopsError as error:
        vllm_objects.report_problem(f"responses are not stored: {error.message}")
    except Exception as error:
        vllm_objects.report_unsupported(
            f"responses are not stored: unknown shape of {module.__name__}: {error!r}"
        )
        enable_vllm_store()


def enable_vllm_store() -> None:
    """Let vLLM keep responses in its own way, unless the environment says whether it shall."""
    if STOCK not in os.environ:
        os.environ[STOCK] = "1"
        vllm_objects.problems.append(
            "responses are kept in vLLM's own store: in the memory of each API server, without "
            f"bound, and for everybody who knows their id; {STOCK}=0 turns it off"
        )
