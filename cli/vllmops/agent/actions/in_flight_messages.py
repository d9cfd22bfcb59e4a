"""Whether nothing is on its way between an API server and an engine.

A request that only one side knows may be on its way, or its end may be. Queues keep the order: once
each has been empty for a moment, and its reader at rest, what was on its way has arrived. A busy
engine fills them again at once, so such a moment is waited for.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...model.healing import HealProof
from ..hooks import vllm_objects
from ..state import engine
from .dead_io_threads import READER, WRITER

WITHIN_S, POLL_S = 0.5, 0.002
WAITS = {READER: "poll", WRITER: "get"}  # what such a thread calls then


def prove_queues_empty() -> list[HealProof]:
    """One proof where each queue of this process was empty at some moment."""
    until = time.monotonic() + WITHIN_S
    core, client = (
        vllm_objects.find_latest("engine-core"),
        vllm_objects.find_latest("engine-client"),
    )
    if core is None and vllm_objects.find_latest("scheduler") is not None:
        return []  # its queues can't be seen
    ends: list[Callable[[], bool]] = []
    for name, thread in (("input_queue", READER), ("output_queue", WRITER)):
        # Without them the engine and the API server are one process.
        if queue := getattr(core, name, None):
            ends.append(partial(is_queue_idle, queue, thread))
    if client is not None:
        ends.append(lambda: has_taken_outputs(client, until - time.monotonic()))
    if not ends:
        return []  # neither an engine nor its client is known here
    for empty in ends:
        while not empty():
            if time.monotonic() > until:
                return []
            time.sleep(POLL_S)
    return [HealProof(subject="transit", evidence="nothing is on its way")]


def is_queue_idle(queue: Any, name: str) -> bool:
    """Whether a queue of the engine is empty, and its thread waits for something to pass on."""
    return not queue.qsize() and any(
        find_called_function(frame, name) == WAITS[name] for frame in sys._current_frames().values()
    )


def find_called_function(frame: Any, name: str) -> str:
    """What a function calls in a thread; empty if it does not run there."""
    called = ""
    while frame is not None and frame.f_code.co_name != name:
        called = frame.f_code.co_name
        frame = frame.f_back
    return called if frame is not None else ""


def has_taken_outputs(client: Any, timeout_s: float) -> bool:
    """Whether an API server has taken every output that has arrived."""

    async def is_queue_empty() -> bool:
        queue = getattr(client.engine_core, "outputs_queue", None)
        return queue is None or bool(queue.empty())

    try:
        _, loop = engine.require_front_end()
        return asyncio.run_coroutine_threadsafe(is_queue_empty(), loop).result(
            max(timeout_s, POLL_S)
        )
    except (RuntimeError, TimeoutError):
        return False
