"""The metrics of a server's state: their names, units, labels, and how processes are added up.

The labels of a process are its role, its node and its ranks. Several API servers have the same
ones, so each family says what becomes of two values with the same labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import add
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

PREFIX: Final = "vllmops:"
PLACE: Final = ("role", "node", "dp_rank", "tp_rank", "pp_rank")
CACHE: Final = (*PLACE, "kind", "side")
GPU: Final = ("node", "gpu")


class MetricFamily(NamedTuple):
    """One metric.

    Args:
        help: what it counts.
        labels: their names.
        fold: makes one value of two that have the same labels.
    """

    help: str
    labels: tuple[str, ...] = PLACE
    fold: Callable[[float, float], float] = add


class MetricSample(NamedTuple):
    """One value of a metric; the name is without the prefix, a label without a value is empty."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


# A name that ends in "_total" is a counter's, any other a gauge's.
FAMILIES: Final[Mapping[str, MetricFamily]] = {
    "stalled": MetricFamily(
        "1 if the server makes no progress with pending requests; by how sure that is",
        ("certainty",),
        max,
    ),
    "no_progress_seconds": MetricFamily(
        "Seconds for which an engine with pending requests has computed no token; 0 without any",
        fold=max,
    ),
    "event_loop_blocked_seconds": MetricFamily(
        "Seconds for which an API server's event loop has run nothing", fold=max
    ),
    "rendering_seconds": MetricFamily(
        "Age of the oldest HTTP request that has not reached the engine", fold=max
    ),
    "processes": MetricFamily("Processes of the server that are alive", ("role", "node")),
    "agents": MetricFamily("Processes whose agent has a heartbeat that is fresh", ("role", "node")),
    "heartbeat_age_seconds": MetricFamily(
        "Seconds since the last heartbeat of the agent", fold=max
    ),
    "agent_problems": MetricFamily("What agents can't do with this vLLM, in number"),
    "process_resident_memory_bytes": MetricFamily("Resident memory"),
    "process_cpu_seconds_total": MetricFamily("User and system CPU time"),
    "requests": MetricFamily(
        "Requests by state, and by what they wait for", (*PLACE, "state", "cause")
    ),
    "mm_cache_entries": MetricFamily("Entries of a multimodal cache", CACHE),
    "mm_cache_bytes": MetricFamily("Bytes in a multimodal cache", CACHE),
    "mm_cache_capacity_bytes": MetricFamily("Bytes that a multimodal cache may hold", CACHE),
    "mm_cache_queries_total": MetricFamily("Queries of a multimodal cache", CACHE),
    "mm_cache_hits_total": MetricFamily("Queries of a multimodal cache that were answered", CACHE),
    "mm_cache_ghost_keys": MetricFamily(
        "Keys in the LRU order without data: eviction spins", CACHE
    ),
    "mm_cache_inconsistent_keys": MetricFamily(
        "Keys that the parts of a cache disagree about", CACHE
    ),
    "mm_cache_one_sided_keys": MetricFamily(
        "Keys that one side of a cache has and the other has not; only known while nothing is in "
        "flight",
        CACHE,
    ),
    "encoder_cache_entries": MetricFamily("Entries of an encoder cache", (*PLACE, "side")),
    "encoder_cache_bytes": MetricFamily("Bytes of the tensors in a worker's encoder cache"),
    "encoder_cache_slots": MetricFamily("Embeddings that the scheduler's encoder cache may hold"),
    "encoder_cache_free_slots": MetricFamily("Those of them that no entry takes"),
    "encoder_cache_stray_requests": MetricFamily(
        "Requests that hold entries of the encoder cache and are over"
    ),
    "key_created_timestamp_seconds": MetricFamily("When a key was made", ("kid", "status"), max),
    "key_not_after_timestamp_seconds": MetricFamily(
        "When a key stops opening anything", ("kid", "status"), min
    ),
    "key_processes": MetricFamily("Processes that hold a key", ("kid", "status")),
    "keys_loaded_timestamp_seconds": MetricFamily("When a process loaded its keys", fold=min),
    "key_problems": MetricFamily("Processes whose keys differ from the keyring's file"),
    "patch_processes": MetricFamily("Processes by the state of a patch", ("patch", "state")),
    "agent_cpu_seconds_total": MetricFamily("CPU time of the agent's own threads"),
    "repairs_total": MetricFamily("Repairs, by what was repaired", (*PLACE, "what")),
    "store_responses": MetricFamily("Stored responses", ("backend", "status"), max),
    "store_bytes": MetricFamily("Bytes of stored responses", ("backend",), max),
    "store_capacity_responses": MetricFamily(
        "Responses that the store keeps before it evicts", ("backend",), max
    ),
    "store_evictions_total": MetricFamily("Responses that had to make room", ("backend",), max),
    "gpu_busy_ratio": MetricFamily("Share of the time in which a kernel ran on a GPU", GPU, max),
    "gpu_memory_busy_ratio": MetricFamily(
        "Share of the time in which the memory of a GPU was read or written", GPU, max
    ),
    "gpu_power_watts": MetricFamily("Power that a GPU draws", GPU, max),
    "gpu_power_limit_watts": MetricFamily("Power that a GPU may draw", GPU, max),
    "known_bad_versions": MetricFamily(
        "Installed versions that are known to hang", ("package", "version"), max
    ),
}


def build_metrics(samples: Iterable[MetricSample]) -> list[Metric]:
    """Families of prometheus_client; those that have no value are left out."""
    folded: dict[str, dict[tuple[str, ...], float]] = {}
    for name, value, labels in samples:
        family = FAMILIES[name]
        values = folded.setdefault(name, {})
        key = tuple(labels.get(label, "") for label in family.labels)
        values[key] = family.fold(values[key], value) if key in values else value
    found: list[Metric] = []
    for name, values in folded.items():
        family = FAMILIES[name]
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        metric = kind(PREFIX + name, family.help)
        for key, value in values.items():
            # To Prometheus a label without a value is none, and each one costs every scrape time.
            labels = {label: word for label, word in zip(family.labels, key, strict=True) if word}
            metric.add_sample(PREFIX + name, labels, value)
        found.append(metric)
    return found
