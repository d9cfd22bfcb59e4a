"""Empties the multimodal caches of an API server and its engine, with nothing in flight."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

from ..protocol.resets import ResetDone, ResetRequest
from . import engine
from .gate import gate

POLL_S = 0.02
RESET_S = 10.0  # for the reset itself; milliseconds unless the engine hangs


def reset(request: ResetRequest) -> ResetDone:
    """``POST /reset``: drain, reset, and take requests again, also where the caller is gone.

    Raises:
        RuntimeError: this process has no engine client.
        TimeoutError: the engine did not do it in time.
    """
    client, loop = engine.front_end()
    began = time.monotonic()
    with gate.held() if request.drain_s else nullcontext():
        while (left := in_flight(client)) and time.monotonic() - began < request.drain_s:
            time.sleep(POLL_S)
        done = not left or not request.drain_s
        if done:
            # Its own method, on its own loop: both sides, in the order that vLLM wants.
            task = asyncio.run_coroutine_threadsafe(client.reset_mm_cache(), loop)
            try:
                task.result(RESET_S)
            except TimeoutError as error:
                raise TimeoutError(f"the engine has not done it within {RESET_S:g} s") from error
    refused_s = time.monotonic() - began if request.drain_s else 0.0
    return ResetDone(done=done, in_flight=left, refused_s=refused_s)


def in_flight(client: Any) -> int:
    """Requests of HTTP, and what the engine works on without one: a background response, say."""
    unfinished: int = client.output_processor.get_num_unfinished_requests()
    return max(gate.in_flight, unfinished)
