"""The judge of caches: nothing on healthy ones whatever was done to them, each fault by its name.

The caches are real `cachetools` ones with what vLLM's LRUCache adds; tests/live repeats it on
vLLM's own classes.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cachetools
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllmops.agent.state import caches as agent
from vllmops.model.caches import (
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
from vllmops.model.findings import Rule, Severity, find_worst_severity
from vllmops.rules import caches as judge
from vllmops.rules.caches import (
    CATALOGUE,
    check_cache,
    check_sample,
    diagnose_caches,
    make_cache_notes,
    needs_all_keys,
)

CAPACITY = 100


class Lru(cachetools.LRUCache):  # type: ignore[type-arg]
    """As ``vllm/utils/cache.py``, as far as its state goes."""

    _LRUCache__order: Any

    def __init__(self, maxsize: float = CAPACITY, sized: bool = True) -> None:
        super().__init__(maxsize, (lambda value: value) if sized else None)
        self.pinned_items: set[str] = set()
        self._hits = self._total = 0

    def get(self, key: str, default: Any = None) -> Any:
        self._total += 1
        self._hits += key in self
        return super().get(key, default)

    def touch(self, key: str) -> None:
        if key in self:
            self._LRUCache__order.move_to_end(key)

    def popitem(self) -> Any:
        key = next(key for key in self._LRUCache__order if key not in self.pinned_items)
        return key, self.pop(key)


def observe_cache(cache: Lru, name: str = "LruKeyReplicatedSenderCache") -> LruCache:
    holder = type(name, (SimpleNamespace,), {})
    return agent.observe_lru_cache(holder(_cache=cache), keys=True)


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "touch", "pop", "pin"]),
        st.integers(0, 30).map(str),
        st.integers(0, 40),
    ),
    max_size=200,
)


def exercise(cache: Lru, todo: list[tuple[str, str, int]]) -> None:
    for what, key, size in todo:
        if what == "put":
            cache[key] = size
        elif what == "get":
            cache.get(key)
        elif what == "touch":
            cache.touch(key)
        elif what == "pop":
            cache.pop(key, None)
            cache.pinned_items.discard(key)
        elif key in cache and not cache.pinned_items:
            cache.pinned_items.add(key)


@given(operations, st.booleans())
@settings(max_examples=200, deadline=None)
def test_consistent_cache_yields_no_findings(todo: list[tuple[str, str, int]], sized: bool) -> None:
    cache = Lru(sized=sized)
    exercise(cache, todo)
    before = (list(cache._LRUCache__order), cache._hits, cache._total, cache.currsize)
    snapshot = observe_cache(cache)
    assert check_cache(snapshot) == []
    assert (list(cache._LRUCache__order), cache._hits, cache._total, cache.currsize) == before
    assert snapshot.order == before[0]
    assert (snapshot.entries, snapshot.bytes) == (len(cache), cache.currsize)
    assert (snapshot.hits, snapshot.queries) == (cache._hits, cache._total)


def ghost(cache: Any) -> None:
    cache._LRUCache__order["ghost"] = None


def unevictable(cache: Any) -> None:
    del cache._LRUCache__order[next(iter(cache._LRUCache__order))]


def drop_entry_size(cache: Any) -> None:
    # Its size goes with it, or two things were wrong.
    cache._Cache__currsize -= cache._Cache__size.pop(next(iter(cache._Cache__size)))


def sized_only(cache: Any) -> None:
    cache._Cache__size["gone"] = 0


def sum_off(cache: Any) -> None:
    cache._Cache__currsize -= 1


def overfull(cache: Any) -> None:
    cache._Cache__maxsize = cache._Cache__currsize - 1


def pin_missing_item(cache: Any) -> None:
    cache.pinned_items.add("gone")


def hits(cache: Any) -> None:
    cache._hits = cache._total + 1


FAULTS: dict[Callable[[Any], None], str] = {
    ghost: "mm-cache.ghost-keys",
    unevictable: "mm-cache.unevictable-keys",
    drop_entry_size: "mm-cache.size-keys",
    sized_only: "mm-cache.size-keys",
    sum_off: "mm-cache.size-sum",
    overfull: "mm-cache.over-capacity",
    pin_missing_item: "mm-cache.pinned-missing",
    hits: "mm-cache.hit-count",
}


@pytest.mark.parametrize("fault", FAULTS)
@given(operations)
@settings(max_examples=30, deadline=None)
def test_each_cache_corruption_yields_only_its_finding(
    fault: Callable[[Any], None], todo: list[tuple[str, str, int]]
) -> None:
    cache = Lru()
    exercise(cache, todo)
    cache["last"] = 1
    fault(cache)
    assert [rule.code for rule, _ in check_cache(observe_cache(cache))] == [FAULTS[fault]]


def test_ghost_keys_are_named_in_the_evidence() -> None:
    cache = Lru()
    for key in "abcdefgh":
        cache._LRUCache__order[key * 20] = None
    ((rule, evidence),) = check_cache(observe_cache(cache))
    assert rule.severity is Severity.ERROR
    assert evidence == "8: aaaaaaaaaaaa…, bbbbbbbbbbbb…, cccccccccccc…, …"


# Front end against engine.


def lru(side: str, order: str = "abc", **changes: Any) -> LruCache:
    cache = LruCache(
        kind="mm-lru",
        side=side,
        name="Cache",
        order=list(order),
        sizes=[1] * len(order),
        digest=order,
        pinned_keys=[],
        pinned_only=[],
        entries=len(order),
        bytes=len(order),
        sum_bytes=len(order),
        capacity_bytes=10,
        hits=0,
        queries=0,
    )
    return replace(cache, **changes)


def encoder(**changes: Any) -> EncoderCache:
    """A consistent one: "a" in use by one request, "b" freeable."""
    cache = EncoderCache(
        name="EncoderCacheManager",
        slots=10,
        free_slots=3,
        freeable_slots=6,
        requests_by_key={"a": ["r1"], "b": []},
        slots_by_key={"a": 4, "b": 3},
        freeable={"b": 3},
        inputs={"r1": ["a"]},
    )
    return replace(cache, **changes)


def worker(keys: str = "ab", **changes: Any) -> WorkerEncoderCache:
    cache = WorkerEncoderCache(name="Runner", rank=0, keys=list(keys), bytes=0)
    return replace(cache, **changes)


def server(
    front: Any = None, back: Any = None, scheduler: Any = None, *workers: Any, **changes: Any
) -> CacheSample:
    api = ProcessCaches(pid=1, parent=0, role="api", caches=[front or lru("P0")])
    engine = ProcessCaches(
        pid=2, parent=1, role="engine", caches=[back or lru("P1"), scheduler or encoder()]
    )
    others = [
        ProcessCaches(pid=3 + rank, parent=2, role="worker", caches=[item])
        for rank, item in enumerate(workers or [worker()])
    ]
    sample = CacheSample(taken_at=0.0, processes=[api, engine, *others], quiet=True)
    return replace(sample, **changes)


def codes(sample: CacheSample) -> list[str]:
    return [finding.code for finding in check_sample(sample)]


def test_a_healthy_server_gives_nothing() -> None:
    assert codes(server()) == []


@pytest.mark.parametrize(
    ("front", "back", "expected"),
    [
        ("abcd", "abc", {"mm-cache.front-only": "warning"}),
        ("abc", "abcd", {"mm-cache.engine-only": "info"}),
        ("abc", "acb", {"mm-cache.order-drift": "info"}),
        (
            "abcd",
            "bae",
            {
                "mm-cache.front-only": "warning",
                "mm-cache.engine-only": "info",
                "mm-cache.order-drift": "info",
            },
        ),
        ("", "", {}),
    ],
)
def test_drift(front: str, back: str, expected: dict[str, str]) -> None:
    sample = server(lru("P0", front), lru("P1", back))
    assert {item.code: item.severity for item in check_sample(sample)} == expected
    assert codes(replace(sample, quiet=False)) == []


def test_without_keys_it_takes_them_to_decide() -> None:
    def light(front: str, back: str, **changes: Any) -> CacheSample:
        sides = (lru("P0", front), lru("P1", back))
        return server(*(replace(side, order=None, sizes=None) for side in sides), **changes)

    assert not needs_all_keys(light("abc", "abc"))
    assert needs_all_keys(light("abc", "acb"))
    assert needs_all_keys(light("abc", "ab"))
    assert codes(light("abc", "ab")) == []
    assert not needs_all_keys(light("abc", "ab", quiet=False))
    assert not needs_all_keys(server(lru("P0", "abc"), lru("P1", "ab")))


def test_sizes_that_differ() -> None:
    assert codes(server(lru("P0", sizes=[1, 2, 1]))) == ["mm-cache.size-drift"]


@pytest.mark.parametrize(
    "alone", [lru("P0", "xyz", kind="mm-processor-only"), lru("engine", "xyz")]
)
def test_caches_that_mirror_nothing_are_not_compared(alone: LruCache) -> None:
    assert codes(server(alone, lru("P1"))) == []


# Encoder caches.


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"slots_by_key": {"a": 4, "b": 3, "c": 0}}, "encoder-cache.keys"),
        ({"slots_by_key": {"a": 5, "b": 3}}, "encoder-cache.slot-sum"),
        ({"freeable_slots": 7}, "encoder-cache.freeable-sum"),
        ({"freeable": {"b": 3, "a": 0}}, "encoder-cache.freeable-keys"),
        ({"freeable": {"b": 2}, "freeable_slots": 5}, "encoder-cache.freeable-keys"),
        ({"slots": 5, "free_slots": -2, "freeable_slots": 1}, "encoder-cache.slot-bounds"),
        ({"inputs": {"r1": []}}, "encoder-cache.references"),
        ({"inputs": {"r1": ["a"], "r2": ["b"]}}, "encoder-cache.references"),
        ({"inputs": {}, "unknown_requests": ["r1"]}, "encoder-cache.finished-references"),
    ],
)
def test_each_encoder_cache_corruption_yields_its_finding(
    changes: dict[str, Any], code: str
) -> None:
    assert [rule.code for rule, _ in check_cache(encoder(**changes))] == [code]


def test_a_vllm_that_keeps_fewer_records_is_judged_by_what_it_has() -> None:
    assert check_cache(encoder(slots_by_key=None, inputs=None)) == []
    broken = encoder(slots_by_key=None, inputs=None, freeable={})
    assert {rule.code for rule, _ in check_cache(broken)} == {
        "encoder-cache.freeable-sum",
        "encoder-cache.freeable-keys",
    }


def test_scheduler_against_worker() -> None:
    assert codes(server(None, None, None, worker("a"))) == ["encoder-cache.worker-misses"]
    assert codes(server(None, None, None, worker("abc"))) == ["encoder-cache.worker-leak"]
    assert codes(server(None, None, None, worker("abc"), quiet=False)) == []
    assert codes(server(None, None, None, worker(), worker("a", rank=1))) == [
        "encoder-cache.worker-misses"
    ]


def test_later_stages_do_not_encode() -> None:
    sample = server(None, None, None, worker(), worker("", rank=1))
    setup = CacheSetup(multimodal=True, pipeline_parallel=2, tensor_parallel=1)
    staged = replace(sample.processes[1], setup=setup)
    sample = replace(sample, processes=[sample.processes[0], staged, *sample.processes[2:]])
    assert codes(sample) == []
    assert codes(server(None, None, None, worker(), worker("", rank=1))) != []


def test_engine_is_compared_only_with_its_own_workers() -> None:
    def engine(pid: int, key: str) -> list[ProcessCaches]:
        cache = encoder(
            requests_by_key={key: []},
            slots_by_key={key: 7},
            freeable={key: 7},
            inputs={},
            freeable_slots=10,
        )
        return [
            ProcessCaches(pid=pid, parent=1, role="engine", caches=[cache]),
            ProcessCaches(pid=pid + 1, parent=pid, role="worker", caches=[worker(key)]),
        ]

    # Processes of another node may have the same pids.
    there = [replace(process, node="two") for process in engine(10, "b")]
    for others in (engine(20, "b"), there):
        sample = CacheSample(taken_at=0.0, processes=[*engine(10, "a"), *others], quiet=True)
        assert codes(sample) == []


def test_engine_is_compared_with_workers_of_its_dp_rank() -> None:
    """Below Ray no worker is its engine's child."""

    def engine(rank: int, keys: str) -> list[ProcessCaches]:
        cache = encoder(
            requests_by_key={key: [] for key in keys},
            slots_by_key=dict.fromkeys(keys, 7),
            freeable=dict.fromkeys(keys, 7),
            inputs={},
            freeable_slots=3 + 7 * len(keys),
        )
        place: dict[str, Any] = {"dp_rank": rank, "ranks": f"DP{rank}"}
        return [
            ProcessCaches(pid=10 + rank, parent=1, role="engine", caches=[cache], **place),
            ProcessCaches(pid=20 + rank, parent=5, role="worker", caches=[worker(keys)], **place),
        ]

    sample = CacheSample(taken_at=0.0, processes=[*engine(0, "a"), *engine(1, "b")], quiet=True)
    assert codes(sample) == []
    swapped = [
        replace(process, dp_rank=21 - process.pid) if process.role == "worker" else process
        for process in sample.processes
    ]
    wrong = check_sample(replace(sample, processes=swapped))
    assert {finding.subject for finding in wrong} == {
        "engine DP0 10 and worker DP1 21",
        "engine DP1 11 and worker DP0 20",
    }


def test_a_worker_that_differs_from_its_group_is_named_by_its_rank() -> None:
    """An encoder-decoder's scheduler keeps no entries: the group alone shows it."""
    scheduler = EncoderDecoderCache(name="Manager", slots=9, free_slots=9, passing=["a", "b"])
    sample = server(lru("P0"), lru("P1"), scheduler, worker("ab"), worker("a"), worker("ab"))
    ranked = [
        replace(process, tp_rank=process.pid - 3, pp_rank=0, ranks=f"TP{process.pid - 3}")
        if process.role == "worker"
        else process
        for process in sample.processes
    ]
    (finding,) = check_sample(replace(sample, processes=ranked))
    assert finding.code == "encoder-cache.worker-differs"
    assert finding.subject == "worker TP1 4"
    assert "it lacks: 1: b" in finding.evidence
    stages = [replace(p, pp_rank=p.tp_rank, tp_rank=p.tp_rank and 0) for p in ranked]
    assert codes(replace(sample, processes=stages)) == []


def test_transferred_encoder_outputs_are_not_compared() -> None:
    sample = server(None, None, None, worker("xyz"))
    setup = CacheSetup(multimodal=True, encoder_connector=True)
    first, *rest = sample.processes
    assert codes(replace(sample, processes=[replace(first, setup=setup), *rest])) == []


def test_encoder_decoder_over_freeing_is_known() -> None:
    manager = EncoderDecoderCache(name="M", slots=100, free_slots=190, passing=["a"])
    (found,) = check_sample(server(None, None, manager, worker("a")))
    assert (found.code, found.severity) == ("encoder-cache.over-freed", Severity.INFO)
    assert codes(server(None, None, replace(manager, free_slots=100), worker("ab"))) == [
        "encoder-cache.worker-leak"
    ]


# Shared memory.


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"unpaired_keys": ["a"]}, "mm-cache.shm-index"),
        ({"unflagged_ids": [1]}, "mm-cache.shm-index"),
        ({"unmapped_ids": [1]}, "mm-cache.shm-index"),
        ({"bytes": 11}, "mm-cache.shm-ring"),
        ({"bytes": -1}, "mm-cache.shm-ring"),
        ({"without_updates": ["a"]}, "mm-cache.shm-updates"),
        ({"hits": 3}, "mm-cache.hit-count"),
    ],
)
def test_each_shm_cache_corruption_yields_its_finding(changes: dict[str, Any], code: str) -> None:
    healthy = ShmCache(
        kind="mm-shm",
        side="P0",
        name="S",
        writer=True,
        capacity_bytes=10,
        max_object_bytes=5,
        keys=["a"],
        bytes=4,
        hits=1,
        queries=2,
    )
    assert check_cache(healthy) == []
    assert [rule.code for rule, _ in check_cache(replace(healthy, **changes))] == [code]


# Several samples.


def test_only_persistent_findings_are_reported_worst_first() -> None:
    broken = lru("P0", "abcd", order_only=["d"], hits=1)
    lasting = server(broken, lru("P1", "abc"))
    passing = server(broken, lru("P1", "abc"), encoder(free_slots=0))
    found = diagnose_caches(CacheSnapshot(server="s", samples=[passing, lasting, lasting]))
    assert [item.code for item in found] == [
        "mm-cache.ghost-keys",
        "mm-cache.hit-count",
        "mm-cache.front-only",
    ]
    assert diagnose_caches(CacheSnapshot(server="s", samples=[lasting, server()])) == []
    assert diagnose_caches(CacheSnapshot(server="s", samples=[server(), lasting])) == []
    assert diagnose_caches(CacheSnapshot(server="s", samples=[])) == []


def test_the_same_fault_elsewhere_is_not_the_same_finding() -> None:
    first = server(lru("P0", order_only=["x"]))
    second = server(None, lru("P1", order_only=["x"]))
    assert diagnose_caches(CacheSnapshot(server="s", samples=[first, second])) == []


def test_the_same_from_a_file(tmp_path: Any) -> None:
    snapshot = CacheSnapshot(server="s", samples=[server(lru("P0", "abcd"), lru("P1", "abc"))])
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=CacheSnapshot)
    assert again == snapshot
    assert diagnose_caches(again) == diagnose_caches(snapshot) != []


# What kind of server it is.


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        ({"multimodal": False}, "text-model"),
        ({"multimodal": True, "encoder_decoder": True, "cache_gb": 0.0}, "encoder-decoder"),
        ({"multimodal": True, "cache_gb": 0.0}, "cache-off"),
        ({"multimodal": True, "cache_gb": 4.0, "cache_type": "shm"}, "shm"),
        ({"multimodal": True, "cache_gb": 4.0, "api_processes": 2}, "processor-only"),
        ({"multimodal": True, "cache_gb": 4.0, "data_parallel": 2}, "processor-only"),
        ({"multimodal": True, "cache_gb": 4.0, "encoder_connector": True}, "encoder-connector"),
        (None, "unknown"),
    ],
)
def test_cache_note_names_the_cache_setup(setup: dict[str, Any] | None, code: str) -> None:
    process = ProcessCaches(
        pid=1, parent=0, role="engine", setup=None if setup is None else CacheSetup(**setup)
    )
    shown = make_cache_notes(CacheSample(taken_at=0.0, processes=[process], quiet=True))
    assert [note.code for note in shown] == [code]


def test_a_server_at_work_is_told_to_be_compared_less() -> None:
    assert [note.code for note in make_cache_notes(server(quiet=False))][-1:] == ["busy"]
    setup = CacheSetup(multimodal=True, cache_gb=4.0, cache_type="lru")
    process = ProcessCaches(pid=1, parent=0, role="engine", setup=setup)
    assert make_cache_notes(CacheSample(taken_at=0.0, processes=[process], quiet=True)) == []


def test_the_catalogue_has_every_rule_under_its_code() -> None:
    assert len(CATALOGUE) == sum(isinstance(item, Rule) for item in vars(judge).values())
    assert all(rule.code == code and rule.next_step for code, rule in CATALOGUE.items())
    assert all(code.startswith(("mm-cache.", "encoder-cache.")) for code in CATALOGUE)


def test_worst() -> None:
    found = check_sample(server(lru("P0", "abcd"), lru("P1", "acbe")))
    random.Random(1).shuffle(found)
    assert find_worst_severity(found) is Severity.WARNING
    assert find_worst_severity([]) is None
