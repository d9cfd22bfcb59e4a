"""Asks vLLM's engine and its client, in any version."""

from __future__ import annotations

import asyncio
from typing import Any


def count_requests(scheduler: Any) -> tuple[int, int]:
    """Requests running and waiting."""
    if count := getattr(scheduler, "get_request_counts", None):
        running, waiting = count()
        return running, waiting
    return len(scheduler.running), len(scheduler.waiting)


def count_requests_by_state(scheduler: Any) -> tuple[int, int, int]:
    """Requests running, waiting for a place, and waiting for anything else, as a transfer."""
    running, waiting = count_requests(scheduler)
    deferred = len(get_deferred_queue(scheduler))
    return running, waiting - deferred if waiting > deferred else 0, deferred


def get_deferred_queue(scheduler: Any) -> Any:
    """The requests that the scheduler passes over, in a container of its own."""
    # Since 0.31, and up to 0.30; older ones have one queue.
    held = getattr(scheduler, "deferred_waiting", None)
    return getattr(scheduler, "skipped_waiting", ()) if held is None else held


def kv_cache_usage(scheduler: Any) -> float | None:
    """The share of the KV cache's blocks in use, 0 to 1; None without one."""
    kv_cache = getattr(scheduler, "kv_cache_manager", None)
    return None if kv_cache is None else float(kv_cache.usage)


def has_dropped_weights(worker: Any) -> bool:
    """Whether a worker sleeps at vLLM's level 2: its weights are gone until somebody loads them."""
    return bool(getattr(vars(worker).get("worker", worker), "_sleep_saved_buffers", None))


def count_unfinished_requests(client: Any) -> int:
    """Requests that a client has handed to its engines and that are not finished."""
    return int(client.output_processor.get_num_unfinished_requests())


def find_oldest_request_id(client: Any) -> str:
    """The id of the oldest of them; empty without one."""
    return str(next(iter(client.output_processor.request_states), ""))


async def call_engine_utility(client: Any, method: str, *args: Any) -> list[Any]:
    """What a utility method of each of a client's engines answers."""
    core = client.engine_core
    if ask_all := getattr(core, "call_utility_all_async", None):  # since 0.32
        return list(await ask_all(method, *args))
    return await asyncio.gather(
        *(core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines)
    )


async def enable_router_handover(client: Any) -> None:
    """Have the socket to a client's engines let a new connection take over an old one's name."""
    import zmq  # noqa: PLC0415 - imported by vLLM long ago

    client.engine_core.input_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def is_text_only(model: Any) -> bool:
    """Whether all limits of a multimodal model are 0, as vLLM found.

    Read from what vLLM keeps of that, nothing before 0.27: computing it could build a processor.
    """
    if supported := getattr(model, "_supports_multimodal_inputs_cache", None):  # since 0.31
        return not any(supported.values())
    return getattr(model, "_supports_multimodal_inputs_cached", None) is False
