"""The identity of this process, its role, and its place in its server."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from functools import cache
from typing import Any

import msgspec

from ..host.shape import shape
from ..protocol import identity
from ..protocol.identity import Identity
from ..protocol.place import Standing, place
from . import objects
from .adapters import ranks

# By the prefixes of vLLM's process names; any other process is the front end.
ROLES = {"EngineCore": "engine", "VllmWorker": "worker", "Worker": "worker"}
# A process of Ray's has no such name: what vLLM has built in it shows what it is.
BUILT = {"engine-client": "api", "scheduler": "engine"}
RAY = "ray._private.worker"
RAY_WORKER = 1  # WORKER_MODE there; a program that only uses Ray, as vLLM's engine, has another
# An engine numbers its configuration again when it has checked it: the first numbers are shared.
INSTANCES = 4
_instances: dict[str, None] = {}


def role() -> str:
    """``api``, ``engine`` or ``worker``; ``launcher`` if there are engines and no API server."""
    name = multiprocessing.current_process().name
    if by_name := next((role for prefix, role in ROLES.items() if name.startswith(prefix)), None):
        return by_name
    if below_ray():
        return next((role for kind, role in BUILT.items() if objects.latest(kind)), "worker")
    return "launcher" if shape(sys.argv).headless else "api"


def below_ray() -> bool:
    """Whether Ray started this process, as an actor or for tasks."""
    ray = sys.modules.get(RAY)
    return getattr(getattr(ray, "global_worker", None), "mode", None) == RAY_WORKER


def own() -> Identity:
    """The identity of this process, also right after a fork."""
    return known(os.getpid())


@cache
def known(pid: int) -> Identity:
    return identity.of(pid)


def create_time() -> float:
    """When this process started, in seconds since the epoch by the current clock."""
    return time.time() - identity.age_s(own().start_ticks)


def here() -> dict[str, Any]:
    """Role and place of this process, as fields of an answer."""
    return {"role": role(), **standing().where()}


def standing() -> Standing:
    """Whose this process is, its node and its ranks; only the node before vLLM has a config."""
    node = os.uname().nodename
    worker = objects.latest("worker")
    holders = (worker, objects.latest("scheduler"), objects.latest("engine-client"))
    # Who is given a config has made none.
    configs: list[Any] = [getattr(holder, "vllm_config", None) for holder in holders]
    config: Any = next(filter(None, [*configs, *objects.every("config")]), None)
    try:
        parallel, rank = config.parallel_config, getattr(worker, "rank", None)
        sizes = ranks.sizes(parallel)
        fields = msgspec.structs.asdict(place(node, ranks.own(parallel, role(), rank), sizes))
        return Standing(servers=servers(config), sizes=sizes, **fields)
    except Exception:  # there is none yet, or it has an unknown shape
        return Standing(node=node)


def spread() -> bool:
    """Whether the engines or the workers of this API server may be on other nodes."""
    config = getattr(objects.latest("engine-client"), "vllm_config", None)
    return config is not None and ranks.spread(config.parallel_config)


def servers(config: Any) -> tuple[str, ...]:
    """The ids of the server with this config.

    vLLM numbers each configuration that it makes, and copies it to engines and workers, also by
    Ray. What is started on each node apart shares the address at which the nodes meet.
    """
    _instances.setdefault(f"instance {config.instance_id}")
    return *list(_instances)[:INSTANCES], *ranks.meetings(config.parallel_config)
