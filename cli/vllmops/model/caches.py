"""What the caches of a server's processes hold at one moment; sizes in bytes.

Taken by the agent, judged by `rules.caches`, kept in files by `model.snapshot_files`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .agent_state import SCHEMA, AgentAnswer
from .ranks import Placement


class LruCache(msgspec.Struct, frozen=True, kw_only=True, tag="lru"):
    """A multimodal cache over vLLM's LRUCache.

    Its three containers should have the same keys; only where they differ is there anything in
    the four lists of differences.

    Args:
        kind: ``mm-lru`` (mirrored in front end and engine) or ``mm-processor-only``.
        side: ``P0`` in the front end, ``P1`` in the engine; for one that mirrors nothing, the
            process's role.
        name: the class's name.
        order: keys by last use, oldest first; None unless asked for, they may be many.
        sizes: each key's bytes, aligned with `order`; None if the cache does not know.
        digest: stands for `order`: two caches with the same keys in the same order have the same;
            empty if requests are in flight, and the two sides can't be compared.
        oldest_key: the first key of the order, None without any.
        newest_key: the last one.
        order_only: keys in the order without data: eviction spins on them.
        data_only: keys with data that are not in the order: they can't be evicted.
        unsized: keys with data and no size.
        sized_only: keys with a size and no data.
        entries: keys with data.
        bytes: the size that the cache counts.
        sum_bytes: what the sizes add up to; None if the cache keeps none.
        capacity_bytes: the most it may hold.
        pinned_keys: keys that eviction passes over.
        pinned_only: those of them without data.
        hits: queries that were answered.
        queries: queries so far.
    """

    kind: str
    side: str
    name: str
    order: list[str] | None = None
    sizes: list[int | float | None] | None = None
    digest: str
    oldest_key: str | None = msgspec.field(default=None, name="oldest")
    newest_key: str | None = msgspec.field(default=None, name="newest")
    order_only: list[str] = []
    data_only: list[str] = []
    unsized: list[str] = []
    sized_only: list[str] = []
    pinned_keys: list[str] = msgspec.field(name="pinned")
    pinned_only: list[str]
    entries: int
    bytes: int | float
    sum_bytes: int | float | None
    capacity_bytes: int | float
    hits: int
    queries: int


class ShmCache(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """A multimodal cache in shared memory; its index lives in the writer, the front end, alone.

    Args:
        kind: ``mm-shm``.
        side: ``P0`` for the writer, ``worker`` for a reader.
        name: the class's name.
        writer: whether this is the side that holds the index.
        keys: keys, oldest first: the order in which they are evicted.
        bytes: of the ring buffer in use, gaps included.
        capacity_bytes: size of the ring buffer.
        max_object_bytes: the largest item that is cached at all.
        unpaired_keys: keys and ids whose two indexes do not lead to each other.
        unflagged_ids: ids without a writer's flag, or flags without an id.
        unmapped_ids: ids without a place in the ring buffer, or places without an id.
        without_updates: keys without prompt updates: a hit on them fails.
        hits: queries that were answered.
        queries: queries so far.
    """

    kind: str
    side: str
    name: str
    writer: bool
    capacity_bytes: int
    max_object_bytes: int
    keys: list[str] = []
    bytes: int | None = None
    unpaired_keys: list[str] = msgspec.field(default=[], name="unpaired")
    unflagged_ids: list[int] = msgspec.field(default=[], name="unflagged")
    unmapped_ids: list[int] = msgspec.field(default=[], name="unmapped")
    without_updates: list[str] = []
    hits: int | None = None
    queries: int | None = None


class EncoderCache(msgspec.Struct, frozen=True, kw_only=True, tag="encoder"):
    """The scheduler's side of the encoder cache; slots are encoder embeddings.

    Args:
        name: the manager's class name.
        slots: capacity.
        free_slots: not taken by any entry.
        freeable_slots: free, or taken by an entry that no request refers to.
        requests_by_key: each entry's key with the requests that refer to it.
        slots_by_key: each entry's slots; None in a vLLM that keeps no such record.
        freeable: entries that no request refers to with their slots, next to go first.
        inputs: for each request, the keys of those inputs that it holds in the cache; None in a
            vLLM that keeps no such record.
        unknown_requests: requests with references that the scheduler does not know, or has
            finished.
    """

    name: str
    slots: int
    free_slots: int
    freeable_slots: int
    requests_by_key: dict[str, list[str]] = msgspec.field(name="cached")
    freeable: dict[str, int]
    slots_by_key: dict[str, int] | None = None
    inputs: dict[str, list[str]] | None = None
    unknown_requests: list[str] = msgspec.field(default=[], name="strangers")


class EncoderDecoderCache(msgspec.Struct, frozen=True, kw_only=True, tag="encoder-decoder"):
    """The scheduler's side for an encoder-decoder model: it counts slots and keeps no entries.

    Args:
        name: the manager's class name.
        slots: capacity in encoder embeddings.
        free_slots: as the manager counts; it frees twice, so this may exceed `slots`.
        passing: keys that the worker is about to drop, or will be asked to drop.
    """

    name: str
    slots: int
    free_slots: int
    passing: list[str]


class WorkerEncoderCache(msgspec.Struct, frozen=True, kw_only=True, tag="worker-encoder"):
    """The worker's side of the encoder cache: the tensors.

    Args:
        name: the model runner's class name.
        rank: the worker's rank over the whole world.
        keys: keys in the order in which they came.
        bytes: of all tensors.
        device: where they are, None without any.
    """

    name: str
    rank: int | None
    keys: list[str]
    bytes: int
    device: str | None = None


Cache = LruCache | ShmCache | EncoderCache | EncoderDecoderCache | WorkerEncoderCache


class CacheSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which caches a server has; None if unknown.

    Args:
        model: the model as given to vLLM.
        multimodal: whether it takes anything but text.
        encoder_decoder: whether it is an encoder-decoder model.
        cache_gb: ``--mm-processor-cache-gb``, in GiB.
        cache_type: ``--mm-processor-cache-type``.
        api_processes: API servers.
        data_parallel: engines.
        tensor_parallel: workers that share a layer.
        pipeline_parallel: stages.
        encoder_connector: whether encoder outputs come from elsewhere.
        spread: whether engines or workers may be on other nodes.
    """

    model: str | None = None
    multimodal: bool | None = None
    encoder_decoder: bool | None = None
    cache_gb: float | None = None
    cache_type: str | None = None
    api_processes: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    encoder_connector: bool | None = None
    spread: bool | None = None


class ProcessCaches(AgentAnswer, frozen=True, kw_only=True):
    """One process's caches.

    Args:
        pid: process id.
        parent: process id of the parent.
        role: what the process is; the agent's own word until the CLI puts the true one in.
        caches: what was found.
        setup: None if the process has no engine and no worker.
        unfinished_requests: requests its scheduler has not finished, None without a scheduler.
        step: calls of ``schedule()`` so far, None without a scheduler.
        in_flight: HTTP requests being answered, None if not counted.
        started_requests: HTTP requests so far, None if not counted.
        problems: what could not be read, in words.
    """

    pid: int
    parent: int
    role: str
    caches: list[Cache] = msgspec.field(default_factory=list)
    setup: CacheSetup | None = None
    unfinished_requests: int | None = msgspec.field(default=None, name="unfinished")
    step: int | None = None
    in_flight: int | None = None
    started_requests: int | None = msgspec.field(default=None, name="started")
    problems: list[str] = msgspec.field(default_factory=list)


class ProcessGap(Placement, frozen=True, kw_only=True):
    """A process that did not answer.

    Args:
        role: what it is.
        pid: process id.
        code: a stable word, such as ``agent.stale``.
        reason: in words.
        hint: what to do.
        exit_code: the exit code of a command that needs this answer.
        beat_age_s: seconds since its last heartbeat, None without one.
    """

    role: str
    pid: int
    code: str
    reason: str = msgspec.field(name="why")
    hint: str
    exit_code: int = 5
    beat_age_s: float | None = None


class CacheSample(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of a server at about the same time.

    Args:
        taken_at: seconds since the epoch.
        processes: those that answered.
        gaps: those that did not.
        quiet: nothing was in flight and nothing began while it was taken, so that the two sides
            of a cache must agree.
    """

    taken_at: float
    processes: list[ProcessCaches]
    gaps: list[ProcessGap] = msgspec.field(default=[], name="silent")
    quiet: bool = False


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one server, enough to find again what was found; the content of a saved file.

    Args:
        schema: as in `AgentAnswer`.
        server: the server's name, or the pid of its first process.
        samples: oldest first; more than one where the first gave findings.
    """

    kind: Literal["caches"] = "caches"
    schema: int = SCHEMA
    server: str
    samples: Annotated[list[CacheSample], msgspec.Meta(min_length=1)]
