"""Reads what vLLM's scheduler decides by: its queue, and what a request needs; in any version."""

from __future__ import annotations

import inspect
from typing import Any

from . import requests

# What has not been computed yet and only waits for its turn.
QUEUED = frozenset({"WAITING", "PREEMPTED"})
NOBODY = "vllmops: nobody's"  # the id of no request


def list_waiting_requests(scheduler: Any) -> list[Any]:
    """The requests that only wait for their turn, in the order in which they are tried.

    First come those that hold KV blocks; before vLLM 0.31, those that were passed over.
    """
    found, ranked = [], False
    for name in ("kv_holding_waiting", "skipped_waiting", "waiting"):
        queue = getattr(scheduler, name, ())
        heap = getattr(queue, "_heap", None)  # of the priority queue
        # One C call: the engine's thread goes on meanwhile.
        found += list(queue) if heap is None else sorted(heap)
        ranked |= name == "skipped_waiting" and heap is not None
    found = sorted(found) if ranked else found
    return [one for one in found if one.status.name in QUEUED]


def list_undeferred_requests(scheduler: Any) -> list[Any]:
    """Those of them that the scheduler does not pass over: the first one is in the way of others.

    One that has tokens already was passed over while they came.
    """
    passed = requests.list_deferred_object_ids(scheduler)
    return [
        one
        for one in list_waiting_requests(scheduler)
        if id(one) not in passed or one.num_computed_tokens
    ]


def count_needed_blocks(scheduler: Any, request: Any, tokens: int | None = None) -> int:
    """The blocks of the KV cache that a request needs besides what it holds, by vLLM's own count.

    Of Mamba layers vLLM's count makes an entry for a request that holds none yet. So such a one is
    counted by a name that no request has, and its entry goes.

    Args:
        scheduler: of the request.
        request: that waits.
        tokens: for so many of its tokens; for all of them where None.

    Raises:
        TypeError: this version counts in an unknown way.
    """
    coordinator = scheduler.kv_cache_manager.coordinator
    tokens = min(tokens or request.num_tokens, scheduler.max_model_len)
    held = [getattr(one, "req_to_blocks", {}) for one in coordinator.single_type_managers]
    holds = any(request.request_id in blocks for blocks in held)
    known = {
        "request_id": request.request_id if holds else NOBODY,
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
    try:
        return int(count(**{name: value for name, value in known.items() if name in takes}))
    finally:
        for blocks in held:
            blocks.pop(NOBODY, None)


def has_one_block_pool(scheduler: Any) -> bool:
    """Whether the blocks that a request needs come from one pool, which tells if it has them.

    A manager with a pool of its own, such as the host's with HiSparse, says that more is needed
    than there is while that pool has no room.
    """
    cache = scheduler.kv_cache_manager
    return all(one.block_pool is cache.block_pool for one in cache.coordinator.single_type_managers)


def count_usable_blocks(scheduler: Any) -> int:
    """The blocks of the KV cache that requests can have: one stands for no block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def count_blocks_to_schedule(scheduler: Any, request: Any) -> int:
    """The blocks that must be free for a request to be scheduled: for all of it, or a part."""
    if getattr(scheduler, "scheduler_reserve_full_isl", False):
        return count_needed_blocks(scheduler, request)
    part = request.num_computed_tokens + scheduler.max_num_scheduled_tokens
    return count_needed_blocks(scheduler, request, min(request.num_tokens, part))


def count_free_blocks(scheduler: Any) -> int:
    """The blocks of the KV cache that no request holds."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def count_slots_by_entry(manager: Any, request: Any) -> dict[str, int]:
    """What a request holds of the encoder cache: slots by the name of the entry."""
    return {
        request.mm_features[number].identifier: int(request.get_num_encoder_embeds(number))
        for number in list(manager.get_cached_input_ids(request))
    }


def find_unencoded_input(manager: Any, request: Any) -> tuple[str, int] | None:
    """The first input of a request that is to be encoded and is not: its name, its slots."""
    for number, feature in enumerate(request.mm_features):
        place = feature.mm_position
        if place.offset + place.length <= request.num_computed_tokens:
            continue
        if feature.identifier not in manager.cached:
            return feature.identifier, int(request.get_num_encoder_embeds(number))
    return None


def release_encoder_slots(manager: Any, request: Any) -> None:
    """Release what a request holds of the encoder cache; it asks again when its turn comes."""
    for number in list(manager.get_cached_input_ids(request)):
        manager.free_encoder_input(request, number)
