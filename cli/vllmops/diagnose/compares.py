"""Where front end and engine, scheduler and worker differ for good, though requests are in flight.

Scheduler and workers are read at the same step and must agree in each look. Front end and engine
are never at the same request, so only what can be proved counts, of the last look:

- An entry that no request has used since the first look is among the front end's oldest: using
  one moves it to the end of the order and counts a query, so as many as there were queries may
  have been used, and those before them were not.
- Whoever put such an entry there, or in its place, has reached the engine since, or is over
  (`Comparison.settled`); so the engine has it too, in the same place, or never will.
- While such an entry is left nothing newer was evicted, so what the engine alone has, in no
  reading of the front end's, the front end has lost before.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..protocol.caches import EncoderCache, EncoderDecoderCache, LruCache, ProcessCaches, Sample
from ..protocol.compares import Comparison, Look
from .caches import (
    Note,
    encoders,
    kind,
    mirrored,
    pair,
    runs_encoder,
    schedulers,
    setup_of,
    workers_of,
)
from .findings import Finding

# Notes that say that not everything was judged.
PARTLY = frozenset({"unsettled", "reset", "in-use"})


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two sides of a cache as the last look found them, requests in flight included.

    Args:
        kind: ``mm-lru`` or ``encoder``.
        sides: ``P0`` and ``P1``, or ``scheduler`` and ``worker``.
        roles: of the two processes.
        pids: theirs.
        entries: keys of each.
        common: keys that both have.
        only: keys that only the one has.
        same_order: whether the common keys have the same order; None where order means nothing.
        judged: of the first side's entries those of which it can be told whether they drifted.
    """

    kind: str
    sides: tuple[str, str]
    roles: tuple[str, str]
    pids: tuple[int, int]
    entries: tuple[int, int]
    common: int
    only: tuple[int, int]
    same_order: bool | None = None
    judged: int


def worthwhile(sample: Sample) -> bool:
    """Whether a server at work, as a sample found it, has two sides that could drift apart."""
    setup = setup_of(sample)
    return not sample.quiet and setup is not None and bool(setup.multimodal)


def undecided(comparison: Comparison) -> Iterator[Note]:
    """Why nothing at all was decided about front end and engine; nothing where something was."""
    told = [note for note in notes(comparison) if note.code in PARTLY]
    yield from told if not any(each.judged for each in mirrors(comparison)) else ()


def mirrors(comparison: Comparison) -> Iterator[Pair]:
    yield from (each for each in pairs(comparison) if each.kind == "mm-lru")


def drift(comparison: Comparison) -> list[Finding]:
    """What differs, worst first; what scheduler and worker differ in must do so in every look."""
    *earlier, last = (list(encoders(sample(each))) for each in comparison.looks)
    seen = [{(each.code, each.subject) for each in look} for look in earlier]
    found = [each for each in last if all((each.code, each.subject) in look for look in seen)]
    if (reduced := provable(comparison)) is not None:
        found += mirrored(reduced)
    return sorted(found, key=lambda each: -each.severity.rank)


def sample(look: Look) -> Sample:
    """A look as `diagnose.caches` takes it."""
    return Sample(taken_at=0.0, processes=[look.front, *look.engines])


def provable(comparison: Comparison) -> Sample | None:
    """The last look without those entries that requests in flight may explain.

    Returns:
        None where there is nothing to judge, or nothing that can be judged.
    """
    earlier, later = pair(sample(comparison.looks[0])), pair(sample(comparison.looks[-1]))
    after, end = front(comparison.after), front(comparison.end)
    if not (earlier and later and after and end and comparison.settled):
        return None
    (_, then), _ = earlier
    (process, now), (engine, back) = later
    used = end.queries - then.queries
    if used < 0:
        return None  # it was reset meanwhile
    order = after.order or []
    calm = set(order[: max(len(order) - used, 0)])
    beyond = set(back.order or ()).difference(then.order or (), now.order or (), order)
    judged = calm | beyond if calm or not used else set()
    return Sample(
        taken_at=0.0,
        processes=[
            msgspec.structs.replace(process, caches=[only(after, judged)]),
            msgspec.structs.replace(engine, caches=[only(back, judged)]),
        ],
    )


def front(process: ProcessCaches | None) -> LruCache | None:
    """The front end's mirrored cache."""
    caches = process.caches if process else []
    lrus = (each for each in caches if isinstance(each, LruCache))
    return next((each for each in lrus if each.kind == "mm-lru"), None)


def only(cache: LruCache, keys: set[str]) -> LruCache:
    """A cache with some of its keys."""
    held = zip(cache.order or (), cache.sizes or (), strict=True)
    kept = [(key, size) for key, size in held if key in keys]
    order, sizes = [key for key, _ in kept], [size for _, size in kept]
    return msgspec.structs.replace(cache, order=order, sizes=sizes)


def pairs(comparison: Comparison) -> Iterator[Pair]:
    """The sides that there are to compare."""
    whole = sample(comparison.looks[-1])
    if (sides := pair(whole)) is not None:
        (one, sent), (other, held) = sides
        reduced = provable(comparison)
        judged = pair(reduced) if reduced is not None else None
        yield both(
            "mm-lru",
            ("P0", one, sent.order or []),
            ("P1", other, held.order or []),
            judged=len(judged[0][1].order or ()) if judged else 0,
            ordered=True,
        )
    setup = setup_of(whole)
    if setup is not None and setup.encoder_connector:
        return
    for process, cache in schedulers(whole):
        for worker, outputs in workers_of(process, whole):
            keys = cache.passing if isinstance(cache, EncoderDecoderCache) else list(cache.cached)
            told = isinstance(cache, EncoderCache) and runs_encoder(outputs, setup)
            yield both(
                "encoder",
                ("scheduler", process, keys),
                ("worker", worker, outputs.keys),
                judged=len(keys) if told else 0,
            )


def both(
    kind: str,
    one: tuple[str, ProcessCaches, list[str]],
    other: tuple[str, ProcessCaches, list[str]],
    *,
    judged: int,
    ordered: bool = False,
) -> Pair:
    (first, process, keys), (second, peer, others) = one, other
    mine, theirs = set(keys), set(others)
    shared = [key for key in keys if key in theirs]
    return Pair(
        kind=kind,
        sides=(first, second),
        roles=(process.role, peer.role),
        pids=(process.pid, peer.pid),
        entries=(len(keys), len(others)),
        common=len(shared),
        only=(len(mine - theirs), len(theirs - mine)),
        same_order=shared == [key for key in others if key in mine] if ordered else None,
        judged=judged,
    )


def notes(comparison: Comparison) -> list[Note]:
    """What there is not to compare, and what can't be told."""
    last = comparison.looks[-1]
    whole = sample(last)
    told = kind(setup_of(whole))
    if pair(whole) is None:
        return told
    if not comparison.settled:
        told.append(
            Note(
                "unsettled",
                f"a request has been with the front end for {comparison.waited_s:.1f} s without "
                "reaching the engine: what P0 and P1 differ in may be its doing, and was not "
                "judged",
            )
        )
    elif provable(comparison) is None:
        told.append(Note("reset", "the caches were reset meanwhile: P0 and P1 were not judged"))
    else:
        (each, *_) = pairs(comparison)
        if each.judged < each.entries[0]:
            told.append(
                Note(
                    "in-use",
                    f"{each.entries[0] - each.judged} of P0's {each.entries[0]} entries may have "
                    "been used meanwhile, and were not judged",
                )
            )
    return told
