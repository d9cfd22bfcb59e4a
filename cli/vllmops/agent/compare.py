"""Reads both sides of the caches of a server at work, engine and workers at the same step.

As with RCU, nobody is stopped: a request that the first look finds between the front end and the
engine is waited for, so that the last look finds its traces on both sides or not at all.
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

from ..protocol.caches import ProcessCaches
from ..protocol.compares import CompareRequest, Comparison, Look
from . import caches, engine, objects
from .gate import gate
from .imports import when_imported

UTILITY = "vllmops_look"
POLL_S = 0.02

ENCODER = msgspec.msgpack.Encoder()
# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
DECODER = msgspec.msgpack.Decoder(ProcessCaches)


def install() -> None:
    """Hook both ends of the way from front end to engine, once their modules are imported."""
    when_imported("vllm.v1.engine.async_llm", objects.guarded(hook_front))
    when_imported("vllm.v1.engine.core", objects.guarded(hook_engine))


def hook_front(module: ModuleType) -> None:
    """Make the front end tell when it has handed a request to the engine; idempotent."""
    add = module.AsyncLLM.add_request
    if hasattr(add, "__vllmops__"):
        return

    @functools.wraps(add)
    async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await add(self, *args, **kwargs)
        finally:
            gate.handed_over()

    add_request.__vllmops__ = True  # type: ignore[attr-defined]
    module.AsyncLLM.add_request = add_request


def hook_engine(module: ModuleType) -> None:
    """Give the engine a utility that looks; idempotent."""
    setattr(module.EngineCore, UTILITY, look)


def look(core: Any, deadline: float) -> list[bytes | str]:
    """The engine's caches, then its workers'; called by vLLM between two steps.

    Args:
        core: the EngineCore.
        deadline: seconds since the epoch; nobody waits for the answer any more after it.

    Returns:
        An encoded `ProcessCaches` each; in words who can't be read.
    """
    if time.time() > deadline:
        return ["the engine came to it too late, or its clock is ahead"]
    try:
        # Once: a second try would hold up the step, and the step's own thread is this one.
        answers: list[bytes | str] = [ENCODER.encode(caches.snapshot(keys=True, tries=1))]
        if not objects.every("worker"):
            # No timeout, nor a method that a worker might lack: the answers that the other
            # workers give to a call that has failed are taken for those to the next one.
            answers += core.model_executor.collective_rpc(asker())
    except Exception as error:
        return [f"the engine can't be read: {error!r}"]
    return answers


def asker() -> Callable[[Any], bytes | str]:
    """What a worker is asked; being local it is pickled by value, so it needs no agent there."""

    def ask(worker: Any) -> bytes | str:
        try:
            answer: bytes = import_module("vllmops.agent.compare").outputs(worker)
            return answer
        except Exception as error:
            return f"a worker can't be read: {error!r}"

    return ask


def outputs(worker: Any) -> bytes:
    """A worker's encoder outputs; called by vLLM between two of its calls."""
    cache = caches.worker_encoder(vars(worker).get("worker", worker))
    return ENCODER.encode(
        ProcessCaches(
            pid=os.getpid(), parent=os.getppid(), role="worker", caches=[cache] if cache else []
        )
    )


def compare(request: CompareRequest) -> Comparison:
    """``POST /compare``: two looks.

    Raises:
        RuntimeError: this process has no engine client.
    """
    client, loop = engine.front_end()
    deadline = time.time() + request.timeout_s
    patience = deadline - request.timeout_s / 2  # the rest is for the last look: a step may be long

    def both() -> Look:
        front = caches.snapshot(keys=True)
        rendering = len(gate.rendering)
        handed = client.output_processor.get_num_unfinished_requests()
        # In the order in which requests reach the engine: it answers after those sent before.
        asked = asyncio.run_coroutine_threadsafe(
            client.engine_core.call_utility_all_async(UTILITY, deadline), loop
        )
        try:
            answers = asked.result(max(deadline - time.time(), 0))
        except TimeoutError:
            # vLLM drops the answer to a call that was cancelled.
            asked.cancel()
            raise
        told = [each for engine in answers for each in engine]
        return Look(
            front=front,
            engines=[DECODER.decode(each) for each in told if isinstance(each, bytes)],
            handed=handed,
            rendering=rendering,
            problems=[each for each in told if isinstance(each, str)],
        )

    looks: list[Look] = []
    try:
        looks.append(both())
        began = time.monotonic()
        # Read after the look: who had changed the cache by then is among them, or has come on.
        pending = set(gate.rendering)
        time.sleep(request.apart_s)
        while (late := pending & set(gate.rendering)) and time.time() < patience:
            time.sleep(POLL_S)
        waited = time.monotonic() - began
        looks.append(both())
    except TimeoutError:
        return Comparison(looks=looks)
    after = caches.snapshot(keys=True)
    time.sleep(POLL_S)
    return Comparison(
        looks=looks, after=after, end=caches.snapshot(), settled=not late, waited_s=waited
    )
