"""Replaces vLLM's serving of the Responses API where the environment names a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import ModuleType

from ...errors import VllmopsError
from ...keys.ring import Ring
from ...store import settings
from .. import objects
from ..adapters import features, places
from ..imports import when_imported

# Turns on vLLM's own store, which keeps responses in the memory of one process.
STOCK = "VLLM_ENABLE_RESPONSES_API_STORE"


def install(ring: Callable[[], Ring | None]) -> None:
    """Wait for vLLM's routes of the Responses API, where the environment names a store.

    Args:
        ring: gives the keys that seal and open carriers, None if there are none.
    """
    if not settings.wanted():
        return
    module = places.where("responses-routes")
    if module and features.RESPONSES not in features.missing():
        when_imported(module, partial(replace, ring))
    else:
        fall_back()


def replace(ring: Callable[[], Ring | None], module: ModuleType) -> None:
    """Replace vLLM's routes; an error is reported, and vLLM's routes and store stay."""
    try:
        # They import vLLM; the former adds to the latter.
        from . import conversation_routes, routes  # noqa: PLC0415, F401

        routes.install(module, settings.backend(), settings.carriers(), ring, settings.sockets())
    except VllmopsError as error:
        objects.report(f"responses are not stored: {error.message}")
    except Exception as error:
        objects.unfit(f"responses are not stored: unknown shape of {module.__name__}: {error!r}")
        fall_back()


def fall_back() -> None:
    """Let vLLM keep responses in its own way, unless the environment says whether it shall."""
    if STOCK not in os.environ:
        os.environ[STOCK] = "1"
        objects.problems.append(
            "responses are kept in vLLM's own store: in the memory of each API server, without "
            f"bound, and for everybody who knows their id; {STOCK}=0 turns it off"
        )
