"""Reads the memory figures that only the process itself knows, at a constant cost.

Lengths and counters only: no pass over vLLM's containers or Python's heap.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

from ...model.memory import AgentMemory, CacheUsage, GcGeneration, RequestCounts, StoreCounts
from ..hooks import vllm_objects
from ..identity import create_time
from . import caches, engine

# Up to this many requests are checked one by one, some 0.25 µs each. Above, a subtraction is close
# enough; it counts requests that have not reached the scheduler yet as finished.
CHECKED = 2000


def observe_memory() -> AgentMemory:
    """The answer to ``GET /memory``; what can't be read is listed in ``problems``."""
    problems = list(vllm_objects.problems)

    def read_or_report(subject: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:
            problems.append(f"{subject} can't be read: {error!r}")
            return None

    held: list[CacheUsage] = []
    for holder, read in list_size_readers():
        size = read_or_report(f"the size of {type(holder).__name__}", lambda: read(holder))  # noqa: B023
        held += [size] if size else []
    return AgentMemory(
        requests=read_or_report("the number of live requests", count_live_requests),
        caches=tuple(held),
        gc=list_gc_generations(),
        store=read_or_report("the size of the Responses store", count_store_entries),
        unfinished_requests=engine.observe_engine().unfinished_requests,
        in_flight=engine.observe_traffic().in_flight,
        problems=tuple(problems),
    )


def count_live_requests() -> RequestCounts | None:
    """The live ``Request`` objects; None without a scheduler, or where the agent does not count."""
    scheduler, since = vllm_objects.find_latest("scheduler"), vllm_objects.hooked.get("request")
    if scheduler is None or since is None:
        return None
    alive = vllm_objects.count_objects("request")
    known = scheduler.requests
    if alive > CHECKED:
        finished = max(alive - len(known), 0)
    else:
        finished = sum(
            is_released(request, known) for request in vllm_objects.list_objects("request")
        )
    late_s = round(since - create_time(), 1)
    return RequestCounts(
        alive_requests=alive, finished_alive=finished, known_requests=len(known), late_s=late_s
    )


def is_released(request: Any, known_requests: dict[str, Any]) -> bool:
    """Whether a request is finished and the scheduler has released it."""
    own = vars(request)  # without a status while it is being built
    return (
        "status" in own
        and request.is_finished()
        and known_requests.get(own["request_id"]) is not request
    )


def list_size_readers() -> Iterator[tuple[Any, Callable[[Any], CacheUsage | None]]]:
    """Each object, and the function that reads it."""
    for cache in vllm_objects.list_objects("mm-cache"):
        yield cache, measure_multimodal_cache
    for scheduler in vllm_objects.list_objects("scheduler"):
        yield scheduler, measure_encoder_cache
    for worker in vllm_objects.list_objects("worker"):
        yield worker, measure_encoder_outputs


def measure_multimodal_cache(holder: Any) -> CacheUsage | None:
    """A multimodal cache of any kind; None while it is being built."""
    name = type(holder).__name__
    own = vars(holder)
    if "_cache" in own:
        cache, kind = own["_cache"], caches.find_cache_kind(holder)
        return CacheUsage(
            kind=kind,
            name=name,
            entries=len(cache._Cache__data),
            bytes=int(cache._Cache__currsize),
            # The front end's mirror holds only the sizes.
            is_own_memory=kind != "mm-lru" or caches.find_cache_side(holder) == "P1",
        )
    if "_shm_cache" in own:
        storage = holder._shm_cache
        ring = storage.ring_buffer
        return CacheUsage(
            kind="mm-shm",
            name=name,
            entries=len(storage.key_index) if storage.is_writer else None,
            bytes=ring.data_buffer_end - ring.data_buffer_start if storage.is_writer else None,
        )
    return None


def measure_encoder_cache(scheduler: Any) -> CacheUsage | None:
    """A scheduler's encoder cache; None while it is being built."""
    manager = getattr(scheduler, "encoder_cache_manager", None)
    if manager is None:
        return None
    own = vars(manager)
    return CacheUsage(
        kind="encoder",
        name=type(manager).__name__,
        entries=len(own["cached"]) if "cached" in own else None,
        slots=own["cache_size"] - own["num_free_slots"],
    )


def measure_encoder_outputs(worker: Any) -> CacheUsage | None:
    """A worker's encoder outputs; their number is bounded by the scheduler's slots."""
    cache = caches.observe_encoder_outputs(worker)
    if cache is None:
        return None
    return CacheUsage(
        kind="encoder-outputs",
        name=cache.name,
        entries=len(cache.keys),
        bytes=cache.bytes,
        is_own_memory=cache.device == "cpu",
    )


def list_gc_generations() -> tuple[GcGeneration, ...]:
    """The figures of the garbage collector."""
    return tuple(
        GcGeneration(
            count=count, collections=stats["collections"], collected_objects=stats["collected"]
        )
        for count, stats in zip(gc.get_count(), gc.get_stats(), strict=True)
    )


def count_store_entries() -> StoreCounts | None:
    """The entries of the Responses store; None if there is none."""
    serving = vllm_objects.find_latest("responses")
    if serving is None:
        return None
    own = vars(serving)
    if "event_store" not in own:
        return None  # being built
    return StoreCounts(
        responses=len(own["response_store"]),
        messages=len(own["msg_store"]),
        events=len(own["event_store"]),
    )
