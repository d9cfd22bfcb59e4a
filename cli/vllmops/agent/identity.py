"""The identity of this process, its role, and its place in its server."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from functools import cache
from typing import Any

import msgspec

from ..collect.machine.server_address import parse_serving_mode
from ..model import process_identity
from ..model.process_identity import ProcessIdentity
from ..model.ranks import ServerMembership, make_placement
from .hooks import vllm_objects
from .versions import ranks

# By the prefixes of vLLM's process names; any other process is the front end.
ROLES = {"EngineCore": "engine", "VllmWorker": "worker", "Worker": "worker"}
# A process of Ray's has no such name: what vLLM has built in it shows what it is.
BUILT = {"engine-client": "api", "scheduler": "engine"}
RAY = "ray._private.worker"
RAY_WORKER = 1  # WORKER_MODE there; a program that only uses Ray, as vLLM's engine, has another
# An engine numbers its configuration again when it has checked it: the first numbers are shared.
INSTANCES = 4
_instances: dict[str, None] = {}


def detect_role() -> str:
    """``api``, ``engine`` or ``worker``; ``launcher`` if there are engines and no API server."""
    name = multiprocessing.current_process().name
    if by_name := next((role for prefix, role in ROLES.items() if name.startswith(prefix)), None):
        return by_name
    if is_ray_worker():
        return next(
            (role for kind, role in BUILT.items() if vllm_objects.find_latest(kind)), "worker"
        )
    return "launcher" if parse_serving_mode(sys.argv).headless else "api"


def is_ray_worker() -> bool:
    """Whether Ray started this process, as an actor or for tasks."""
    ray = sys.modules.get(RAY)
    return getattr(getattr(ray, "global_worker", None), "mode", None) == RAY_WORKER


def read_own_identity() -> ProcessIdentity:
    """The identity of this process, also right after a fork."""
    return read_identity(os.getpid())


@cache
def read_identity(pid: int) -> ProcessIdentity:
    return process_identity.read_identity(pid)


def create_time() -> float:
    """When this process started, in seconds since the epoch by the current clock."""
    return time.time() - process_identity.compute_age_s(read_own_identity().start_ticks)


def make_process_fields() -> dict[str, Any]:
    """Role and place of this process, as fields of an answer."""
    return {"role": detect_role(), **find_standing().placement_fields()}


def find_standing() -> ServerMembership:
    """Whose this process is, its node and its ranks; only the node before vLLM has a config."""
    node = os.uname().nodename
    worker = vllm_objects.find_latest("worker")
    holders = (
        worker,
        vllm_objects.find_latest("scheduler"),
        vllm_objects.find_latest("engine-client"),
    )
    # Who is given a config has made none.
    configs: list[Any] = [getattr(holder, "vllm_config", None) for holder in holders]
    config: Any = next(filter(None, [*configs, *vllm_objects.list_objects("config")]), None)
    try:
        parallel, rank = config.parallel_config, getattr(worker, "rank", None)
        sizes = ranks.count_ranks(parallel)
        fields = msgspec.structs.asdict(
            make_placement(node, ranks.find_process_ranks(parallel, detect_role(), rank), sizes)
        )
        return ServerMembership(servers=list_server_ids(config), sizes=sizes, **fields)
    except Exception:  # there is none yet, or it has an unknown shape
        return ServerMembership(node=node)


def can_span_nodes() -> bool:
    """Whether the engines or the workers of this API server may be on other nodes."""
    config = getattr(vllm_objects.find_latest("engine-client"), "vllm_config", None)
    return config is not None and ranks.can_span_nodes(config.parallel_config)


def list_server_ids(config: Any) -> tuple[str, ...]:
    """The ids of the server with this config.

    vLLM numbers each configuration that it makes, and copies it to engines and workers, also by
    Ray. What is started on each node apart shares the address at which the nodes meet.
    """
    _instances.setdefault(f"instance {config.instance_id}")
    return *list(_instances)[:INSTANCES], *ranks.list_rendezvous_addresses(config.parallel_config)
