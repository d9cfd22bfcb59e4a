"""What is wrong with a server's caches, and which caches it has; pure, from snapshots.

The invariants are those of vLLM's classes: ``vllm/utils/cache.py``,
``vllm/distributed/device_communicators/shm_object_storage.py`` and
``vllm/v1/core/encoder_cache_manager.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ..model.caches import (
    Cache,
    CacheSample,
    CacheSetup,
    CacheSnapshot,
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from ..model.findings import Finding, Rule, Severity
from ..model.ranks import format_process

INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
RESTART = "vllmops restart"
REPAIR = "vllmops cache repair repairs it while the server runs"
SHOWN = 3

GHOST_KEYS = Rule(
    "mm-cache.ghost-keys",
    ERROR,
    "the LRU order has keys without data",
    "the next eviction that reaches such a key never ends and the server hangs; " + REPAIR,
    "https://github.com/vllm-project/vllm/pull/43595",
)
STUCK_KEYS = Rule(
    "mm-cache.unevictable-keys",
    ERROR,
    "entries are missing from the LRU order",
    "they are never evicted, and eviction fails once they fill the cache; " + REPAIR,
)
SIZE_KEYS = Rule(
    "mm-cache.size-keys",
    ERROR,
    "entries and sizes have different keys",
    "the cache misjudges how full it is, and deleting such an entry fails; " + REPAIR,
)
SIZE_SUM = Rule(
    "mm-cache.size-sum",
    ERROR,
    "the cache's size is not the sum of its entries",
    "the cache evicts too early, or grows beyond its capacity; " + REPAIR,
)
CAPACITY = Rule(
    "mm-cache.over-capacity",
    ERROR,
    "the cache's size is below 0 or above its capacity",
    "host memory grows, or every insertion evicts; " + RESTART,
)
PINNED = Rule(
    "mm-cache.pinned-missing",
    ERROR,
    "pinned keys have no entry",
    "a new entry with such a key is never evicted; " + REPAIR,
)
HITS = Rule(
    "mm-cache.hit-count",
    WARNING,
    "more hits than queries are counted",
    "the metrics vllm:mm_cache_hits and vllm:mm_cache_queries are wrong; the cache itself is "
    "not affected",
)
FRONT_ONLY = Rule(
    "mm-cache.front-only",
    WARNING,
    "the front end has entries that the engine lacks",
    "a request that reuses such an item is sent without its data and fails; newer vLLM then "
    "drops the key, so that the next try works; " + REPAIR,
    "https://github.com/vllm-project/vllm/pull/43595",
)
ENGINE_ONLY = Rule(
    "mm-cache.engine-only",
    INFO,
    "the engine has entries that the front end does not know",
    "nothing to do: such an item is sent once more",
)
ORDER = Rule(
    "mm-cache.order-drift",
    INFO,
    "front end and engine have the same entries in a different order",
    "nothing to do yet: concurrent requests can reach the two sides in different order, and "
    "from here on the sides may evict different entries",
)
SIZES = Rule(
    "mm-cache.size-drift",
    INFO,
    "front end and engine disagree on entry sizes",
    "nothing to do yet: from here on the two sides may evict different entries",
)
SHM_INDEX = Rule(
    "mm-cache.shm-index",
    ERROR,
    "the indexes of the shared-memory cache contradict each other",
    "evicting such an entry fails, and so does every insertion after it; " + RESTART,
)
SHM_RING = Rule(
    "mm-cache.shm-ring",
    ERROR,
    "the bounds of the shared-memory ring buffer are impossible",
    "the cache can't be trusted; " + RESTART,
)
SHM_UPDATES = Rule(
    "mm-cache.shm-updates",
    ERROR,
    "entries in shared memory lack their prompt updates",
    "a request that reuses such an item fails; " + RESTART,
)
SLOT_SUM = Rule(
    "encoder-cache.slot-sum",
    ERROR,
    "the slots of the entries do not add up to the slots in use",
    "requests with images or audio may wait for slots that never become free; " + RESTART,
)
FREEABLE_SUM = Rule(
    "encoder-cache.freeable-sum",
    ERROR,
    "the slots of the freeable entries do not add up",
    "requests with images or audio may wait for slots that never become free, or get slots "
    "that are in use; " + RESTART,
)
SLOT_BOUNDS = Rule(
    "encoder-cache.slot-bounds",
    ERROR,
    "slot counts are outside 0 <= free <= freeable <= capacity",
    "requests with images or audio may wait for ever; " + RESTART,
)
ENCODER_KEYS = Rule(
    "encoder-cache.keys",
    ERROR,
    "entries and slot counts have different keys",
    "the scheduler's encoder cache contradicts itself; " + RESTART,
)
FREEABLE_KEYS = Rule(
    "encoder-cache.freeable-keys",
    ERROR,
    "the freeable entries are not the entries without references",
    "an entry may be dropped while a request needs it, or never; " + RESTART,
)
REFERENCES = Rule(
    "encoder-cache.references",
    ERROR,
    "entries and requests do not refer to each other",
    "an entry may be dropped while a request needs it, or never; " + RESTART,
)
STRANGERS = Rule(
    "encoder-cache.finished-references",
    ERROR,
    "entries are held for finished or unknown requests",
    "they are never freed; once they fill the cache, requests with images or audio wait for "
    "ever; " + RESTART,
)
WORKER_MISSES = Rule(
    "encoder-cache.worker-misses",
    ERROR,
    "the worker lacks entries that the scheduler counts on",
    'the next request that uses such an entry fails with "Encoder cache miss" and takes the '
    "engine down; " + RESTART,
)
WORKER_LEAK = Rule(
    "encoder-cache.worker-leak",
    WARNING,
    "the worker keeps entries that the scheduler has dropped",
    "device memory is lost until the server restarts; the patch encoder-decoder-free-order "
    "removes one cause: vllmops patches list",
    "https://github.com/vllm-project/vllm/pull/32789",
)
WORKER_DIFFERS = Rule(
    "encoder-cache.worker-differs",
    ERROR,
    "a worker has other entries than the other workers of its tensor parallel group",
    "the workers of a group compute together: a request that uses such an entry fails in this "
    "worker alone, and the others wait for it; " + RESTART,
)
OVER_FREED = Rule(
    "encoder-cache.over-freed",
    INFO,
    "more slots are free than exist",
    "vLLM frees an encoder-decoder model's slots more than once, so their limit has no "
    "effect; the patch encoder-decoder-slots removes the cause: vllmops patches list",
)
CATALOGUE = {rule.code: rule for rule in list(vars().values()) if isinstance(rule, Rule)}


class CacheNote(msgspec.Struct, frozen=True):
    """Which caches a server has, or why it has none.

    Args:
        code: a stable word, such as ``text-model``.
        text: in words.
    """

    code: str
    text: str


def diagnose_caches(snapshot: CacheSnapshot) -> list[Finding]:
    """The findings that every sample shows, worst first.

    A sample of a busy server may be taken in the middle of a change; what is broken stays broken.
    """
    if not snapshot.samples:
        return []
    *earlier, last = map(check_sample, snapshot.samples)
    return sorted(
        select_persistent_findings(earlier, last), key=lambda finding: -finding.severity.rank
    )


def select_persistent_findings(
    earlier_findings: Sequence[Sequence[Finding]], last_findings: Sequence[Finding]
) -> list[Finding]:
    """The last findings that all earlier ones have, too."""
    seen = [{(finding.code, finding.subject) for finding in sample} for sample in earlier_findings]
    return [
        finding
        for finding in last_findings
        if all((finding.code, finding.subject) in keys for keys in seen)
    ]


def check_sample(sample: CacheSample) -> list[Finding]:
    """Everything that one sample shows, also what is only the middle of a change."""
    found = [
        rule.make_finding(format_cache_name(process, cache), evidence)
        for process in sample.processes
        for cache in process.caches
        for rule, evidence in check_cache(cache)
    ]
    if sample.quiet:
        found += compare_mirrored_caches(sample)
        found += compare_encoder_caches(sample)
    return found


Evidence = tuple[Rule, str]


def check_cache(cache: Cache) -> list[Evidence]:
    """What is wrong with one cache alone."""
    return list(CHECKS[type(cache)](cache))


def check_lru_cache(cache: LruCache) -> Iterator[Evidence]:
    if cache.order_only:
        yield GHOST_KEYS, format_keys(cache.order_only)
    if cache.data_only:
        yield STUCK_KEYS, format_keys(cache.data_only)
    if cache.unsized or cache.sized_only:
        yield (
            SIZE_KEYS,
            format_key_lists("without a size", cache.unsized, "without data", cache.sized_only),
        )
    if cache.sum_bytes is not None and cache.bytes != cache.sum_bytes:
        yield SIZE_SUM, f"the cache counts {cache.bytes} bytes, its entries have {cache.sum_bytes}"
    if not 0 <= cache.bytes <= cache.capacity_bytes:
        yield CAPACITY, f"{cache.bytes} bytes of {cache.capacity_bytes:.0f}"
    if cache.pinned_only:
        yield PINNED, format_keys(cache.pinned_only)
    if not 0 <= cache.hits <= cache.queries:
        yield HITS, f"{cache.hits} hits of {cache.queries} queries"


def check_shm_cache(cache: ShmCache) -> Iterator[Evidence]:
    if cache.unpaired_keys or cache.unflagged_ids or cache.unmapped_ids:
        yield (
            SHM_INDEX,
            f"{len(cache.unpaired_keys)} keys without an id that leads back to them, "
            f"{len(cache.unflagged_ids)} ids without a writer's flag, {len(cache.unmapped_ids)} "
            "ids "
            "without an address",
        )
    if cache.bytes is not None and not 0 <= cache.bytes <= cache.capacity_bytes:
        yield SHM_RING, f"{cache.bytes} bytes of {cache.capacity_bytes} in use"
    if cache.without_updates:
        yield SHM_UPDATES, format_keys(cache.without_updates)
    if (
        cache.hits is not None
        and cache.queries is not None
        and not 0 <= cache.hits <= cache.queries
    ):
        yield HITS, f"{cache.hits} hits of {cache.queries} queries"


def check_encoder_cache(cache: EncoderCache) -> Iterator[Evidence]:
    taken = cache.slots - cache.free_slots
    by_key = cache.slots_by_key
    if by_key is not None:
        if cache.requests_by_key.keys() != by_key.keys():
            yield (
                ENCODER_KEYS,
                format_key_lists(
                    "without slots",
                    cache.requests_by_key.keys() - by_key.keys(),
                    "without an entry",
                    by_key.keys() - cache.requests_by_key.keys(),
                ),
            )
        if sum(by_key.values()) != taken:
            yield SLOT_SUM, f"{taken} slots are in use, the entries have {sum(by_key.values())}"
    freeable = cache.freeable_slots - cache.free_slots
    if sum(cache.freeable.values()) != freeable:
        yield (
            FREEABLE_SUM,
            f"{freeable} slots are freeable, the freeable entries have "
            f"{sum(cache.freeable.values())}",
        )
    unused = {key for key, requests in cache.requests_by_key.items() if not requests}
    if cache.freeable.keys() != unused:
        yield (
            FREEABLE_KEYS,
            format_key_lists(
                "freeable but in use or gone",
                cache.freeable.keys() - unused,
                "unused but not freeable",
                unused - cache.freeable.keys(),
            ),
        )
    elif by_key is not None and (
        wrong := [key for key, slots in cache.freeable.items() if by_key.get(key) != slots]
    ):
        yield FREEABLE_KEYS, f"entries with different slot counts: {format_keys(wrong)}"
    if not 0 <= cache.free_slots <= cache.freeable_slots <= cache.slots:
        yield (
            SLOT_BOUNDS,
            f"{cache.free_slots} free, {cache.freeable_slots} freeable, {cache.slots} in total",
        )
    if cache.inputs is not None:
        entries = {(name, key) for key, names in cache.requests_by_key.items() for name in names}
        inputs = {(name, key) for name, keys in cache.inputs.items() for key in keys}
        known = {(name, key) for name, key in entries if name not in cache.unknown_requests}
        if known != inputs:
            yield (
                REFERENCES,
                f"{len(known - inputs)} references of entries to requests without such an input, "
                f"{len(inputs - known)} inputs of requests without such a reference",
            )
    if cache.unknown_requests:
        yield STRANGERS, f"requests {format_keys(cache.unknown_requests)}"


def check_encoder_decoder_cache(cache: EncoderDecoderCache) -> Iterator[Evidence]:
    if cache.free_slots > cache.slots:
        yield OVER_FREED, f"{cache.free_slots} free of {cache.slots}"


def check_worker_cache(_: WorkerEncoderCache) -> Iterator[Evidence]:
    """A worker's cache can only be compared with the scheduler's."""
    yield from ()


CHECKS: dict[type, Callable[[Any], Iterator[Evidence]]] = {
    LruCache: check_lru_cache,
    ShmCache: check_shm_cache,
    EncoderCache: check_encoder_cache,
    EncoderDecoderCache: check_encoder_decoder_cache,
    WorkerEncoderCache: check_worker_cache,
}


Side = tuple[ProcessCaches, LruCache]


def find_mirrored_caches(sample: CacheSample) -> tuple[Side, Side] | None:
    """The caches of front end and engine if one mirrors the other; None otherwise."""
    sides: dict[str, list[Side]] = {"P0": [], "P1": []}
    for process in sample.processes:
        for cache in process.caches:
            if isinstance(cache, LruCache) and cache.kind == "mm-lru":
                sides.setdefault(cache.side, []).append((process, cache))
    fronts, backs = sides["P0"], sides["P1"]
    return (fronts[0], backs[0]) if len(fronts) == len(backs) == 1 else None


def has_all_keys(cache: LruCache) -> bool:
    """Whether all keys of a cache are known, each with its size."""
    order, sizes = cache.order, cache.sizes
    return order is not None and sizes is not None and len(order) == len(sizes)


def needs_all_keys(sample: CacheSample) -> bool:
    """Whether the two sides differ and only all their keys can show how."""
    if not sample.quiet or (sides := find_mirrored_caches(sample)) is None:
        return False
    (_, front), (_, back) = sides
    same = front.digest and (front.digest, front.bytes) == (back.digest, back.bytes)
    return not same and (front.order is None or back.order is None)


def compare_mirrored_caches(sample: CacheSample) -> Iterator[Finding]:
    """What differs between front end and engine if one mirrors the other.

    Requests in flight make them differ without harm, so this is for a quiet server only.
    """
    if (sides := find_mirrored_caches(sample)) is None:
        return
    (process, front), (engine, back) = sides
    if not (has_all_keys(front) and has_all_keys(back)):
        return
    sent = dict(zip(front.order or (), front.sizes or (), strict=True))
    held = dict(zip(back.order or (), back.sizes or (), strict=True))
    subject = f"P0 of {format_process(process)} and P1 of {format_process(engine)}"
    if front_only := sent.keys() - held.keys():
        yield FRONT_ONLY.make_finding(subject, format_keys(front_only))
    if engine_only := held.keys() - sent.keys():
        yield ENGINE_ONLY.make_finding(subject, format_keys(engine_only))
    shared = [key for key in sent if key in held]
    if shared != [key for key in held if key in sent]:
        yield ORDER.make_finding(subject, f"{len(shared)} entries in common")
    if differing := [key for key in shared if sent[key] != held[key]]:
        yield SIZES.make_finding(subject, format_keys(differing))


def find_front_only_keys(snapshot: CacheSnapshot) -> tuple[int, list[str]] | None:
    """The front end's pid and its entries that the engine lacks, in every sample.

    Returns:
        None if there are none, or if requests in flight explain them.
    """
    if FRONT_ONLY.code not in {finding.code for finding in diagnose_caches(snapshot)}:
        return None
    process, entries = 0, set[str]()
    for number, sample in enumerate(snapshot.samples):
        if (sides := find_mirrored_caches(sample)) is None:
            return None
        (front, sent), (_, held) = sides
        process, beyond = front.pid, set(sent.order or ()) - set(held.order or ())
        entries = entries & beyond if number else beyond
    return (process, sorted(entries)) if entries else None


def compare_encoder_caches(sample: CacheSample) -> Iterator[Finding]:
    """What differs between a scheduler and its workers, between two steps."""
    setup = find_setup(sample)
    if setup is not None and setup.encoder_connector:
        return  # a worker receives entries from elsewhere and sends them elsewhere
    for process, cache in list_scheduler_caches(sample):
        groups: dict[int | None, list[tuple[ProcessCaches, frozenset[str]]]] = {}
        for worker, outputs in select_worker_caches(process, sample):
            subject = f"{format_process(process)} and {format_process(worker)}"
            held = frozenset(outputs.keys)
            if isinstance(cache, EncoderDecoderCache):
                allowed, required = frozenset(cache.passing), frozenset[str]()
            else:
                allowed = frozenset(cache.requests_by_key)
                required = allowed if runs_encoder(outputs, setup) else frozenset()
            if required - held:
                yield WORKER_MISSES.make_finding(subject, format_keys(required - held))
            if held - allowed:
                yield WORKER_LEAK.make_finding(subject, format_keys(held - allowed))
            if required <= held <= allowed and worker.tp_rank is not None:
                groups.setdefault(worker.pp_rank, []).append((worker, held))
        for group in groups.values():
            yield from find_deviating_workers(group)


def find_deviating_workers(
    group: Sequence[tuple[ProcessCaches, frozenset[str]]],
) -> Iterator[Finding]:
    """Workers that differ from the rest of their tensor parallel group, each with its keys."""
    usual = Counter(held for _, held in group).most_common(1)[0][0]
    for worker, held in group:
        if held != usual:
            evidence = format_key_lists("it lacks", usual - held, "it alone has", held - usual)
            yield WORKER_DIFFERS.make_finding(format_process(worker), evidence)


def list_scheduler_caches(
    sample: CacheSample,
) -> Iterator[tuple[ProcessCaches, EncoderCache | EncoderDecoderCache]]:
    """The encoder cache of each scheduler, with its process."""
    for process in sample.processes:
        for cache in process.caches:
            if isinstance(cache, (EncoderCache, EncoderDecoderCache)):
                yield process, cache


def select_worker_caches(
    engine: ProcessCaches, sample: CacheSample
) -> Iterator[tuple[ProcessCaches, WorkerEncoderCache]]:
    """The workers of an engine: those of its rank, its children, or itself."""
    alone = len(list(list_scheduler_caches(sample))) == 1
    for process in sample.processes:
        same = engine.dp_rank is not None and engine.dp_rank == process.dp_rank
        near = engine.node == process.node and engine.pid in (process.pid, process.parent)
        if alone or same or near:
            for cache in process.caches:
                if isinstance(cache, WorkerEncoderCache):
                    yield process, cache


def runs_encoder(worker: WorkerEncoderCache, setup: CacheSetup | None) -> bool:
    """Whether a worker encodes: with pipeline parallelism only the first stage does."""
    if setup is None or (setup.pipeline_parallel or 1) == 1:
        return True
    return worker.rank is not None and worker.rank < (setup.tensor_parallel or 1)


def make_cache_notes(sample: CacheSample) -> list[CacheNote]:
    """Which caches this kind of server has, and what was not compared."""
    notes_ = make_setup_notes(find_setup(sample))
    if not sample.quiet:
        notes_.append(
            CacheNote(
                "busy",
                "requests were in flight, or a process did not answer: front end and engine, "
                "scheduler and worker were not compared",
            )
        )
    return notes_


def make_setup_notes(setup: CacheSetup | None) -> list[CacheNote]:
    """Which caches a server with this setup has, or why it has none."""
    if setup is None:
        return [
            CacheNote(
                "unknown",
                "no engine and no worker reported the server's setup: caches that are not shown "
                "may not exist",
            )
        ]
    if setup.encoder_decoder:
        return [
            CacheNote(
                "encoder-decoder",
                "an encoder-decoder model: vLLM has no multimodal processor cache for it, counts "
                "encoder slots without entries, and frees each slot twice",
            )
        ]
    if not setup.multimodal:
        return [
            CacheNote(
                "text-model", "a text model: it has no multimodal cache and no encoder entries"
            )
        ]
    notes_ = []
    if setup.cache_gb is not None and setup.cache_gb <= 0:
        notes_.append(
            CacheNote(
                "cache-off", "the multimodal processor cache is off: --mm-processor-cache-gb is 0"
            )
        )
    elif (setup.api_processes or 1) > 1 or (setup.data_parallel or 1) > 1:
        several = (
            f"{setup.api_processes} API servers"
            if (setup.api_processes or 1) > 1
            else f"{setup.data_parallel} engines"
        )
        notes_.append(
            CacheNote(
                "processor-only",
                f"{several}: each front end has a cache of its own, and the engine keeps no copy",
            )
        )
    elif setup.cache_type == "shm":
        notes_.append(
            CacheNote(
                "shm",
                "the cache is in shared memory (--mm-processor-cache-type shm): the front end "
                "writes it and keeps its index, workers only read",
            )
        )
    if setup.encoder_connector:
        notes_.append(
            CacheNote(
                "encoder-connector",
                "encoder outputs are transferred: scheduler and worker are not compared",
            )
        )
    return notes_


def find_setup(sample: CacheSample) -> CacheSetup | None:
    """How the server is set up, from the first process that reports it.

    An engine of a model without experts takes itself for the only one: those that are seen count.
    """
    setup = next((process.setup for process in sample.processes if process.setup), None)
    ranks = [process.dp_rank for process in sample.processes if process.dp_rank is not None]
    if setup is None or not ranks:
        return setup
    engines = max(setup.data_parallel or 1, max(ranks) + 1)
    return msgspec.structs.replace(setup, data_parallel=engines)


def format_cache_name(process: ProcessCaches, cache: Cache) -> str:
    """How findings name a cache."""
    return f"{cache.name} of {format_process(process)}"


def format_keys(keys: Iterable[object]) -> str:
    """The number of keys, and the first few."""
    listed: Sequence[str] = sorted(map(str, keys))
    more = ", …" if len(listed) > SHOWN else ""
    return f"{len(listed)}: " + ", ".join(shorten_key(key) for key in listed[:SHOWN]) + more


def format_key_lists(
    label: str, keys: Iterable[object], other_label: str, other_keys: Iterable[object]
) -> str:
    """Two lists of keys with their names; an empty list is left out."""
    pairs = ((label, list(keys)), (other_label, list(other_keys)))
    return "; ".join(f"{name}: {format_keys(listed)}" for name, listed in pairs if listed)


def shorten_key(key: str) -> str:
    """A key, cut to what a person can compare."""
    return key if len(key) <= 14 else f"{key[:12]}…"
