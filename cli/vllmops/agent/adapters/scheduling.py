"""Reads what vLLM's scheduler decides by: its queue, and what a request needs; in any version."""

from __future__ import annotations

import inspect
from typing import Any

from . import requests

# What has not been computed yet and only waits for its turn.
QUEUED = frozenset({"WAITING", "PREEMPTED"})


def queued(scheduler: Any) -> list[Any]:
    """The requests that only wait for their turn, in the order in which they are tried."""
    waiting = scheduler.waiting
    heap = getattr(waiting, "_heap", None)  # of the priority queue
    # One C call: the engine's thread goes on meanwhile.
    ordered = list(waiting) if heap is None else sorted(heap)
    passed = requests.deferred(scheduler)
    return [one for one in ordered if one.status.name in QUEUED and id(one) not in passed]


def blocks_needed(scheduler: Any, request: Any) -> int:
    """The blocks of the KV cache that a request needs to begin, by vLLM's own count.

    Raises:
        TypeError: this version counts in an unknown way.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    tokens = min(request.num_tokens, scheduler.max_model_len)
    known = {
        "request_id": request.request_id,
        "num_tokens": tokens,
        "new_computed_blocks": tuple([] for _ in coordinator.single_type_managers),
        "num_encoder_tokens": 0,
        "total_computed_tokens": 0,
        "num_local_computed_tokens": 0,
        "num_tokens_main_model": tokens,
        "apply_admission_cap": True,
        "prefill_end": max(request.num_prompt_tokens, request.num_tokens - 1),
    }
    count = coordinator.get_num_blocks_to_allocate
    takes = inspect.signature(count).parameters
    return int(count(**{name: value for name, value in known.items() if name in takes}))


def blocks_usable(scheduler: Any) -> int:
    """The blocks of the KV cache that requests can have: one stands for no block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def held(manager: Any, request: Any) -> dict[str, int]:
    """What a request holds of the encoder cache: slots by the name of the entry."""
    return {
        request.mm_features[number].identifier: int(request.get_num_encoder_embeds(number))
        for number in list(manager.get_cached_input_ids(request))
    }


def next_input(manager: Any, request: Any) -> tuple[str, int] | None:
    """The first input of a request that is to be encoded and is not: its name, its slots."""
    for number, feature in enumerate(request.mm_features):
        place = feature.mm_position
        if place.offset + place.length <= request.num_computed_tokens:
            continue
        if feature.identifier not in manager.cached:
            return feature.identifier, int(request.get_num_encoder_embeds(number))
    return None


def release(manager: Any, request: Any) -> None:
    """Release what a request holds of the encoder cache; it asks again when its turn comes."""
    for number in list(manager.get_cached_input_ids(request)):
        manager.free_encoder_input(request, number)
