"""Lasting differences between the sides of caches while requests are in flight.

Scheduler and workers are read at the same step and must agree in each sample. Front end and engine
are never at the same request, so only what can be proved counts, of the last sample:

- A use of an entry moves it to the end of the LRU order and counts a query. If there were N queries
  since the first sample, at most the last N entries were used; the older ones were not.
- The request that added or moved such an older entry has reached the engine since, or is over
  (`CacheComparison.settled`). So the engine has the entry, in the same place, or never will.
- While such an entry is left, nothing newer was evicted. So an entry that the engine has, and that
  no reading of the front end has, was lost by the front end before.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..model.cache_comparison import CacheComparison, ComparisonSample
from ..model.caches import CacheSample, EncoderCache, EncoderDecoderCache, LruCache, ProcessCaches
from ..model.findings import Finding
from .caches import (
    CacheNote,
    compare_encoder_caches,
    compare_mirrored_caches,
    find_mirrored_caches,
    find_setup,
    has_all_keys,
    list_scheduler_caches,
    make_setup_notes,
    runs_encoder,
    select_persistent_findings,
    select_worker_caches,
)

# Codes of notes: some entries were not compared.
PARTLY = frozenset({"unsettled", "reset", "in-use"})


class CachePair(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides of a cache in the last sample, with requests in flight.

    Args:
        kind: ``mm-lru`` or ``encoder``.
        sides: ``P0`` and ``P1``, or ``scheduler`` and ``worker``.
        roles: of the two processes.
        pids: theirs.
        ranks: theirs, for a person.
        entries: keys of each.
        common_keys: keys that both have.
        exclusive_keys: keys that only the one side has.
        same_order: whether the common keys have the same order; None if order means nothing.
        judged_entries: how many of the first side's entries could be compared.
    """

    kind: str
    sides: tuple[str, str]
    roles: tuple[str, str]
    pids: tuple[int, int]
    ranks: tuple[str, str] = ("", "")
    entries: tuple[int, int]
    common_keys: int = msgspec.field(name="common")
    exclusive_keys: tuple[int, int] = msgspec.field(name="only")
    same_order: bool | None = None
    judged_entries: int = msgspec.field(name="judged")


def should_compare(sample: CacheSample) -> bool:
    """Whether a sample is of a busy server with two sides that may differ."""
    setup = find_setup(sample)
    return not sample.quiet and setup is not None and bool(setup.multimodal)


def explain_missing_comparison(comparison: CacheComparison) -> Iterator[CacheNote]:
    """Why no entry of front end and engine could be compared; nothing if some could."""
    if not any(mirror.judged_entries for mirror in select_mirrored_pairs(comparison)):
        yield from (note for note in make_comparison_notes(comparison) if note.code in PARTLY)


def select_mirrored_pairs(comparison: CacheComparison) -> Iterator[CachePair]:
    """Front end and engine, if one mirrors the other."""
    yield from (pair for pair in list_cache_pairs(comparison) if pair.kind == "mm-lru")


def diagnose_comparison(comparison: CacheComparison) -> list[Finding]:
    """What differs, worst first; scheduler and worker must differ in every sample."""
    *earlier, last = (
        list(compare_encoder_caches(make_sample(look))) for look in comparison.samples
    )
    findings_ = select_persistent_findings(earlier, last)
    if (reduced := select_provable_keys(comparison)) is not None:
        findings_ += compare_mirrored_caches(reduced)
    return sorted(findings_, key=lambda finding: -finding.severity.rank)


def make_sample(sample: ComparisonSample) -> CacheSample:
    """A comparison's sample, as `rules.caches` takes it."""
    return CacheSample(taken_at=0.0, processes=[sample.front, *sample.engines])


def select_provable_keys(comparison: CacheComparison) -> CacheSample | None:
    """The last sample without the entries that requests in flight may explain.

    Returns:
        None if there is nothing to compare, or nothing that can be compared.
    """
    earlier, later = (
        find_mirrored_caches(make_sample(comparison.samples[0])),
        find_mirrored_caches(make_sample(comparison.samples[-1])),
    )
    after, end = find_front_cache(comparison.front_after), find_front_cache(comparison.end)
    if not (earlier and later and after and end and comparison.settled):
        return None
    (_, then), _ = earlier
    (process, now), (engine, back) = later
    used = end.queries - then.queries
    if used < 0 or not (has_all_keys(after) and has_all_keys(back)):
        return None  # the cache was reset in between, or the file is damaged
    order = after.order or []
    unused = set(order[: max(len(order) - used, 0)])
    beyond = set(back.order or ()).difference(then.order or (), now.order or (), order)
    judged = unused | beyond if unused or not used else set()
    return CacheSample(
        taken_at=0.0,
        processes=[
            msgspec.structs.replace(process, caches=[select_cache_keys(after, judged)]),
            msgspec.structs.replace(engine, caches=[select_cache_keys(back, judged)]),
        ],
    )


def find_front_cache(process: ProcessCaches | None) -> LruCache | None:
    """The front end's mirrored cache."""
    caches = process.caches if process else []
    lrus = (cache for cache in caches if isinstance(cache, LruCache))
    return next((cache for cache in lrus if cache.kind == "mm-lru"), None)


def select_cache_keys(cache: LruCache, keys: set[str]) -> LruCache:
    """A cache with some of its keys."""
    held = zip(cache.order or (), cache.sizes or (), strict=True)
    kept = [(key, size) for key, size in held if key in keys]
    order, sizes = [key for key, _ in kept], [size for _, size in kept]
    return msgspec.structs.replace(cache, order=order, sizes=sizes)


def list_cache_pairs(comparison: CacheComparison) -> Iterator[CachePair]:
    """The sides that can be compared."""
    last = make_sample(comparison.samples[-1])
    if (sides := find_mirrored_caches(last)) is not None:
        (one, sent), (other, held) = sides
        reduced = select_provable_keys(comparison)
        judged = find_mirrored_caches(reduced) if reduced is not None else None
        yield make_cache_pair(
            "mm-lru",
            ("P0", one, sent.order or []),
            ("P1", other, held.order or []),
            judged_entries=len(judged[0][1].order or ()) if judged else 0,
            ordered=True,
        )
    setup = find_setup(last)
    if setup is not None and setup.encoder_connector:
        return
    for process, cache in list_scheduler_caches(last):
        for worker, outputs in select_worker_caches(process, last):
            keys = (
                cache.passing
                if isinstance(cache, EncoderDecoderCache)
                else list(cache.requests_by_key)
            )
            comparable = isinstance(cache, EncoderCache) and runs_encoder(outputs, setup)
            yield make_cache_pair(
                "encoder",
                ("scheduler", process, keys),
                ("worker", worker, outputs.keys),
                judged_entries=len(keys) if comparable else 0,
            )


def make_cache_pair(
    kind: str,
    first_side: tuple[str, ProcessCaches, list[str]],
    second_side: tuple[str, ProcessCaches, list[str]],
    *,
    judged_entries: int,
    ordered: bool = False,
) -> CachePair:
    (first, process, keys), (second, peer, others) = first_side, second_side
    mine, theirs = set(keys), set(others)
    shared = [key for key in keys if key in theirs]
    return CachePair(
        kind=kind,
        sides=(first, second),
        roles=(process.role, peer.role),
        pids=(process.pid, peer.pid),
        ranks=(process.ranks, peer.ranks),
        entries=(len(keys), len(others)),
        common_keys=len(shared),
        exclusive_keys=(len(mine - theirs), len(theirs - mine)),
        same_order=shared == [key for key in others if key in mine] if ordered else None,
        judged_entries=judged_entries,
    )


def make_comparison_notes(comparison: CacheComparison) -> list[CacheNote]:
    """What is not there to compare, and what could not be compared."""
    last = make_sample(comparison.samples[-1])
    notes_ = make_setup_notes(find_setup(last))
    if find_mirrored_caches(last) is None:
        return notes_
    if not comparison.settled:
        notes_.append(
            CacheNote(
                "unsettled",
                f"a request has been in the front end for {comparison.waited_s:.1f} s without "
                "reaching the engine: P0 and P1 were not compared, because it may explain what "
                "differs",
            )
        )
    elif select_provable_keys(comparison) is None:
        notes_.append(
            CacheNote("reset", "the caches were reset in between: P0 and P1 were not compared")
        )
    else:
        (front_end, *_) = list_cache_pairs(comparison)
        if front_end.judged_entries < front_end.entries[0]:
            notes_.append(
                CacheNote(
                    "in-use",
                    f"{front_end.entries[0] - front_end.judged_entries} of P0's "
                    f"{front_end.entries[0]} "
                    "entries were not compared, because requests may have used them in between",
                )
            )
    return notes_
