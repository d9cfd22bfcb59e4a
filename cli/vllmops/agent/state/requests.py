"""The requests that this process knows; from the agent's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from ...model.owners import derive_owner
from ...model.requests import (
    PROMPT_TOKENS,
    EngineRequest,
    FrontRequest,
    ProcessRequests,
    PromptAnswer,
    PromptRequest,
    RequestState,
    WaitCause,
)
from ..hooks import vllm_objects
from ..hooks.request_gate import Arrival, gate
from ..identity import make_process_fields
from ..versions import requests as adapter
from . import engine
from .engine import read_or_none

# On the object through which vLLM hands a request's output over: the HTTP request that it is of.
ARRIVAL = "vllmops_arrival"
NEARLY_FULL = 0.95  # of the KV cache


def link_arrival(queue: Any, arrival: Arrival | None) -> None:
    """Note with which HTTP request a request of vLLM's came; nothing where that can't be kept."""
    if queue is not None and arrival is not None:
        with suppress(Exception):
            setattr(queue, ARRIVAL, arrival)


def observe_requests() -> ProcessRequests:
    """``GET /requests``: what this process knows of each request."""
    problems: list[str] = []

    def read_or_report(take: Callable[[Any], Any], holder: Any | None) -> Any:
        try:
            return None if holder is None else take(holder)
        except Exception as error:
            problems.append(f"the requests of {type(holder).__name__} can't be read: {error!r}")
            return None

    scheduler = vllm_objects.find_latest("scheduler")
    return ProcessRequests(
        pid=os.getpid(),
        **make_process_fields(),
        front=read_or_report(list_front_requests, vllm_objects.find_latest("engine-client")),
        engine=read_or_report(list_engine_requests, scheduler),
        worker=read_or_report(adapter.list_worker_request_ids, vllm_objects.find_latest("worker")),
        leaving=tuple(read_or_report(adapter.list_finished_ids, scheduler) or ()),
        still_s=engine.progress.observe_scheduler(time.monotonic())[3],
        resting=scheduler is not None and engine.is_paused_or_asleep(scheduler),
        problems=tuple(problems),
    )


def list_front_requests(client: Any) -> list[FrontRequest]:
    """The requests of an API server: those in the engine, and those on their way to it."""
    now, at = time.monotonic(), time.time()
    handed = [
        make_front_request(request, now, at) for request in adapter.list_front_end_requests(client)
    ]
    rendering = [
        FrontRequest(age_s=now - arrival.arrived_at, route=arrival.route, owner=find_owner(arrival))
        for arrival in gate.rendering_requests
        if arrival.has_known_age
    ]
    return handed + rendering


def make_front_request(request: Any, now: float, observed_at: float) -> FrontRequest:
    """A request that the engine has.

    Args:
        request: vLLM's RequestState.
        now: monotonic, in seconds.
        observed_at: seconds since the epoch.
    """
    arrival: Arrival | None = getattr(request.queue, ARRIVAL, None)
    stats = request.stats
    began = (
        now - arrival.arrived_at
        if arrival and arrival.has_known_age
        else stats and observed_at - stats.arrival_time
    )
    return FrontRequest(
        id=request.request_id,
        http_id=request.external_req_id or "",
        age_s=began,
        prompt_tokens=request.prompt_len,
        output_tokens=adapter.count_output_tokens(request),
        route=arrival.route if arrival else None,
        owner=find_owner(arrival) if arrival else None,
        lora=request.lora_name,
        background=arrival is not None and arrival not in gate.arrivals,
    )


def find_owner(arrival: Arrival) -> str:
    """A hash of the API key of a request; empty without one."""
    return derive_owner(arrival.api_key) if arrival.api_key else ""


def list_engine_requests(scheduler: Any) -> list[EngineRequest]:
    """The requests of a scheduler, in the order in which they came."""
    passed_over = read_or_none(lambda: adapter.list_deferred_object_ids(scheduler)) or set()
    blocks = read_or_none(lambda: adapter.count_blocks_by_request(scheduler))
    pins = read_or_none(lambda: adapter.count_pins_by_request(scheduler)) or {}
    now, at = time.monotonic(), time.time()
    queue, limit = find_bottleneck(scheduler)
    requests, states = [], dict[int, tuple[RequestState, str]]()
    for request in adapter.list_scheduler_requests(scheduler):
        # The engine's thread waits for this one: thousands of requests share a few states.
        found = states.get(id(request.status))
        if found is None:
            found = states[id(request.status)] = adapter.convert_request_status(request)
        state, reason = found
        cause = ""
        if state is RequestState.WAITING and id(request) in passed_over:
            state = RequestState.DEFERRED
        elif state is RequestState.WAITING:
            reason, cause = (reason, "") if reason else (limit, queue)
        name = request.request_id
        requests.append(
            EngineRequest(
                id=name,
                state=state,
                reason=reason,
                cause=cause,
                age_s=at - request.arrival_time,
                still_s=engine.progress.measure_stall_s(request, now)
                if state is RequestState.RUNNING
                else None,
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


def find_bottleneck(scheduler: Any) -> tuple[WaitCause | Literal[""], str]:
    """What a scheduler's queue waits for, as far as its own figures tell; and in words."""
    state = engine.observe_engine()
    if engine.is_paused_or_asleep(scheduler):
        return WaitCause.PAUSED, "the engine is paused or asleep"
    if state.max_running is not None and (state.running or 0) >= state.max_running:
        words = f"{state.running} requests run, as many as --max-num-seqs allows"
        return WaitCause.MAX_NUM_SEQS, words
    if (state.kv_cache_usage or 0) >= NEARLY_FULL:
        return WaitCause.KV_CACHE, f"{state.kv_cache_usage:.0%} of the KV cache is in use"
    return "", ""


def reveal_prompt(request: PromptRequest) -> PromptAnswer:
    """``POST /prompt``: what a client sent; only for who asks for it."""
    client = vllm_objects.find_latest("engine-client")
    front = client and adapter.find_front_end_request(client, request.id)
    if front is None:
        return PromptAnswer()
    tokens = tuple((front.prompt_token_ids or [])[:PROMPT_TOKENS])
    return PromptAnswer(text=front.prompt, tokens=tokens, is_known=True)
