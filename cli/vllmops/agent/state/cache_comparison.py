"""Reads both sides of the caches of a busy server, engine and workers at the same step.

Nothing is stopped. Requests that are between front end and engine at the first look must reach the
engine before the last look: then each has changed both sides, or neither (as with RCU).
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import msgspec

from ...model.cache_comparison import CacheComparison, CompareRequest, ComparisonSample
from ...model.caches import ProcessCaches
from ..hooks import vllm_objects
from ..hooks.request_gate import Arrival, gate
from ..identity import make_process_fields
from ..versions import engine as adapter
from . import caches, engine, requests

UTILITY = "vllmops_look"
POLL_S = 0.02

ENCODER = msgspec.msgpack.Encoder()
# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
DECODER = msgspec.msgpack.Decoder(ProcessCaches)


def install_hooks() -> None:
    """Hook the front end and the engine, once their modules are imported."""
    vllm_objects.when_symbol_imported("engine-client", hook_front_end)
    vllm_objects.when_symbol_imported("engine-core", hook_engine)


def hook_front_end(module: ModuleType) -> None:
    """Make the front end report each request that it has handed to the engine; idempotent."""
    add = module.AsyncLLM.add_request
    if hasattr(add, "__vllmops__"):
        return

    @functools.wraps(add)
    async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        queue = None
        try:
            queue = await add(self, *args, **kwargs)
            return queue
        finally:
            requests.link_arrival(queue, gate.mark_reached_engine())

    add_request.__vllmops__ = True  # type: ignore[attr-defined]
    module.AsyncLLM.add_request = add_request


def hook_engine(module: ModuleType) -> None:
    """Add the utility method `observe_engine_caches` to the engine; idempotent."""
    setattr(module.EngineCore, UTILITY, observe_engine_caches)


def observe_engine_caches(core: Any, deadline: float) -> list[bytes | str]:
    """The engine's caches, then its workers'; called by vLLM between two steps.

    Args:
        core: the EngineCore.
        deadline: seconds since the epoch; after it nobody waits for the answer.

    Returns:
        An encoded `ProcessCaches` for each process, or a text that says why it can't be read.
    """
    if time.time() > deadline:
        return ["the engine answers after the deadline, or its clock is ahead"]
    try:
        # One try: this is the engine's own thread, and a second try would delay its step.
        answers: list[bytes | str] = [ENCODER.encode(caches.observe_caches(keys=True, tries=1))]
        if not vllm_objects.list_objects("worker"):
            # No timeout, and no method that a worker might lack: after a failed call, vLLM takes
            # the other workers' answers to it for answers to the next call.
            answers += core.model_executor.collective_rpc(make_worker_function())
    except Exception as error:
        return [f"the engine can't be read: {error!r}"]
    return answers


def make_worker_function() -> Callable[[Any], bytes | str]:
    """The function that each worker runs; a local one is pickled by value, so needs no agent."""

    def observe_worker(worker: Any) -> bytes | str:
        try:
            answer: bytes = import_module("vllmops.agent.state.cache_comparison").outputs(worker)
            return answer
        except Exception as error:
            return f"a worker can't be read: {error!r}"

    return observe_worker


def outputs(worker: Any) -> bytes:
    """A worker's encoder outputs; called by vLLM between two of its calls."""
    cache = caches.observe_encoder_outputs(vars(worker).get("worker", worker))
    return ENCODER.encode(
        ProcessCaches(
            pid=os.getpid(),
            parent=os.getppid(),
            **make_process_fields(),
            caches=[cache] if cache else [],
        )
    )


def compare_caches(request: CompareRequest) -> CacheComparison:
    """``POST /compare``: two looks, and two snapshots of the front end after them.

    Raises:
        RuntimeError: this process has no engine client.
    """
    client, loop = engine.require_front_end()
    deadline = time.time() + request.timeout_s
    patience = deadline - request.timeout_s / 2  # the rest is for the last look: a step may be long
    looks: list[ComparisonSample] = []
    try:
        looks.append(observe_both_sides(client, loop, deadline))
        began = time.monotonic()
        # Read after the look: it has every request that had changed the cache by then and had not
        # reached the engine.
        pending = set(gate.rendering_requests)
        time.sleep(request.apart_s)
        settled = wait_until_handed_over(pending, patience)
        waited = time.monotonic() - began
        looks.append(observe_both_sides(client, loop, deadline))
    except TimeoutError:
        return CacheComparison(samples=looks)
    after = caches.observe_caches(keys=True)
    time.sleep(POLL_S)
    return CacheComparison(
        samples=looks,
        front_after=after,
        end=caches.observe_caches(),
        settled=settled,
        waited_s=waited,
    )


def observe_both_sides(
    client: Any, loop: asyncio.AbstractEventLoop, deadline: float
) -> ComparisonSample:
    """The front end's caches, then those of the engines and workers.

    Args:
        client: the engine client.
        loop: the event loop that it runs on.
        deadline: seconds since the epoch.

    Raises:
        TimeoutError: the engines did not answer before the deadline.
    """
    front = caches.observe_caches(keys=True)
    rendering = len(gate.rendering_requests)
    handed = adapter.count_unfinished_requests(client)
    # The engine answers in the order of arrival: after the requests that were sent before.
    call = asyncio.run_coroutine_threadsafe(
        adapter.call_engine_utility(client, UTILITY, deadline), loop
    )
    try:
        engines = call.result(max(deadline - time.time(), 0))
    except TimeoutError:
        # vLLM drops the answer to a cancelled call.
        call.cancel()
        raise
    answers = [answer for engine_answers in engines for answer in engine_answers]
    return ComparisonSample(
        front=front,
        engines=[DECODER.decode(answer) for answer in answers if isinstance(answer, bytes)],
        engine_requests=handed,
        rendering=rendering,
        problems=[answer for answer in answers if isinstance(answer, str)],
    )


def wait_until_handed_over(pending: set[Arrival], deadline: float) -> bool:
    """Wait until some requests have reached the engine; whether they have.

    Args:
        pending: the requests.
        deadline: seconds since the epoch.
    """
    while left := pending & gate.rendering_requests:
        if time.time() >= deadline:
            break
        time.sleep(POLL_S)
    return not left
