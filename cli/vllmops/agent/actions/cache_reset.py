"""Empties the multimodal caches of an API server and its engine, with nothing in flight."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

from ...model.cache_resets import ResetAnswer, ResetRequest
from ..hooks.request_gate import gate
from ..state import engine
from ..versions import engine as adapter

POLL_S = 0.02
RESET_S = 10.0  # for the reset itself; milliseconds unless the engine hangs


def reset_caches(request: ResetRequest) -> ResetAnswer:
    """``POST /reset``: drain, reset, and accept requests again, also if the caller is gone.

    Raises:
        RuntimeError: this process has no engine client.
        TimeoutError: the engine did not reset in time.
    """
    client, loop = engine.require_front_end()
    began = time.monotonic()
    with gate.refuse_requests() if request.drain_s else nullcontext():
        while (left := count_in_flight(client)) and time.monotonic() - began < request.drain_s:
            time.sleep(POLL_S)
        done = not left or not request.drain_s
        if done:
            # vLLM's own method, on its own event loop, resets both sides in the right order.
            task = asyncio.run_coroutine_threadsafe(client.reset_mm_cache(), loop)
            try:
                task.result(RESET_S)
            except TimeoutError as error:
                raise TimeoutError(
                    f"the engine has not reset its cache within {RESET_S:g} s"
                ) from error
    refused_s = time.monotonic() - began if request.drain_s else 0.0
    return ResetAnswer(done=done, in_flight=left, refused_s=refused_s)


def count_in_flight(client: Any) -> int:
    """HTTP requests, and requests without one in the engine: a background response, for example."""
    return max(gate.in_flight, adapter.count_unfinished_requests(client))
