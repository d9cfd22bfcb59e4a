"""Snapshots of containers that other threads are changing.

The objects have the shape of vLLM's; tests/live takes the same snapshots of the real ones.
"""

import gc
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import call
from types import ModuleType, SimpleNamespace
from typing import Any

import cachetools
import pytest

from vllmops.agent.actions import in_flight_messages
from vllmops.agent.hooks import vllm_objects
from vllmops.agent.state import caches
from vllmops.collect.agents.agent_client import open_agent
from vllmops.model.caches import (
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ShmCache,
    WorkerEncoderCache,
)
from vllmops.rules.caches import check_cache

Spawn = Callable[..., Any]

# vLLM's popitem() takes the first key of the order and asks pop() to remove it: with a key that
# has no data nothing is removed, and cachetools asks again.
SPINNER = """
import cachetools, threading
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects

class Lru(cachetools.LRUCache):
    pinned_items, _hits, _total = set(), 0, 0
    def __init__(self, *words):
        super().__init__(*words)
        self._hits = self._total = 0
    def popitem(self):
        key = next(iter(self._LRUCache__order))
        return key, self.pop(key, None)

class LruKeyReplicatedReceiverCache(SimpleNamespace): pass

cache = Lru(20_000, lambda value: 1)
for number in range(20_000):
    cache[f"{number:064}"] = number
cache._LRUCache__order["ghost"] = None
cache._LRUCache__order.move_to_end("ghost", last=False)
holder = LruKeyReplicatedReceiverCache(_cache=cache)
objects.track_object("mm-cache", holder)
threading.Thread(target=cache.__setitem__, args=("new", 1), daemon=True).start()
"""


def test_a_cache_that_another_thread_spins_in_is_read(spawn: Spawn) -> None:
    child = spawn()
    child.run(SPINNER)
    (cache,) = open_agent(child.process, timeout_s=60).fetch_caches().caches
    assert isinstance(cache, LruCache)
    assert (cache.entries, cache.order_only) == (20_000, ["ghost"])
    assert [rule.code for rule, _ in check_cache(cache)] == ["mm-cache.ghost-keys"]


def test_a_cache_that_another_thread_spins_in_is_read_in_time(spawn: Spawn) -> None:
    child = spawn()
    child.run(SPINNER)
    began = time.monotonic()
    assert open_agent(child.process).fetch_caches().caches
    assert time.monotonic() - began < 1.5


def test_a_key_with_half_of_a_surrogate_pair_hides_no_cache(spawn: Spawn) -> None:
    """A client names an image by any string that JSON can hold."""
    child = spawn()
    child.run(SPINNER.partition("cache._LRUCache__order")[0].replace("20_000", "2"))
    child.run(r"cache['\ud800'] = 1; holder = LruKeyReplicatedReceiverCache(_cache=cache)")
    child.run("objects.track_object('mm-cache', holder)")
    for keys in (False, True):
        answer = open_agent(child.process).fetch_caches(keys=keys)
        (cache,) = answer.caches
        assert isinstance(cache, LruCache)
        assert (cache.entries, cache.newest_key, len(cache.digest)) == (2, r"\ud800", 64)
        assert not answer.problems


def test_reading_at_once_is_never_torn() -> None:
    one: OrderedDict[str, int] = OrderedDict()
    other: dict[str, int] = {}
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            key = str(number % 500)
            # Both in one C call as well, so that a reader has no business to see only one.
            tuple(map(call, (one.__setitem__, other.__setitem__), (key, key), (number, number)))

    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    # Within the call, a collection could run Python code that somebody else's garbage has.
    gc.disable()
    writer.start()
    try:
        for _ in range(2000):
            # An iterator would be of the moment before.
            keys, values, both = caches.read_atomically(
                (list, one), (list, one.values()), (dict, other)
            )
            assert dict(zip(keys, values, strict=True)) == both
    finally:
        ended.set()
        writer.join()
        sys.setswitchinterval(interval)
        gc.enable()


def test_half_way_through_is_read_again() -> None:
    cache: Any = cachetools.LRUCache(10, len)
    cache.pinned_items, cache._hits, cache._total = set(), 0, 0
    holder = SimpleNamespace(_cache=cache)
    reads = 0

    def take(held: Any) -> LruCache:
        nonlocal reads
        reads += 1
        cache._hits = 1 if reads < 3 else 0  # as between the two lines of LRUCache.get()
        return caches.observe_lru_cache(held)

    settled = caches.observe_until_consistent(take, holder)
    assert reads == 3
    assert settled is not None
    assert check_cache(settled) == []


def test_a_container_that_changes_size_is_read_again() -> None:
    reads = 0

    def take(_: Any) -> None:
        nonlocal reads
        reads += 1
        if reads < 3:
            raise RuntimeError("dictionary changed size during iteration")

    assert caches.observe_until_consistent(take, None) is None
    assert reads == 3


def test_keys_only_where_asked_for_and_their_digest_always() -> None:
    cache: Any = cachetools.LRUCache(10, len)
    cache.pinned_items, cache._hits, cache._total = set(), 0, 0
    holder = SimpleNamespace(_cache=cache)
    empty = caches.observe_lru_cache(holder)
    assert (empty.oldest_key, empty.newest_key, empty.order) == (None, None, None)
    cache["a"], cache["b"] = "1", "22"
    light, full = caches.observe_lru_cache(holder), caches.observe_lru_cache(holder, keys=True)
    assert (light.order, light.sizes) == (None, None)
    assert (full.order, full.sizes) == (["a", "b"], [1, 2])
    assert light.digest == full.digest != empty.digest
    assert (light.oldest_key, light.newest_key, light.entries, light.bytes) == ("a", "b", 2, 3)
    cache["a"]
    assert caches.observe_lru_cache(holder).digest != full.digest


def shm(**changes: Any) -> Any:
    storage = SimpleNamespace(
        is_writer=True,
        max_object_size=50,
        key_index={"a": (0, 7), "b": (10, 8)},
        id_index={7: "a", 8: "b"},
        writer_flag={7: 1, 8: 2},
        ring_buffer=SimpleNamespace(
            data_buffer_size=100, data_buffer_start=5, data_buffer_end=45, metadata={7: 0, 8: 10}
        ),
    )
    for name, value in changes.items():
        setattr(storage.ring_buffer if name == "metadata" else storage, name, value)
    return SimpleNamespace(
        _shm_cache=storage, _p0_cache={"a": (), "b": (), "dangling": ()}, _hits=1, _total=3
    )


def test_shared_memory() -> None:
    cache = caches.observe_multimodal_cache(shm())
    assert isinstance(cache, ShmCache)
    assert (cache.side, cache.keys, cache.bytes, cache.capacity_bytes) == (
        "P0",
        ["a", "b"],
        40,
        100,
    )
    assert (cache.hits, cache.queries) == (1, 3)
    assert check_cache(cache) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key_index": {"a": (0, 7), "b": (10, 7)}}, "unpaired_keys"),
        ({"id_index": {7: "a", 8: "a"}}, "unpaired_keys"),
        ({"writer_flag": {7: 1}}, "unflagged_ids"),
        ({"metadata": {7: 0, 8: 10, 9: 20}}, "unmapped_ids"),
    ],
)
def test_shared_memory_with_a_broken_index(changes: dict[str, Any], field: str) -> None:
    cache = caches.observe_shm_cache(shm(**changes))
    assert getattr(cache, field)
    assert [rule.code for rule, _ in check_cache(cache)] == ["mm-cache.shm-index"]


def test_shared_memory_without_updates_and_a_reader() -> None:
    holder = shm()
    del holder._p0_cache["b"]
    assert caches.observe_shm_cache(holder).without_updates == ["b"]
    reader = shm(is_writer=False)
    del reader._shm_cache.key_index
    assert caches.observe_shm_cache(reader).side == "worker"


def scheduler(**changes: Any) -> Any:
    feature = SimpleNamespace
    request = SimpleNamespace(
        is_finished=lambda: False, mm_features=[feature(identifier="a"), feature(identifier="b")]
    )
    manager = SimpleNamespace(
        cache_size=10,
        num_free_slots=3,
        num_freeable_slots=6,
        cached={"a": {"r"}, "b": set()},
        num_embeds_by_hash={"a": 4, "b": 3},
        freeable=OrderedDict(b=3),
        request_cached_ids={"r": {0}},
    )
    for name, value in changes.items():
        setattr(manager, name, value)
    return SimpleNamespace(encoder_cache_manager=manager, requests={"r": request})


def test_encoder_cache() -> None:
    cache = caches.observe_encoder_cache(scheduler())
    assert isinstance(cache, EncoderCache)
    assert (cache.slots, cache.free_slots, cache.freeable_slots) == (10, 3, 6)
    assert cache.requests_by_key == {"a": ["r"], "b": []}
    assert cache.inputs == {"r": ["a"]}
    assert check_cache(cache) == []


def test_encoder_cache_with_references_of_strangers() -> None:
    held = scheduler(cached={"a": {"r", "gone"}, "b": set()})
    cache = caches.observe_encoder_cache(held)
    assert isinstance(cache, EncoderCache)
    assert cache.unknown_requests == ["gone"]
    held.requests["r"].is_finished = lambda: True
    cache = caches.observe_encoder_cache(held)
    assert isinstance(cache, EncoderCache)
    assert cache.unknown_requests == ["gone", "r"]


def test_encoder_cache_of_a_vllm_with_fewer_records() -> None:
    held = scheduler()
    del held.encoder_cache_manager.num_embeds_by_hash
    del held.encoder_cache_manager.request_cached_ids
    cache = caches.observe_encoder_cache(held)
    assert isinstance(cache, EncoderCache)
    assert (cache.slots_by_key, cache.inputs) == (None, None)
    assert check_cache(cache) == []


@pytest.mark.parametrize("lists", [{"allocated": ["a"], "to_free": ["b"]}, {"freed": ["a", "b"]}])
def test_encoder_decoder_cache(lists: dict[str, list[str]]) -> None:
    manager = SimpleNamespace(cache_size=10, num_free_slots=19, **lists)
    cache = caches.observe_encoder_cache(
        SimpleNamespace(encoder_cache_manager=manager, requests={})
    )
    assert isinstance(cache, EncoderDecoderCache)
    assert (cache.slots, cache.free_slots, cache.passing) == (10, 19, ["a", "b"])


def test_worker_encoder_cache_of_either_runner() -> None:
    tensor = SimpleNamespace(nbytes=512, device="cuda:0")
    outputs = {"a": tensor, "b": tensor}
    for runner in (
        SimpleNamespace(encoder_cache=outputs),
        SimpleNamespace(encoder_cache=SimpleNamespace(encoder_outputs=outputs)),
    ):
        cache = caches.observe_encoder_outputs(SimpleNamespace(model_runner=runner, rank=1))
        assert isinstance(cache, WorkerEncoderCache)
        assert (cache.keys, cache.bytes, cache.device, cache.rank) == (
            ["a", "b"],
            1024,
            "cuda:0",
            1,
        )
    for without in (None, SimpleNamespace(), SimpleNamespace(encoder_cache=None)):
        assert caches.observe_encoder_outputs(SimpleNamespace(model_runner=without)) is None


class Held:
    _cache: object


@pytest.fixture
def quiet_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent in the test's own process."""
    monkeypatch.setattr(vllm_objects, "_tell", lambda: None)
    monkeypatch.setattr(vllm_objects, "_refs", {})
    monkeypatch.setattr(vllm_objects, "problems", [])


@pytest.mark.usefixtures("quiet_agent")
def test_cache_of_unknown_shape_is_reported_as_a_problem() -> None:
    odd, other = Held(), Held()
    odd._cache = object()
    vllm_objects.track_object("mm-cache", odd)
    vllm_objects.track_object("scheduler", other)
    snapshot = caches.observe_caches()
    assert snapshot.caches == []
    assert len(snapshot.problems) == 1
    assert "Held can't be read: AttributeError" in snapshot.problems[0]


def module(**classes: Any) -> ModuleType:
    made = ModuleType("vllm.example")
    vars(made).update(classes)
    return made


@pytest.mark.usefixtures("quiet_agent")
def test_hooked_classes_remember_their_instances_as_long_as_they_live() -> None:
    class Base:
        pass

    class Cache(Base):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

    for _ in range(2):
        vllm_objects.hook_constructor("mm-cache", "Base", module(Base=Base))
    one, other = Cache(1), Cache(size=2)
    assert [held.size for held in vllm_objects.list_objects("mm-cache")] == [1, 2]
    assert vllm_objects.find_latest("mm-cache") is other
    del one
    gc.collect()
    assert vllm_objects.list_objects("mm-cache") == [other]
    assert vllm_objects.problems == []
    vllm_objects.reset_after_fork()
    assert vllm_objects.find_latest("mm-cache") is None


@pytest.mark.usefixtures("quiet_agent")
def test_an_object_whose_constructor_loads_the_agent_is_remembered() -> None:
    class Engine:
        def __init__(self, name: str) -> None:
            vllm_objects.hook_constructor("engine-core", "Engine", module(Engine=Engine))
            self.name = name

    class Process(Engine):
        def __init__(self) -> None:
            super().__init__("spawned")

    made = Process()
    assert vllm_objects.list_objects("engine-core") == [made]
    assert made.name == "spawned"


@pytest.mark.usefixtures("quiet_agent")
def test_queues_of_unknown_shape_are_not_proven_empty() -> None:
    assert (
        in_flight_messages.prove_queues_empty() == []
    )  # nor where neither an engine nor its client was found
    scheduler = Held()
    vllm_objects.track_object("scheduler", scheduler)
    assert in_flight_messages.prove_queues_empty() == []


@pytest.mark.usefixtures("quiet_agent")
def test_a_constructor_that_raises_still_raises() -> None:
    class Cache:
        def __init__(self) -> None:
            raise ValueError("no memory")

    vllm_objects.hook_constructor("mm-cache", "Cache", module(Cache=Cache))
    with pytest.raises(ValueError, match="no memory"):
        Cache()
    gc.collect()
    assert vllm_objects.list_objects("mm-cache") == []


@pytest.mark.usefixtures("quiet_agent")
def test_classes_of_another_shape_are_reported_and_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slotted:
        __slots__ = ()

    monkeypatch.setenv(vllm_objects.LOGGED, "1")
    vllm_objects.catch_errors(partial(vllm_objects.hook_constructor, "mm-cache", "Missing"))(
        module()
    )
    assert "no attribute 'Missing'" in vllm_objects.problems[0]
    vllm_objects.hook_constructor("mm-cache", "Slotted", module(Slotted=Slotted))
    assert isinstance(Slotted(), Slotted)
    assert "Slotted can't be tracked" in vllm_objects.problems[1]
