"""The requests that this process knows, and their end; from the agent's thread."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from ..protocol.requests import (
    PROMPT_TOKENS,
    Abort,
    Aborted,
    Cause,
    EngineRequest,
    FrontRequest,
    ProcessRequests,
    Prompt,
    Reveal,
    State,
)
from ..store.backend import owner_of
from . import engine, objects
from .adapters import requests as adapter
from .engine import attempt
from .gate import Arrival, gate
from .identity import here

# On the object through which vLLM hands a request's output over: the HTTP request that it is of.
ARRIVAL = "vllmops_arrival"
NEARLY_FULL = 0.95  # of the KV cache
ABORTED = "an operator ended this request"


def came_by(queue: Any, arrival: Arrival | None) -> None:
    """Note with which HTTP request a request of vLLM's came; nothing where that can't be kept."""
    if queue is not None and arrival is not None:
        with suppress(Exception):
            setattr(queue, ARRIVAL, arrival)


def snapshot() -> ProcessRequests:
    """``GET /requests``: what this process knows of each request."""
    problems: list[str] = []

    def read(take: Callable[[Any], Any], holder: Any | None) -> Any:
        try:
            return None if holder is None else take(holder)
        except Exception as error:
            problems.append(f"the requests of {type(holder).__name__} can't be read: {error!r}")
            return None

    scheduler = objects.latest("scheduler")
    return ProcessRequests(
        pid=os.getpid(),
        **here(),
        front=read(in_front, objects.latest("engine-client")),
        engine=read(in_engine, scheduler),
        worker=read(adapter.in_worker, objects.latest("worker")),
        leaving=tuple(read(adapter.leaving, scheduler) or ()),
        still_s=engine.progress.look(time.monotonic())[3],
        resting=scheduler is not None and engine.rests(scheduler),
        problems=tuple(problems),
    )


def in_front(client: Any) -> list[FrontRequest]:
    """The requests of an API server: those in the engine, and those on their way to it."""
    now, at = time.monotonic(), time.time()
    handed = [of_front(request, now, at) for request in adapter.fronts(client)]
    rendering = [
        FrontRequest(age_s=now - arrival.at, route=arrival.route, owner=owner(arrival))
        for arrival in gate.rendering
        if arrival.timed
    ]
    return handed + rendering


def of_front(request: Any, now: float, at: float) -> FrontRequest:
    """A request that the engine has.

    Args:
        request: vLLM's RequestState.
        now: monotonic, in seconds.
        at: seconds since the epoch.
    """
    arrival: Arrival | None = getattr(request.queue, ARRIVAL, None)
    stats = request.stats
    began = now - arrival.at if arrival and arrival.timed else stats and at - stats.arrival_time
    return FrontRequest(
        id=request.request_id,
        http_id=request.external_req_id or "",
        age_s=began,
        prompt_tokens=request.prompt_len,
        output_tokens=adapter.output_tokens(request),
        route=arrival.route if arrival else None,
        owner=owner(arrival) if arrival else None,
        lora=request.lora_name,
        background=arrival is not None and arrival not in gate.arrivals,
    )


def owner(arrival: Arrival) -> str:
    """A hash of the API key of a request; empty without one."""
    return owner_of(arrival.key) if arrival.key else ""


def in_engine(scheduler: Any) -> list[EngineRequest]:
    """The requests of a scheduler, in the order in which they came."""
    passed_over = attempt(lambda: adapter.deferred(scheduler)) or set()
    blocks = attempt(lambda: adapter.blocks(scheduler))
    pins = attempt(lambda: adapter.pins(scheduler)) or {}
    now, at = time.monotonic(), time.time()
    queue, limit = bottleneck(scheduler)
    requests, states = [], dict[int, tuple[State, str]]()
    for request in adapter.scheduled(scheduler):
        # The engine's thread waits for this one: thousands of requests share a few states.
        found = states.get(id(request.status))
        if found is None:
            found = states[id(request.status)] = adapter.state(request)
        state, reason = found
        cause = ""
        if state is State.WAITING and id(request) in passed_over:
            state = State.DEFERRED
        elif state is State.WAITING:
            reason, cause = (reason, "") if reason else (limit, queue)
        name = request.request_id
        requests.append(
            EngineRequest(
                id=name,
                state=state,
                reason=reason,
                cause=cause,
                age_s=at - request.arrival_time,
                still_s=engine.progress.still_s(request, now) if state is State.RUNNING else None,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                kv_blocks=None if blocks is None else blocks.get(name, 0),
                cache_pins=pins.get(name, 0),
                preemptions=request.num_preemptions,
                priority=request.priority,
                lora=request.lora_request and request.lora_request.lora_name,
            )
        )
    return requests


def bottleneck(scheduler: Any) -> tuple[Cause | Literal[""], str]:
    """What a scheduler's queue waits for, as far as its own figures tell; and in words."""
    state = engine.state()
    if engine.rests(scheduler):
        return Cause.PAUSED, "the engine is paused or asleep"
    if state.max_running is not None and (state.running or 0) >= state.max_running:
        words = f"{state.running} requests run, as many as --max-num-seqs allows"
        return Cause.MAX_NUM_SEQS, words
    if (state.kv_cache_usage or 0) >= NEARLY_FULL:
        return Cause.KV_CACHE, f"{state.kv_cache_usage:.0%} of the KV cache is in use"
    return "", ""


def prompt(request: Reveal) -> Prompt:
    """``POST /prompt``: what a client sent; only for who asks for it."""
    client = objects.latest("engine-client")
    front = client and adapter.front(client, request.id)
    if front is None:
        return Prompt()
    tokens = tuple((front.prompt_token_ids or [])[:PROMPT_TOKENS])
    return Prompt(text=front.prompt, tokens=tokens, known=True)


def abort(request: Abort) -> Aborted:
    """``POST /abort``: end requests; of an API server with an error for the client."""
    try:
        client, loop = engine.front_end()
    except RuntimeError:
        return abort_in_engine(request)
    known = [name for name in request.ids if adapter.front(client, name) is not None]
    if not known:
        return Aborted(pid=os.getpid(), ids=[])
    why = request.why or ABORTED
    done = asyncio.run_coroutine_threadsafe(adapter.end(client, known, why), loop)
    try:
        done.result(request.timeout_s)
    except TimeoutError:
        return Aborted(
            pid=os.getpid(), ids=known, pending=True
        )  # it stays in the loop, and runs later
    return Aborted(pid=os.getpid(), ids=known)


def abort_in_engine(request: Abort) -> Aborted:
    """End requests in this process's engine, as if their API server had asked for it."""
    scheduler, core = objects.latest("scheduler"), objects.latest("engine-core")
    if scheduler is None or core is None:
        return Aborted(pid=os.getpid(), ids=[])
    known = [found for name in request.ids if (found := scheduler.requests.get(name))]
    if known:
        adapter.end_in_engine(core, known)
    return Aborted(pid=os.getpid(), ids=[found.request_id for found in known])
