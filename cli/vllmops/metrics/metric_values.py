"""The values of `families`, from what the agents of a server say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, get_args

from ..model.caches import (
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from ..model.patches import ProcessPatches
from ..model.ranks import RankedProcess, make_process_key
from ..model.requests import ProcessRequests, RequestState
from ..model.server_metrics import Certainty, MetricsSnapshot, StoreUsage
from ..model.server_snapshot import Gpu
from .metric_families import MetricSample

LATE_S: Final = 5.0  # a heartbeat comes every second
GONE: Final = {"", "Z"}
ASKED: Final = {"api", "engine", "worker"}  # have an agent in every server that has one
MOST_KEYS: Final = 32  # of a keyring, the newest: each is a label
FRONT: Final = (RequestState.RENDERING, RequestState.SENT)
MIRRORED: Final = "mm-lru"
SIDES: Final = ("P0", "P1")


def make_samples(view: MetricsSnapshot) -> Iterator[MetricSample]:
    """All values that a view gives."""
    for certainty in filter(None, get_args(Certainty)):
        yield MetricSample("stalled", float(view.stall == certainty), {"certainty": certainty})
    yield from make_process_samples(view)
    yield from make_request_samples(view.requests)
    yield from make_agent_samples(view)
    yield from make_one_sided_samples(view.caches)
    yield from make_key_samples(view)
    if view.store:
        yield from make_store_samples(view.store)
    for node, gpus in view.gpus.items():
        yield from make_gpu_samples(node, gpus)
    for bad in view.known_bad:
        yield MetricSample(
            "known_bad_versions", 1, {"package": bad.package, "version": bad.version}
        )


def make_process_labels(process: RankedProcess) -> dict[str, str]:
    """The labels of a process."""
    ranks = {name: getattr(process, name) for name in ("dp_rank", "tp_rank", "pp_rank")}
    return {
        "role": process.role,
        "node": process.node,
        **{name: str(rank) for name, rank in ranks.items() if rank is not None},
    }


def make_process_samples(view: MetricsSnapshot) -> Iterator[MetricSample]:
    for process in view.processes:
        if process.state in GONE:
            continue
        where = make_process_labels(process)
        yield MetricSample("processes", 1, where)
        if process.role in ASKED:
            yield MetricSample("agents", 0, where)
        yield MetricSample("process_cpu_seconds_total", process.cpu_s, where)
        if process.rss_bytes is not None:
            yield MetricSample("process_resident_memory_bytes", process.rss_bytes, where)
    for pulse in view.heartbeats:
        where, beat = make_process_labels(pulse), pulse.heartbeat
        yield MetricSample("heartbeat_age_seconds", pulse.age_s, where)
        yield MetricSample("agents", float(pulse.age_s < LATE_S), where)
        if beat.still_s is not None:
            # A heartbeat that is late shows no present; `heartbeat_age_seconds` shows that.
            still_s = beat.still_s + pulse.age_s if beat.still_s else 0.0
            yield MetricSample("no_progress_seconds", still_s, where)
        if beat.loop_s is not None:
            yield MetricSample("event_loop_blocked_seconds", beat.loop_s, where)
        if beat.rendering_s is not None:
            yield MetricSample("rendering_seconds", beat.rendering_s, where)


def make_agent_samples(view: MetricsSnapshot) -> Iterator[MetricSample]:
    """What agents tell of themselves and of caches.

    Of several processes with the same labels a counter is only known if all have answered: without
    one of them it would go down, which Prometheus takes for a restart.
    """
    told = set(map(make_process_key, view.caches)) & set(map(make_process_key, view.patches))
    lacking = [
        make_process_labels(process)
        for process in view.processes
        if process.role in ASKED
        and process.state not in GONE
        and make_process_key(process) not in told
    ]
    answers: list[tuple[RankedProcess, Iterator[MetricSample]]] = [
        *((process, make_cache_samples(process)) for process in view.caches),
        *((process, make_patch_samples(process)) for process in view.patches),
    ]
    for process, found in answers:
        partly = make_process_labels(process) in lacking
        yield from (one for one in found if not (partly and one.name.endswith("_total")))


def make_patch_samples(process: ProcessPatches) -> Iterator[MetricSample]:
    where = make_process_labels(process)
    yield MetricSample("agent_problems", len(process.problems), where)
    yield MetricSample("agent_cpu_seconds_total", process.cpu_s, where)
    for what, count in process.repairs.items():
        yield MetricSample("repairs_total", count, {**where, "what": what})
    for verdict in process.patches:
        yield MetricSample("patch_processes", 1, {"patch": verdict.id, "state": verdict.state})


def make_request_samples(processes: Sequence[ProcessRequests]) -> Iterator[MetricSample]:
    """A request is counted where it is: at the API server until a scheduler knows it."""
    known = {request.id for process in processes for request in process.engine or ()}
    for process in processes:
        count: Counter[tuple[str, str]] = Counter()
        if process.front is not None:
            count.update({(state, ""): 0 for state in FRONT})
            for front in process.front:
                if front.id not in known:
                    count[RequestState.SENT if front.id else RequestState.RENDERING, ""] += 1
        if process.engine is not None:
            count.update({(state, ""): 0 for state in RequestState if state not in FRONT})
            count.update((request.state, request.cause) for request in process.engine)
        for (state, cause), number in count.items():
            yield MetricSample(
                "requests", number, {**make_process_labels(process), "state": state, "cause": cause}
            )


def make_cache_samples(process: ProcessCaches) -> Iterator[MetricSample]:
    where = make_process_labels(process)
    for cache in process.caches:
        match cache:
            case LruCache() | ShmCache():
                labels = {**where, "kind": cache.kind, "side": cache.side}
                values = (
                    build_lru_figures(cache)
                    if isinstance(cache, LruCache)
                    else build_shm_figures(cache)
                )
                for name, value in values.items():
                    if value is not None:
                        yield MetricSample(f"mm_cache_{name}", value, labels)
            case EncoderCache():
                yield MetricSample(
                    "encoder_cache_entries",
                    len(cache.requests_by_key),
                    {**where, "side": "scheduler"},
                )
                yield MetricSample("encoder_cache_slots", cache.slots, where)
                yield MetricSample("encoder_cache_free_slots", cache.free_slots, where)
                yield MetricSample(
                    "encoder_cache_stray_requests", len(cache.unknown_requests), where
                )
            case EncoderDecoderCache():
                yield MetricSample("encoder_cache_slots", cache.slots, where)
                yield MetricSample("encoder_cache_free_slots", cache.free_slots, where)
            case WorkerEncoderCache():
                yield MetricSample(
                    "encoder_cache_entries", len(cache.keys), {**where, "side": "worker"}
                )
                yield MetricSample("encoder_cache_bytes", cache.bytes, where)


def build_lru_figures(cache: LruCache) -> dict[str, float | None]:
    differing = (
        *(cache.order_only, cache.data_only, cache.unsized, cache.sized_only),
        cache.pinned_only,
    )
    return {
        "entries": cache.entries,
        "bytes": cache.bytes,
        "capacity_bytes": cache.capacity_bytes,
        "queries_total": cache.queries,
        "hits_total": cache.hits,
        "ghost_keys": len(cache.order_only),
        "inconsistent_keys": len(set().union(*differing)),
    }


def build_shm_figures(cache: ShmCache) -> dict[str, float | None]:
    if not cache.writer:  # a reader has no index
        return {"capacity_bytes": cache.capacity_bytes}
    differing = (
        cache.unpaired_keys,
        cache.unflagged_ids,
        cache.unmapped_ids,
        cache.without_updates,
    )
    return {
        "entries": len(cache.keys),
        "bytes": cache.bytes,
        "capacity_bytes": cache.capacity_bytes,
        "queries_total": cache.queries,
        "hits_total": cache.hits,
        "inconsistent_keys": sum(len(each) for each in differing),
    }


def group_mirrored_caches(
    processes: Sequence[ProcessCaches],
) -> dict[str, list[tuple[ProcessCaches, LruCache]]]:
    """The caches that have another side, by side."""
    found: dict[str, list[tuple[ProcessCaches, LruCache]]] = {side: [] for side in SIDES}
    for process in processes:
        for cache in process.caches:
            if isinstance(cache, LruCache) and cache.kind == MIRRORED and cache.side in found:
                found[cache.side].append((process, cache))
    return found


def has_differing_sides(processes: Sequence[ProcessCaches]) -> bool:
    """Whether the sides of a cache hold other keys, so that their keys are worth asking for."""
    digests = {
        cache.digest for side in group_mirrored_caches(processes).values() for _, cache in side
    }
    return "" not in digests and len(digests) > 1


def make_one_sided_samples(processes: Sequence[ProcessCaches]) -> Iterator[MetricSample]:
    """Nothing while requests are in flight: their items are on one side first."""
    fronts, engines = group_mirrored_caches(processes).values()
    if len(fronts) != 1:  # each of several has items of its own
        return
    ((front_process, front),) = fronts
    for engine_process, engine in engines:
        if not front.digest or not engine.digest:
            continue
        both = [
            *((front_process, front, engine), (engine_process, engine, front)),
        ]
        for process, own, other in both:
            if own.digest == other.digest:
                alone = 0
            elif own.order is None or other.order is None:
                continue
            else:
                alone = len(set(own.order) - set(other.order))
            labels = {**make_process_labels(process), "kind": own.kind, "side": own.side}
            yield MetricSample("mm_cache_one_sided_keys", alone, labels)


def make_store_samples(store: StoreUsage) -> Iterator[MetricSample]:
    labels = {"backend": store.backend}
    for status, count in store.statuses.items():
        yield MetricSample("store_responses", count, {**labels, "status": status})
    yield MetricSample("store_bytes", store.bytes, labels)
    yield MetricSample("store_capacity_responses", store.capacity, labels)
    yield MetricSample("store_evictions_total", store.evictions, labels)


def make_gpu_samples(node: str, gpus: Sequence[Gpu]) -> Iterator[MetricSample]:
    for gpu in gpus:
        values = {
            "busy_ratio": gpu.utilization,
            "memory_busy_ratio": gpu.memory_busy,
            "power_watts": gpu.watts,
            "power_limit_watts": gpu.limit_watts,
        }
        for name, value in values.items():
            if value is not None:
                yield MetricSample(f"gpu_{name}", value, {"node": node, "gpu": str(gpu.index)})


def make_key_samples(view: MetricsSnapshot) -> Iterator[MetricSample]:
    holders = [process for process in view.keys if process.keys or process.problem]
    kids = {key.kid: key.created_at or 0 for process in holders for key in process.keys}
    newest = set(sorted(kids, key=lambda kid: -kids[kid])[:MOST_KEYS])
    for process in holders:
        if process.loaded_at is not None:
            yield MetricSample(
                "keys_loaded_timestamp_seconds", process.loaded_at, make_process_labels(process)
            )
        yield MetricSample(
            "key_problems", float(bool(process.problem)), make_process_labels(process)
        )
        for held in process.keys:
            if held.kid not in newest:
                continue
            labels = {"kid": held.kid, "status": held.status}
            yield MetricSample("key_processes", 1, labels)
            if held.created_at is not None:
                yield MetricSample("key_created_timestamp_seconds", held.created_at, labels)
            if held.not_after is not None:
                yield MetricSample("key_not_after_timestamp_seconds", held.not_after, labels)
