"""Reads which requests wait for KV blocks from elsewhere, and fails their loads; in any version."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any, Final

from . import module_locations

STATE: Final = "vllm.distributed.kv_transfer.kv_transfer_state"
OUTPUTS: Final = "vllm.v1.outputs"
WAITS: Final = "WAITING_FOR_REMOTE_KVS"
# Those of vLLM's connectors whose worker keeps each load by its request's id until it has reported
# it. What the part beside the scheduler keeps of a request outlasts the load in some of them.
BY_REQUEST: Final = frozenset(
    {"NixlConnector", "NixlPullConnector", "OffloadingConnector", "LMCacheMPConnector"}
)
# Those that load from the address in a request. Others load from a memory or disk of their own,
# say, and a router may have written an address there all the same.
BY_ADDRESS: Final = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
PORT: Final = re.compile(r"[0-9]{1,5}")


def is_waiting_for_load(scheduler: Any, request: Any) -> bool:
    """Whether a scheduler waits for the end of a request's load."""
    told: set[str] = scheduler.finished_recving_kv_req_ids
    return request.status.name == WAITS and request.request_id not in told


def list_loading_requests(scheduler: Any) -> list[Any]:
    """The requests for the end of whose load a scheduler waits."""
    if getattr(scheduler, "connector", None) is None:
        return []
    return [one for one in list(scheduler.requests.values()) if is_waiting_for_load(scheduler, one)]


def get_max_concurrent_steps(scheduler: Any) -> int:
    """How many steps may be on their way at once."""
    return int(getattr(scheduler.vllm_config, "max_concurrent_batches", 1))


def find_failure_policy(scheduler: Any) -> str:
    """What vLLM does with a load that failed: ``kv_load_failure_policy``."""
    return "recompute" if scheduler.recompute_kv_load_failures else "fail"


def find_sender_address(scheduler: Any, request: Any) -> tuple[str, int] | None:
    """The host and port from which a request's blocks come; None if that is not known.

    A client may have written anything there.
    """
    loads = scheduler.connector
    if parts := getattr(loads, "_connectors", None):  # of a MultiConnector; one of them loads it
        chosen = getattr(loads, "_requests_to_connector", {}).get(request.request_id)
        loads = None if chosen is None else parts[chosen]
    kinds = {kind.__name__ for kind in type(loads).__mro__}
    named = request.kv_transfer_params
    if kinds.isdisjoint(BY_ADDRESS) or not isinstance(named, dict):
        return None
    host, port = named.get("remote_host"), str(named.get("remote_port"))
    if not isinstance(host, str) or not host or not PORT.fullmatch(port):
        return None
    return (host, int(port)) if int(port) < 1 << 16 else None


def is_keyed_by_request(connector: Any) -> bool:
    """Whether the workers' part of a connector keeps each load by its request's id."""
    parts = getattr(connector, "_connectors", None) or [connector]  # of a MultiConnector
    return all(
        type(part).__name__ in BY_REQUEST
        and type(part).__module__.startswith(module_locations.ROOT)
        for part in parts
    )


def find_worker_connector() -> Any | None:
    """The workers' part of this process's connector; None without one."""
    module = sys.modules.get(module_locations.find_existing_module(STATE) or "")
    return getattr(module, "_KV_CONNECTOR_AGENT", None)


def add_failed_loads(scheduler: Any, output: Any, names: set[str]) -> Any:
    """A step's output, with the loads of some requests reported as over and failed as well.

    Args:
        scheduler: that is about to read it.
        output: vLLM's ModelRunnerOutput; it is not changed.
        names: ids of requests; those whose load is over by now are left out.

    Raises:
        AttributeError, LookupError: this version keeps them in another way.
    """
    known = output.kv_connector_output
    over = set((known and known.finished_recving) or ())
    requests = [scheduler.requests[name] for name in names - over if name in scheduler.requests]
    lost = [request for request in requests if is_waiting_for_load(scheduler, request)]
    if not lost:
        return output
    ids = {request.request_id for request in lost}
    kind = vars(sys.modules[module_locations.find_existing_module(OUTPUTS) or OUTPUTS])[
        "KVConnectorOutput"
    ]
    made = kind() if known is None else copy.copy(known)
    made.finished_recving = over | ids
    if hasattr(made, "failed_recving"):
        made.failed_recving = made.failed_recving | ids
    else:  # up to 0.31
        blocks = {block for request in lost for block in list_unfilled_blocks(scheduler, request)}
        made.invalid_block_ids = made.invalid_block_ids | blocks
    output = copy.copy(output)
    output.kv_connector_output = made
    return output


def list_unfilled_blocks(scheduler: Any, request: Any) -> list[int]:
    """The blocks that a request's load was to fill: vLLM gives them a hash only after it.

    Raises:
        LookupError: there is more than one group of them, or none.
    """
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    held = manager.req_to_blocks[request.request_id]
    blocks = [block.block_id for block in held if block.block_hash is None]
    if not blocks:
        raise LookupError(f"no block of {request.request_id} waits to be filled")
    return blocks
