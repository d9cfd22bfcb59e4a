"""What can be told of two looks at a server at work; the caches are vLLM's kind, simulated."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import msgspec
import pytest

from vllmops.model.cache_comparison import CacheComparison, ComparisonSample
from vllmops.model.caches import (
    CacheSetup,
    EncoderCache,
    LruCache,
    ProcessCaches,
    WorkerEncoderCache,
)
from vllmops.rules.cache_comparison import (
    diagnose_comparison,
    explain_missing_comparison,
    list_cache_pairs,
    make_comparison_notes,
)
from vllmops.rules.diagnosis import diagnose_snapshot

from .sample_servers import healthy


def lru(side: str, order: list[str], queries: int = 0) -> LruCache:
    return LruCache(
        kind="mm-lru",
        side=side,
        name="cache",
        order=order,
        sizes=[1] * len(order),
        digest="",
        pinned_keys=[],
        pinned_only=[],
        entries=len(order),
        bytes=len(order),
        sum_bytes=len(order),
        capacity_bytes=100,
        hits=0,
        queries=queries,
    )


def front(order: str | list[str], queries: int = 0) -> ProcessCaches:
    return ProcessCaches(pid=1, parent=0, role="api", caches=[lru("P0", list(order), queries)])


def engine(order: str | list[str], scheduler: str = "", worker: str = "") -> list[ProcessCaches]:
    """An engine and its worker."""
    encoder = EncoderCache(
        name="manager",
        slots=9,
        free_slots=9,
        freeable_slots=9,
        requests_by_key={key: [] for key in scheduler},
        freeable={},
    )
    outputs = WorkerEncoderCache(name="runner", rank=0, keys=list(worker), bytes=0)
    setup = CacheSetup(model="m", multimodal=True, cache_gb=4.0)
    return [
        ProcessCaches(
            pid=2, parent=1, role="engine", caches=[lru("P1", list(order)), encoder], setup=setup
        ),
        ProcessCaches(pid=3, parent=2, role="worker", caches=[outputs]),
    ]


def make_comparison_sample(before: ProcessCaches, engines: list[ProcessCaches]) -> ComparisonSample:
    return ComparisonSample(front=before, engines=engines, engine_requests=0, rendering=0)


def make_comparison(
    then: ProcessCaches,
    now: ProcessCaches,
    engines: list[ProcessCaches],
    after: ProcessCaches | None = None,
    *,
    settled: bool = True,
) -> CacheComparison:
    looks = [make_comparison_sample(then, engines), make_comparison_sample(now, engines)]
    after = after or now
    return CacheComparison(
        samples=looks, front_after=after, end=after, settled=settled, waited_s=0.5
    )


def codes(comparison: CacheComparison) -> list[str]:
    return sorted(item.code.partition(".")[2] for item in diagnose_comparison(comparison))


@pytest.mark.parametrize(
    ("sent", "held", "found"),
    [
        ("abc", "abc", []),
        ("abc", "ab", ["front-only"]),
        ("ab", "abc", ["engine-only"]),
        ("abc", "acb", ["order-drift"]),
        ("abcd", "cbe", ["engine-only", "front-only", "order-drift"]),
        ("", "a", ["engine-only"]),
        ("a", "", ["front-only"]),
    ],
)
def test_with_nothing_used_meanwhile_everything_is_judged(
    sent: str, held: str, found: list[str]
) -> None:
    comparison = make_comparison(front(sent, 7), front(sent, 7), engine(held))
    assert codes(comparison) == found
    assert next(list_cache_pairs(comparison)).judged_entries == len(sent)


def test_keys_used_during_the_comparison_are_not_judged() -> None:
    # Two queries: d is new, and a was used again; neither has come to the engine.
    comparison = make_comparison(front("abc", 5), front("bcad", 7), engine("abc"))
    assert codes(comparison) == []
    assert next(list_cache_pairs(comparison)).judged_entries == 2
    assert [note.code for note in make_comparison_notes(comparison)] == ["in-use"]
    # b has not been used: that it is missing has another reason.
    assert codes(make_comparison(front("abc", 5), front("bcad", 7), engine("ac"))) == ["front-only"]
    assert codes(make_comparison(front("abc", 5), front("bcad", 7), engine("bca"))) == []
    assert codes(make_comparison(front("abc", 5), front("bcad", 7), engine("cba"))) == [
        "order-drift"
    ]


def test_note_explains_a_comparison_without_a_result() -> None:
    def list_note_codes(comparison: CacheComparison) -> list[str]:
        return [note.code for note in explain_missing_comparison(comparison)]

    assert list_note_codes(make_comparison(front("abc", 5), front("bcad", 7), engine("abc"))) == []
    assert list_note_codes(make_comparison(front("ab", 5), front("cd", 9), engine("xy"))) == [
        "in-use"
    ]
    assert list_note_codes(make_comparison(front("a"), front("a"), engine("a"), settled=False)) == [
        "unsettled"
    ]
    assert list_note_codes(make_comparison(front("a", 5), front("", 0), engine(""))) == ["reset"]
    assert list_note_codes(make_comparison(front(""), front(""), engine(""))) == []


def test_with_all_used_meanwhile_nothing_is_judged() -> None:
    assert codes(make_comparison(front("ab", 5), front("cd", 9), engine("xy"))) == []


def test_eviction_in_progress_is_not_drift() -> None:
    # A request that is on its way has made the front end drop a; the engine has not yet.
    assert codes(make_comparison(front("abc", 5), front("bcd", 6), engine("abc"))) == []
    # Dropped by the front end between the last look and the reading after it.
    assert (
        codes(make_comparison(front("abc", 5), front("abc", 5), engine("bcd"), front("bcd", 6)))
        == []
    )


def test_a_request_that_never_reaches_the_engine_leaves_it_open() -> None:
    comparison = make_comparison(front("abc", 5), front("abc", 5), engine("ab"), settled=False)
    assert codes(comparison) == []
    (note,) = make_comparison_notes(comparison)
    assert note.code == "unsettled"
    assert "0.5 s" in note.text
    assert next(list_cache_pairs(comparison)).judged_entries == 0


def test_a_reset_meanwhile_leaves_it_open() -> None:
    comparison = make_comparison(front("abc", 5), front("a", 1), engine("b"))
    assert codes(comparison) == []
    assert [note.code for note in make_comparison_notes(comparison)] == ["reset"]


def test_scheduler_and_worker_must_differ_in_both_looks() -> None:
    lacks, leaks = engine("", "ab", "a"), engine("", "a", "ab")
    for engines, code in ((lacks, "worker-misses"), (leaks, "worker-leak")):
        assert codes(make_comparison(front(""), front(""), engines)) == [code]
        once = msgspec.structs.replace(
            make_comparison(front(""), front(""), engines),
            samples=[
                make_comparison_sample(front(""), engine("", "a", "a")),
                make_comparison_sample(front(""), engines),
            ],
        )
        assert codes(once) == []


class Simulated:
    """Front end and engine with requests on their way, as vLLM's two LRU caches see them."""

    def __init__(self, capacity: int, choice: random.Random) -> None:
        self.capacity = capacity
        self.choice = choice
        self.sent: OrderedDict[str, None] = OrderedDict()
        self.held: OrderedDict[str, None] = OrderedDict()
        self.queries = 0
        self.half: list[str] = []
        self.way: deque[list[str]] = deque()

    def touch(self, cache: OrderedDict[str, None], keys: list[str]) -> None:
        for key in keys:
            if key in cache:
                cache.move_to_end(key)

    def put(self, cache: OrderedDict[str, None], keys: list[str]) -> None:
        for key in keys:
            cache[key] = None
            cache.move_to_end(key)
            while len(cache) > self.capacity:
                cache.popitem(last=False)

    def render(self) -> None:
        """The next half of a request: it touches its items first, and counts them afterwards."""
        if keys := self.half:
            self.half = []
            self.put(self.sent, keys)
            self.queries += len(keys)
            self.way.append(keys)
        else:
            keys = [f"k{self.choice.randrange(2 * self.capacity)}" for _ in range(2)]
            self.half = list(dict.fromkeys(keys))
            self.touch(self.sent, self.half)

    def arrive(self) -> None:
        if self.way:
            keys = self.way.popleft()
            self.touch(self.held, keys)
            self.put(self.held, keys)

    def run_random_steps(self, most: int) -> None:
        for _ in range(self.choice.randrange(most)):
            self.choice.choice((self.render, self.arrive))()

    def settle(self) -> None:
        """Those that are on their way now get to the engine."""
        if self.half:
            self.render()
        while self.way:
            self.arrive()

    def front(self) -> ProcessCaches:
        return front(list(self.sent), self.queries)

    def engine(self) -> list[ProcessCaches]:
        return engine(list(self.held))

    def compare_sides(self) -> CacheComparison:
        then = self.front()
        self.run_random_steps(3)
        first = self.engine()
        self.settle()
        self.run_random_steps(4)
        now = self.front()
        self.run_random_steps(4)
        last = self.engine()
        self.run_random_steps(4)
        after = self.front()
        if self.half:
            self.render()
        return CacheComparison(
            samples=[make_comparison_sample(then, first), make_comparison_sample(now, last)],
            front_after=after,
            end=self.front(),
            settled=True,
        )


@pytest.mark.parametrize("capacity", [2, 3, 8, 30])
def test_requests_on_their_way_are_never_taken_for_drift(capacity: int) -> None:
    server = Simulated(capacity, random.Random(capacity))
    judged = 0
    for _ in range(2000):
        server.run_random_steps(6)
        comparison = server.compare_sides()
        assert codes(comparison) == []
        judged += next(list_cache_pairs(comparison)).judged_entries
    assert judged > 0


@pytest.mark.parametrize("side", ["sent", "held"])
def test_drift_among_requests_on_their_way_is_told(side: str) -> None:
    server = Simulated(30, random.Random(7))
    for _ in range(200):
        server.run_random_steps(6)
    getattr(server, side)["ghost"] = None
    found = [codes(server.compare_sides()) for _ in range(3)]
    assert all({"sent": "front-only", "held": "engine-only"}[side] in item for item in found[1:])


def test_no_cache_to_compare() -> None:
    text = ProcessCaches(pid=1, parent=0, role="api")
    alone: list[Any] = [
        ProcessCaches(pid=2, parent=1, role="engine", setup=CacheSetup(model="m", multimodal=False))
    ]
    comparison = make_comparison(text, text, alone)
    assert (codes(comparison), list(list_cache_pairs(comparison))) == ([], [])
    assert [note.code for note in make_comparison_notes(comparison)] == ["text-model"]


def test_damaged_cache_is_not_compared() -> None:
    engines = engine("abcd")
    (cache, *rest) = engines[0].caches
    assert isinstance(cache, LruCache)
    assert codes(make_comparison(front("abc"), front("abc"), engines)) == ["engine-only"]
    for sizes in ([1], None):
        damaged = msgspec.structs.replace(cache, sizes=sizes)
        spoilt = [msgspec.structs.replace(engines[0], caches=[damaged, *rest]), *engines[1:]]
        assert codes(make_comparison(front("abc"), front("abc"), spoilt)) == []
    nothing = CacheComparison(samples=[], front_after=front("a"), end=front("a"), settled=True)
    assert diagnose_snapshot(healthy(comparisons=(nothing,))).findings == ()
