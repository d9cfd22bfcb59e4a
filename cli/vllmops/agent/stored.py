"""Puts the serving of stored responses in the place of vLLM's, where there is to be a store."""

from __future__ import annotations

from types import ModuleType

from ..errors import VllmopsError
from . import found
from .imports import when_imported

ROUTER = "vllm.entrypoints.openai.responses.api_router"


def install() -> None:
    """Wait for vLLM's routes of the Responses API, where the environment asks for a store."""
    from ..store import settings  # noqa: PLC0415 - its modules are the API server's alone

    if settings.wanted():
        when_imported(ROUTER, swap)


def swap(module: ModuleType) -> None:
    """Put ours in the place of vLLM's; whatever hinders it is reported, and vLLM's stays."""
    try:
        from ..store import settings  # noqa: PLC0415 - they import vLLM
        from .responses import routes  # noqa: PLC0415 - they import vLLM

        routes.install(module, settings.backend(), settings.carriers())
    except VllmopsError as error:
        found.report(f"responses are not stored: {error.message}")
    except Exception as error:
        found.report(f"responses are not stored, {module.__name__} is not as known: {error!r}")
