"""Code that makes a process with an agent take itself for one rank of a vLLM server."""

from __future__ import annotations

# What the agent reads of vLLM's own objects; a real vLLM with as many ranks needs as many cores.
CODE = """
import multiprocessing
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects

class Held:
    pass

held = Held()
held.rank = {rank}
held.vllm_config = SimpleNamespace(
    instance_id={instance!r},
    model_config=SimpleNamespace(model="m", is_encoder_decoder=False, multimodal_config=None),
    ec_transfer_config=None,
    parallel_config=SimpleNamespace(
        data_parallel_size={sizes}[0],
        tensor_parallel_size={sizes}[1],
        pipeline_parallel_size={sizes}[2],
        world_size={sizes}[1] * {sizes}[2],
        data_parallel_rank=0,
        data_parallel_index={dp},
        data_parallel_size_local={local},
        data_parallel_external_lb={external},
        data_parallel_hybrid_lb=False,
        data_parallel_master_ip="10.0.0.1",
        data_parallel_rpc_port={port},
        nnodes=1,
    ),
)
multiprocessing.current_process().name = {name!r}
objects.track_object({kind!r}, held)
"""
KINDS = {
    "api": ("MainProcess", "engine-client"),
    "engine": ("EngineCore", "scheduler"),
    "worker": ("VllmWorker", "worker"),
}


def make_rank_code(
    role: str,
    *,
    instance: str = "1",
    dp: int = 0,
    rank: int = 0,
    sizes: tuple[int, int, int] = (1, 1, 1),
    local: int | None = None,
    external: bool = False,
    port: int = 1,
) -> str:
    """The code, for a role.

    Args:
        role: ``api``, ``engine`` or ``worker``.
        instance: of vLLM's configuration.
        dp: data parallel rank.
        rank: of a worker in its engine's world.
        sizes: data, tensor and pipeline parallel size, as this process knows them.
        local: engines of this node, None for all.
        external: whether each engine has an API server of its own.
        port: where the nodes meet.
    """
    name, kind = KINDS[role]
    return CODE.format(
        instance=instance,
        dp=dp,
        rank=rank,
        sizes=sizes,
        local=sizes[0] if local is None else local,
        external=external,
        port=port,
        name=name,
        kind=kind,
    )
