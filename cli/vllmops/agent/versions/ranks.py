"""Reads vLLM's parallel configuration, in any version: ranks, sizes, and where the nodes meet."""

from __future__ import annotations

from typing import Any, Final

APART: Final = ("data_parallel_external_lb", "data_parallel_hybrid_lb")
BACKENDS: Final = ("distributed_executor_backend", "data_parallel_backend")


def count_ranks(parallel: Any) -> dict[str, int]:
    """How many ranks there are of each kind."""
    return {
        "DP": parallel.data_parallel_size,
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
    }


def find_process_ranks(parallel: Any, role: str, rank: int | None) -> dict[str, int]:
    """The ranks of an engine or a worker.

    Args:
        parallel: vLLM's ParallelConfig.
        role: of the process; other ones have no ranks.
        rank: a worker's, in its engine's world; None if unknown.
    """
    if role not in {"engine", "worker"}:
        return {}
    # An engine of a model without experts otherwise takes itself for 0.
    index = getattr(parallel, "data_parallel_index", None)
    ranks = {"DP": int(parallel.data_parallel_rank if index is None else index)}
    if rank is not None and role == "worker":
        # vLLM numbers the workers of an engine by stage, and within a stage by tensor rank.
        rank %= parallel.world_size
        stage = rank * parallel.pipeline_parallel_size // parallel.world_size
        ranks |= {"TP": rank % parallel.tensor_parallel_size, "PP": stage}
    return ranks


def list_rendezvous_addresses(parallel: Any) -> list[str]:
    """Where the nodes of a server meet; nothing for a server of one node, or of Ray."""
    addresses = []
    if (
        has_external_load_balancing(parallel)
        or parallel.data_parallel_size_local < parallel.data_parallel_size
    ):
        at = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
        addresses.append(f"data-parallel {at}")
    if getattr(parallel, "nnodes", 1) > 1:
        addresses.append(f"nodes {parallel.master_addr}:{parallel.master_port}")
    return addresses


def can_span_nodes(parallel: Any) -> bool:
    """Whether engines or workers may be on other nodes than the API server."""
    return (
        "ray" in {getattr(parallel, name, None) for name in BACKENDS}
        or getattr(parallel, "nnodes", 1) > 1
        or (
            not has_external_load_balancing(parallel)
            and parallel.data_parallel_size_local < parallel.data_parallel_size
        )
    )


def has_external_load_balancing(parallel: Any) -> bool:
    """Whether the engines of other nodes have API servers of their own: other servers."""
    return any(getattr(parallel, name, False) for name in APART)
