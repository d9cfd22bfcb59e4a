"""Ends requests of this process; from the agent's thread."""

from __future__ import annotations

import asyncio
import os

from ...model.requests import AbortAnswer, AbortRequest
from ..hooks import vllm_objects
from ..state import engine
from ..versions import requests

ABORTED = "an operator ended this request"


def abort_requests(request: AbortRequest) -> AbortAnswer:
    """``POST /abort``: end requests; of an API server with an error for the client."""
    try:
        client, loop = engine.require_front_end()
    except RuntimeError:
        return abort_in_engine(request)
    known = [
        name for name in request.ids if requests.find_front_end_request(client, name) is not None
    ]
    if not known:
        return AbortAnswer(pid=os.getpid(), ids=[])
    why = request.client_message or ABORTED
    done = asyncio.run_coroutine_threadsafe(requests.abort_with_error(client, known, why), loop)
    try:
        done.result(request.timeout_s)
    except TimeoutError:
        return AbortAnswer(
            pid=os.getpid(), ids=known, pending=True
        )  # it stays in the loop, and runs later
    return AbortAnswer(pid=os.getpid(), ids=known)


def abort_in_engine(request: AbortRequest) -> AbortAnswer:
    """End requests in this process's engine, as if their API server had asked for it."""
    scheduler, core = vllm_objects.find_latest("scheduler"), vllm_objects.find_latest("engine-core")
    if scheduler is None or core is None:
        return AbortAnswer(pid=os.getpid(), ids=[])
    known = [found for name in request.ids if (found := scheduler.requests.get(name))]
    if known:
        requests.abort_engine_requests(core, known)
    return AbortAnswer(pid=os.getpid(), ids=[found.request_id for found in known])
