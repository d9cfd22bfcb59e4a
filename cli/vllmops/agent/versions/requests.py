"""Reads the requests of vLLM's front end, schedulers and workers, and ends them, in any version.

Everything is read from copies that are made in one C call: other threads go on meanwhile.
"""

from __future__ import annotations

import sys
from collections import Counter
from http import HTTPStatus
from typing import Any, Final

from ...model.requests import RequestState
from . import module_locations
from .engine import get_deferred_queue

# By the name of vLLM's status; a name that is not here counts as waiting, with the name as reason.
STATES: Final = {
    "WAITING": RequestState.WAITING,
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": RequestState.WAITING_FOR_GRAMMAR,
    "WAITING_FOR_REMOTE_KVS": RequestState.WAITING_FOR_KV,
    "WAITING_FOR_STREAMING_REQ": RequestState.WAITING_FOR_INPUT,
    "RUNNING": RequestState.RUNNING,
    "PREEMPTED": RequestState.PREEMPTED,
}


def convert_request_status(request: Any) -> tuple[RequestState, str]:
    """How far a scheduler's request is, and vLLM's own name where that is none of `STATES`."""
    if request.is_finished():
        return RequestState.FINISHED, ""
    name = request.status.name
    known = STATES.get(name)
    return (known, "") if known else (RequestState.WAITING, name.lower())


def list_scheduler_requests(scheduler: Any) -> list[Any]:
    """The requests that a scheduler knows."""
    return list(scheduler.requests.values())


def list_deferred_object_ids(scheduler: Any) -> set[int]:
    """The requests that the scheduler passes over, by identity."""
    return set(map(id, list(get_deferred_queue(scheduler))))


def count_blocks_by_request(scheduler: Any) -> dict[str, int]:
    """How many blocks of the KV cache each request holds, over all groups of layers."""
    count: Counter[str] = Counter()
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        held = manager.req_to_blocks
        # Two passes of C code; a request that comes or goes between them is left out.
        for name, of_request in zip(list(held), list(map(len, held.values())), strict=False):
            count[name] += of_request
    return count


def count_pins_by_request(scheduler: Any) -> dict[str, int]:
    """How many entries of the encoder cache each request holds."""
    cached = getattr(scheduler.encoder_cache_manager, "cached", {})
    holders = list(map(tuple, list(cached.values())))
    return Counter(name for names in holders for name in names)


def list_finished_ids(scheduler: Any) -> list[str]:
    """The ids that the workers forget with the next step."""
    return list(scheduler.finished_req_ids)


def list_worker_request_ids(worker: Any) -> list[str] | None:
    """The ids that a worker's model runner keeps a state for; None without a runner."""
    runner = vars(worker).get("model_runner")
    if (held := getattr(runner, "requests", None)) is not None:
        return list(held)
    states = getattr(runner, "req_states", None)  # of the V2 runner
    return None if states is None else list(states.req_id_to_index)


def list_front_end_requests(client: Any) -> list[Any]:
    """The requests that a front end waits for."""
    return list(client.output_processor.request_states.values())


def find_front_end_request(client: Any, name: str) -> Any | None:
    """A request that a front end waits for; None if it knows none of that id."""
    return client.output_processor.request_states.get(name)


def count_output_tokens(request: Any) -> int | None:
    """The tokens that a front end's request has got; None if unknown."""
    if (detokenizer := request.detokenizer) is not None:
        return len(detokenizer.output_token_ids)
    stats = request.stats
    return None if stats is None else int(stats.num_generation_tokens)


async def abort_with_error(client: Any, names: list[str], reason: str) -> None:
    """End requests at the front end and in the engine; their clients get an error.

    Args:
        client: vLLM's AsyncLLM.
        names: ids of requests.
        reason: what the error says.
    """
    for name in names:
        request = find_front_end_request(client, name)
        if request is not None and request.queue is not None:
            request.queue.put(make_permanent_error(reason))
    await client.abort(names, internal=True)


def make_validation_error(reason: str) -> Exception:
    """What makes vLLM answer a client with status 400."""
    return list_vllm_exceptions().get("VLLMValidationError", ValueError)(reason)  # type: ignore[no-any-return]


def make_permanent_error(reason: str) -> Exception:
    """What makes vLLM answer a client with an error that the client does not try again."""
    known = list_vllm_exceptions()
    if graceful := known.get("GracefulHTTPError"):
        made: Exception = graceful(reason, HTTPStatus.GONE)
        return made
    # Up to 0.28; up to 0.26, vLLM takes any ValueError for a client's fault.
    return known.get("VLLMClientError", ValueError)(reason)  # type: ignore[no-any-return]


def list_vllm_exceptions() -> dict[str, Any]:
    """What vLLM's module of exceptions has, by name."""
    return dict(
        vars(
            sys.modules.get(module_locations.find_existing_module("vllm.exceptions") or "", object)
        )
    )


def abort_engine_requests(core: Any, requests: list[Any]) -> None:
    """End requests in an engine, between two steps, and tell the front end that they are over.

    The engine's queues get what its input thread and its own end would put there. A front end that
    does not know a request ignores its end.

    Args:
        core: vLLM's EngineCoreProc.
        requests: its scheduler's.
    """
    from vllm.v1 import engine  # noqa: PLC0415 - imported by vLLM long ago

    names = [request.request_id for request in requests]
    core.aborts_queue.put_nowait(names)
    core.input_queue.put_nowait((engine.EngineCoreRequestType.ABORT, names))
    for request in requests:
        over = engine.EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=engine.FinishReason.ABORT,
        )
        core.output_queue.put_nowait(
            (request.client_index, engine.EngineCoreOutputs(outputs=[over]))
        )
