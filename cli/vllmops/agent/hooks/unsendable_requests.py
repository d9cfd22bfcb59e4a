"""Takes a request that can't be sent to the engine out of the front end, and tells its client why.

vLLM notes a request before it encodes it. If a client's text has half of a surrogate pair, or a
number has too many bits, or lists lie in lists too deeply, it can't be encoded, and the front end
would wait for it for ever.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from types import ModuleType
from typing import Any

from ..versions import requests
from . import vllm_objects


def install_hook() -> None:
    """Hook the front end, once its module is imported."""
    vllm_objects.when_symbol_imported("engine-client", hook_front_end)


def hook_front_end(module: ModuleType) -> None:
    """Wrap the method that notes and sends a request; idempotent."""
    add = vars(module.AsyncLLM).get("_add_request")
    if add is None or hasattr(add, "__vllmops__"):
        return

    @functools.wraps(add)
    async def _add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        try:
            await add(self, request, *args, **kwargs)
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            parent = args[1] if len(args) > 1 else None  # of several choices (n)
            with suppress(Exception):  # the engine is told, too, where its id can be encoded
                await self.abort([(parent or request).request_id], internal=True)
            raise requests.make_validation_error(
                f"this request can't be sent to the engine: {error}"
            ) from error

    _add_request.__vllmops__ = True  # type: ignore[attr-defined]
    module.AsyncLLM._add_request = _add_request
