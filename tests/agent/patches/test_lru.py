"""vLLM's LRUCache of several versions, stock and patched, against a plain model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmops.agent.patches import mm_lru_ghost_keys, mm_lru_stale_eviction

from ...support.extent import EVERYTHING
from ...support.versions import INSTALLED, OLD

Load = Callable[[str], ModuleType]

VERSIONS = (*OLD, INSTALLED)
CAPACITY = 6
KEYS = "abcdefgh"


class Model:
    """An LRU cache with pins, as a list, oldest first."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.sizes: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.hits = self.total = 0

    def newest(self, key: str) -> None:
        self.order.remove(key)
        self.order.append(key)

    def remove(self, key: str) -> int:
        self.order.remove(key)
        self.pinned.discard(key)
        return self.sizes.pop(key)

    def popitem(self, remove_pinned: bool = False) -> tuple[str, int]:
        free = [key for key in self.order if remove_pinned or key not in self.pinned]
        if not free:
            raise StopIteration if remove_pinned else RuntimeError
        return free[0], self.remove(free[0])

    def put(self, key: str, size: int) -> None:
        if size > CAPACITY:
            raise ValueError
        while sum(self.sizes.values()) - self.sizes.get(key, 0) + size > CAPACITY:
            self.popitem()
        if key not in self.sizes:
            self.order.append(key)
        self.sizes[key] = size
        self.newest(key)

    def get(self, key: str) -> int | None:
        self.total += 1
        if key not in self.sizes:
            return None
        self.hits += 1
        self.newest(key)
        return self.sizes[key]

    def item(self, key: str) -> int:
        if key not in self.sizes:
            raise KeyError
        self.total, self.hits = self.total + 1, self.hits + 1
        self.newest(key)
        return self.sizes[key]

    def touch(self, key: str) -> None:
        if key in self.sizes:
            self.newest(key)

    def pop(self, key: str) -> int | None:
        return self.remove(key) if key in self.sizes else None

    def pin(self, key: str) -> None:
        if key not in self.sizes:
            raise ValueError
        self.pinned.add(key)

    def clear(self) -> None:
        while self.order:
            self.remove(self.order[0])
        self.hits = self.total = 0


def call_cache_method(cache: Any, name: str, *words: Any) -> Any:
    return cache[words[0]] if name == "item" else getattr(cache, name)(*words)


def outcome(act: Callable[[], Any]) -> Any:
    """What it returns, or what kind of error it raises."""
    try:
        return act()
    except (KeyError, RuntimeError, StopIteration, ValueError) as error:
        return type(error)


keys = st.sampled_from(KEYS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), keys, st.integers(1, CAPACITY + 1)),
        st.tuples(st.sampled_from(["get", "item", "touch", "pop", "pin"]), keys),
        st.tuples(st.just("popitem"), st.booleans()),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["stock", "patched"])
def lru(request: pytest.FixtureRequest, lru_module: Load, version: str) -> Any:
    module = lru_module(version)
    if request.param == "patched":
        apply_patches(module)
    elif mm_lru_ghost_keys.has_defect(module):
        # The model has no ghost keys: what makes them is compared elsewhere.
        module.LRUCache.touch = lambda self, key: (
            key in self and self._LRUCache__order.move_to_end(key)
        )
    return module.LRUCache


def apply_patches(module: ModuleType) -> ModuleType:
    mm_lru_ghost_keys.apply_patch(module)
    mm_lru_stale_eviction.apply_patch(module)
    return module


@settings(max_examples=150 if EVERYTHING else 60, deadline=None)
@given(operations)
def check(cls: Any, steps: list[tuple[Any, ...]]) -> None:
    cache, model = cls(CAPACITY, getsizeof=lambda value: value), Model()
    for name, *words in steps:
        shown = outcome(lambda n=name, w=words: call_cache_method(cache, n, *w))  # type: ignore[misc]
        expected = outcome(lambda n=name, w=words: getattr(model, n)(*w))  # type: ignore[misc]
        if name != "touch":
            assert shown == expected, (name, words)
        assert list(cache.order) == model.order
        assert dict(cache._Cache__size) == model.sizes
        assert cache.currsize == sum(model.sizes.values())
        assert cache.pinned_items == model.pinned
        assert (cache.stat().hits, cache.stat().total) == (model.hits, model.total)


def test_answers_as_the_model_does(lru: Any) -> None:
    check(lru)


@settings(max_examples=150 if EVERYTHING else 60, deadline=None)
@given(operations, st.lists(st.tuples(st.sampled_from(["ghost", "lost"]), keys), max_size=4))
def check_corrupt(cls: Any, steps: list[tuple[Any, ...]], damage: list[tuple[str, str]]) -> None:
    """Whatever is wrong with the order: no operation spins, and none leaves it worse."""
    cache = cls(CAPACITY, getsizeof=lambda value: value)
    calls = 0
    evict = cls.popitem

    def count_and_evict(self: Any, remove_pinned: bool = False) -> Any:
        nonlocal calls
        calls += 1
        assert calls <= 2 * len(KEYS), "it spins"
        return evict(self, remove_pinned)

    cls.popitem = count_and_evict
    try:
        for number, (name, *words) in enumerate(steps):
            calls = 0
            if damage and number % 5 == 4:
                kind, key = damage.pop()
                order = cache._LRUCache__order
                if kind == "lost" and key in cache:
                    order.pop(key, None)
                elif kind == "ghost" and key not in cache:
                    order[key] = None
                    order.move_to_end(key, last=False)
            with suppress(KeyError, RuntimeError, StopIteration, ValueError):
                call_cache_method(cache, name, *words)
            assert cache.currsize == sum(cache._Cache__size.values()) <= CAPACITY
            assert set(cache._Cache__size) == set(cache._Cache__data)
    finally:
        cls.popitem = evict


def test_never_spins(lru_module: Load, version: str) -> None:
    check_corrupt(apply_patches(lru_module(version)).LRUCache)


def test_a_stale_key_is_met_first(lru_module: Load, version: str) -> None:
    # The reviewers' case: behind a real key nothing would meet it.
    module = lru_module(version)

    def cache() -> Any:
        made = module.LRUCache(2)
        made["a"] = 1
        made["b"] = 2
        made._LRUCache__order["ghost"] = None
        made._LRUCache__order.move_to_end("ghost", last=False)
        return made

    stock = cache()
    # Nothing has changed, so the loop that makes room would ask again, and again.
    assert [stock.popitem() for _ in range(3)] == [("ghost", None)] * 3
    assert list(stock.order) == ["ghost", "a", "b"]

    mm_lru_stale_eviction.apply_patch(module)
    mended = cache()
    assert mended.popitem() == ("a", 1)
    assert list(mended.order) == ["b"]
    full = cache()
    full["c"] = 3
    assert dict(full.items()) == {"b": 2, "c": 3}
    emptied = cache()
    emptied.clear()
    assert (len(emptied), list(emptied.order)) == (0, [])


def test_a_touched_key_that_is_missing(lru_module: Load, version: str) -> None:
    module = lru_module(version)
    cache = module.LRUCache(2)
    cache.touch("x")
    assert (list(cache.order) == ["x"]) is (version != INSTALLED)
    mm_lru_ghost_keys.apply_patch(module)
    cache = module.LRUCache(2)
    cache.touch("x")
    assert list(cache.order) == []


def test_a_subclass_and_pins(lru_module: Load) -> None:
    # What vLLM's AdapterLRUCache does.
    module = apply_patches(lru_module(INSTALLED))

    class Adapters(module.LRUCache):  # type: ignore[misc, name-defined]
        removed: list[str] = []  # noqa: RUF012

        def _on_remove(self, key: str, _: Any) -> None:
            self.removed.append(key)

    cache = Adapters(2)
    cache["a"] = 1
    cache["b"] = 2
    cache.pin("a")
    cache._LRUCache__order["ghost"] = None
    cache._LRUCache__order.move_to_end("ghost", last=False)
    cache["c"] = 3
    assert (cache.removed, list(cache.order)) == (["b"], ["a", "c"])
    cache.pin("c")
    with pytest.raises(RuntimeError, match="All items are pinned"):
        cache["d"] = 4
    assert cache.popitem(remove_pinned=True) == ("a", 1)
