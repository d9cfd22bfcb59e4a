"""Takes snapshots of caches from the agent's thread, while vLLM's threads use them.

A snapshot changes nothing: no hit counter, no order, no lock. ``dict(cache)``, ``cache.items()``
and ``cache[key]`` would, so this module reads the containers inside, all of one cache in a single
C call: no other thread runs Python before it returns. vLLM can still be in the middle of an
operation, so a cache that contradicts itself is read again a little later.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter, call
from typing import Any, TypeVar

from ...model.caches import (
    Cache,
    CacheSetup,
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from ...rules.caches import check_cache
from ..hooks import vllm_objects
from ..identity import detect_role, make_process_fields
from ..versions import encoder_caches, ranks
from ..versions.engine import is_text_only
from . import engine

TRIES = 5
PAUSE_S = 0.003

T = TypeVar("T", bound=Cache)


def observe_caches(*, keys: bool = False, tries: int = TRIES) -> ProcessCaches:
    """Every cache of this process; one that can't be read is listed in ``problems``.

    Args:
        keys: whether to list every key of LRU caches too.
        tries: how often to read a cache that contradicts itself.
    """
    caches: list[Cache] = []
    problems = list(vllm_objects.problems)
    for take, holder in list_cache_readers(keys):
        try:
            if (cache := observe_until_consistent(take, holder, tries)) is not None:
                caches.append(cache)
        except Exception as error:
            problems.append(f"{type(holder).__name__} can't be read: {error!r}")
    traffic, state = engine.observe_traffic(), engine.observe_engine()
    return ProcessCaches(
        pid=os.getpid(),
        parent=os.getppid(),
        **make_process_fields(),
        caches=caches,
        setup=find_cache_setup(),
        unfinished_requests=state.unfinished_requests,
        step=state.current_step,
        in_flight=traffic.in_flight,
        started_requests=traffic.started_requests,
        problems=problems,
    )


def list_cache_readers(keys: bool) -> list[tuple[Callable[[Any], Cache | None], Any]]:
    """Each object, and the function that reads its cache."""
    held: list[tuple[Callable[[Any], Cache | None], Any]] = [
        (partial(observe_multimodal_cache, keys=keys), cache)
        for cache in vllm_objects.list_objects("mm-cache")
    ]
    held += [
        (observe_encoder_cache, scheduler) for scheduler in vllm_objects.list_objects("scheduler")
    ]
    held += [(observe_encoder_outputs, worker) for worker in vllm_objects.list_objects("worker")]
    return held


def observe_until_consistent(
    take: Callable[[Any], Cache | None], holder: Any, tries: int = TRIES
) -> Cache | None:
    """Read a cache until it does not contradict itself, at most `tries` times.

    A container whose size changes during the copy raises RuntimeError: it is read again, too.
    """
    for _ in range(tries - 1):
        try:
            cache = take(holder)
        except RuntimeError:
            cache = None
        else:
            if cache is None or not check_cache(cache):
                return cache
        time.sleep(PAUSE_S)
    return take(holder)


def read_atomically(*reads: tuple[Callable[[Any], Any], Any]) -> tuple[Any, ...]:
    """Call each reader on its container in one C call, so that all results are of one moment.

    Only true for readers and containers implemented in C, with plain strings as keys.
    """
    readers, containers = zip(*reads, strict=True)
    return tuple(map(call, readers, containers))


def observe_multimodal_cache(cache: Any, *, keys: bool = False) -> LruCache | ShmCache | None:
    """A multimodal cache of any kind; None while it is being built."""
    own = vars(cache)
    if "_cache" in own:
        return observe_lru_cache(cache, keys=keys)
    if "_shm_cache" in own:
        return observe_shm_cache(cache)
    return None


def observe_lru_cache(holder: Any, *, keys: bool = False) -> LruCache:
    """A cache over vLLM's LRUCache (``vllm/utils/cache.py``).

    vLLM's threads wait meanwhile, and with 20,000 entries every pass matters: sets are made only
    where the containers differ.
    """
    cache = holder._cache
    sized = cache._Cache__size
    own, order, data, sizes, pinned = read_atomically(
        (dict, vars(cache)),
        (list, cache._LRUCache__order),
        (list, cache._Cache__data),
        (dict, {} if sized is None else sized),
        (list, cache.pinned_items),
    )
    known = dict.fromkeys(data) if sized is None else sizes
    same = len(order) == len(data) == len(known) and all(map(known.__contains__, order))
    differences: dict[str, list[str]] = {}
    # Without a fault, data and sizes have the same order, too.
    if not same or (sized is not None and data != list(sizes)):
        ordered, having = frozenset(order), frozenset(data)
        differences = {
            "order_only": list(ordered - having),
            "data_only": list(having - ordered),
            "unsized": [] if sized is None else list(having - sizes.keys()),
            "sized_only": list(sizes.keys() - having),
        }
    return LruCache(
        kind=find_cache_kind(holder),
        side=find_cache_side(holder),
        name=type(holder).__name__,
        order=order if keys else None,
        sizes=list(map(sizes.get, order)) if keys else None,
        # While requests are in flight the sides are not compared, and the digest costs time.
        digest="" if engine.is_busy() else hash_key_order(order),
        oldest_key=order[0] if order else None,
        newest_key=order[-1] if order else None,
        **differences,
        pinned_keys=pinned,
        pinned_only=sorted(set(pinned).difference(data)) if pinned else [],
        entries=len(data),
        bytes=own["_Cache__currsize"],
        sum_bytes=None if sized is None else sum(sizes.values()),
        capacity_bytes=own["_Cache__maxsize"],
        hits=own["_hits"],
        queries=own["_total"],
    )


def find_cache_kind(holder: Any) -> str:
    """``mm-lru`` for a cache over an LRUCache that has another side, else ``mm-processor-only``."""
    return "mm-processor-only" if "ProcessorOnly" in type(holder).__name__ else "mm-lru"


def find_cache_side(holder: Any) -> str:
    """The side of a cache over an LRUCache: P0, P1, or its process's role."""
    if "Receiver" in type(holder).__name__:
        return "P1"
    return "P0" if detect_role() == "api" else detect_role()


def hash_key_order(order: list[str]) -> str:
    """Equal for two caches with the same keys in the same order."""
    # hashlib releases the GIL, and CPUs have instructions for this hash.
    return hashlib.sha256("\n".join(order).encode(errors="surrogatepass")).hexdigest()


def observe_shm_cache(holder: Any) -> ShmCache:
    """A cache in shared memory (``SingleWriterShmObjectStorage``); only the writer has an index."""
    storage = holder._shm_cache
    ring = storage.ring_buffer
    reader = ShmCache(
        kind="mm-shm",
        side="P0" if storage.is_writer else "worker",
        name=type(holder).__name__,
        writer=bool(storage.is_writer),
        capacity_bytes=int(ring.data_buffer_size),
        max_object_bytes=int(storage.max_object_size),
    )
    if not storage.is_writer:
        return reader
    own, buffer, by_key, by_id, flags, places, updates = read_atomically(
        (dict, vars(holder)),
        (dict, vars(ring)),
        (dict, storage.key_index),
        (dict, storage.id_index),
        (list, storage.writer_flag),
        (list, ring.metadata),
        (list, holder._p0_cache),
    )
    ids = {key: place[1] for key, place in by_key.items()}
    unpaired = [key for key, number in ids.items() if by_id.get(number) != key]
    unpaired += [key for number, key in by_id.items() if ids.get(key) != number]
    return ShmCache(
        **{name: getattr(reader, name) for name in BOTH_SIDES},
        keys=list(by_key),
        bytes=buffer["data_buffer_end"] - buffer["data_buffer_start"],
        unpaired_keys=sorted(set(unpaired)),
        unflagged_ids=sorted(by_id.keys() ^ set(flags)),
        unmapped_ids=sorted(by_id.keys() ^ set(places)),
        without_updates=sorted(by_key.keys() - set(updates)),
        hits=own["_hits"],
        queries=own["_total"],
    )


BOTH_SIDES = ("kind", "side", "name", "writer", "capacity_bytes", "max_object_bytes")


def observe_encoder_cache(scheduler: Any) -> EncoderCache | EncoderDecoderCache | None:
    """A scheduler's encoder cache manager; None while it is being built."""
    manager = getattr(scheduler, "encoder_cache_manager", None)
    if manager is None:
        return None
    own = vars(manager)
    if (lists := encoder_caches.find_key_lists(manager)) is not None:
        own, *lists = read_atomically((dict, own), *((list, held) for held in lists))
        return EncoderDecoderCache(
            name=type(manager).__name__,
            slots=own["cache_size"],
            free_slots=own["num_free_slots"],
            passing=[key for held in lists for key in held],
        )
    embeds, inputs = (
        encoder_caches.find_slots_by_key(manager),
        encoder_caches.find_inputs_by_request(manager),
    )
    own, keys, references, by_key, freeable, holders, numbers, requests = read_atomically(
        (dict, own),
        (list, manager.cached),
        (list, map(tuple, manager.cached.values())),
        (dict, embeds or {}),
        (dict, manager.freeable),
        (list, inputs or {}),
        (list, map(tuple, (inputs or {}).values())),
        (dict, scheduler.requests),
    )
    cached = {key: sorted(ids) for key, ids in zip(keys, references, strict=True)}
    known = {name for name, request in requests.items() if not request.is_finished()}
    return EncoderCache(
        name=type(manager).__name__,
        slots=own["cache_size"],
        free_slots=own["num_free_slots"],
        freeable_slots=own["num_freeable_slots"],
        requests_by_key=cached,
        slots_by_key=None if embeds is None else by_key,
        freeable=freeable,
        inputs=None
        if inputs is None
        else {
            name: sorted({requests[name].mm_features[number].identifier for number in held})
            for name, held in zip(holders, numbers, strict=True)
            if name in requests
        },
        unknown_requests=sorted({name for ids in cached.values() for name in ids} - known),
    )


def observe_encoder_outputs(worker: Any) -> WorkerEncoderCache | None:
    """A worker's encoder outputs, of either model runner; None without a runner or a cache."""
    outputs = encoder_caches.find_outputs_by_key(worker)
    if outputs is None:
        return None
    keys, tensors = read_atomically((list, outputs), (list, outputs.values()))
    return WorkerEncoderCache(
        name=type(worker.model_runner).__name__,
        rank=getattr(worker, "rank", None),
        keys=keys,
        bytes=sum(map(attrgetter("nbytes"), tensors)),
        device=str(tensors[0].device) if tensors else None,
    )


def find_cache_setup() -> CacheSetup | None:
    """The settings that decide which caches this server has, from vLLM's config."""
    holder = vllm_objects.find_latest("scheduler") or vllm_objects.find_latest("worker")
    config = getattr(holder, "vllm_config", None)
    if config is None:
        return None
    model, parallel = config.model_config, config.parallel_config
    multimodal: Any = getattr(model, "multimodal_config", None)
    attempt = engine.read_or_none
    return CacheSetup(
        model=attempt(lambda: str(model.model)),
        multimodal=multimodal is not None and not is_text_only(model),
        encoder_decoder=attempt(lambda: bool(model.is_encoder_decoder)),
        cache_gb=attempt(lambda: float(multimodal.mm_processor_cache_gb)),
        cache_type=attempt(lambda: str(multimodal.mm_processor_cache_type)),
        api_processes=attempt(lambda: int(parallel._api_process_count)),
        data_parallel=attempt(lambda: int(parallel.data_parallel_size)),
        tensor_parallel=attempt(lambda: int(parallel.tensor_parallel_size)),
        pipeline_parallel=attempt(lambda: int(parallel.pipeline_parallel_size)),
        encoder_connector=attempt(lambda: config.ec_transfer_config is not None),
        spread=attempt(lambda: ranks.can_span_nodes(parallel)),
    )
