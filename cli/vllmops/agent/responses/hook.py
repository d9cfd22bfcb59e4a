"""Replaces vLLM's serving of the Responses API where the environment names a store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from ...errors import VllmopsError
from ...keys.ring import Ring
from ...store import settings
from .. import objects
from ..imports import when_imported

ROUTER = "vllm.entrypoints.openai.responses.api_router"


def install(ring: Callable[[], Ring | None]) -> None:
    """Wait for vLLM's routes of the Responses API, where the environment names a store.

    Args:
        ring: gives the keys that seal and open carriers, None if there are none.
    """
    if settings.wanted():
        when_imported(ROUTER, partial(replace, ring))


def replace(ring: Callable[[], Ring | None], module: ModuleType) -> None:
    """Replace vLLM's routes; an error is reported, and vLLM's routes stay."""
    try:
        from . import routes  # noqa: PLC0415 - it imports vLLM

        routes.install(module, settings.backend(), settings.carriers(), ring)
    except VllmopsError as error:
        objects.report(f"responses are not stored: {error.message}")
    except Exception as error:
        objects.report(f"responses are not stored: unknown shape of {module.__name__}: {error!r}")
