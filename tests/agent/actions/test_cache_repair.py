"""Repairs on vLLM's own LRUCache, of the installed version, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.agents.agent_client import open_agent
from vllmops.model.cache_repairs import CacheDefect, RepairRequest

from ...support.extent import long

Spawn = Callable[..., Any]
ROOT = str(Path(__file__).parents[3])

SETUP = """
import sys, threading
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects
from vllmops.agent.actions import cache_repair as repair
repair.ATTEMPTS = 10_000  # on a busy machine a thread may stay where it is for long
sys.path.insert(0, {root!r})
from tests.support import modules
module = sys.modules["vllm.utils.cache"] = modules.lru_module(modules.locate_installed_vllm())
class LruKeyReplicatedReceiverCache(SimpleNamespace): pass
class LruKeyReplicatedSenderCache(SimpleNamespace): pass
cache = module.LRUCache({capacity}, getsizeof=lambda value: value)
for number in range({entries}):
    cache[f"k{{number}}"] = 10
holder = {kind}(_cache=cache)
objects.track_object("mm-cache", holder)
order, data, sizes = cache._LRUCache__order, cache._Cache__data, cache._Cache__size
def state():
    return list(order), dict(data), dict(sizes), cache.currsize, cache._hits, cache._total
"""
GHOSTS = """
for number in range({ghosts}):
    order[f"ghost{{number}}"] = None
    order.move_to_end(f"ghost{{number}}", last=False)
"""
WHOLE = "out = set(order) == set(data) == set(sizes) and cache.currsize == sum(sizes.values())"


@pytest.fixture
def child(spawn: Spawn) -> Callable[..., Any]:
    def start(
        entries: int = 20, capacity: float = 200, kind: str = "LruKeyReplicatedReceiverCache"
    ) -> Any:
        made = spawn()
        made.run(SETUP.format(root=ROOT, capacity=capacity, entries=entries, kind=kind))
        return made

    return start


def repair(child: Any, **request: Any) -> Any:
    return open_agent(child.process, timeout_s=60).repair_caches(RepairRequest(**request))


def faults(answer: Any) -> dict[str, float]:
    return {change.defect: change.count for item in answer.caches for change in item.changes}


def test_a_healthy_cache_comes_out_untouched(child: Callable[..., Any]) -> None:
    process = child()
    before = process.run("out = state()")
    assert repair(process).caches == []
    assert process.run("out = state()") == before


def test_repair_fixes_every_defect_and_nothing_else(child: Callable[..., Any]) -> None:
    process = child()
    process.run(GHOSTS.format(ghosts=3))
    process.run("del order['k5'], order['k6']")
    process.run("sizes['nobody'] = 7; del sizes['k7']; cache.pinned_items.update(['k1', 'gone'])")
    process.run("cache._Cache__currsize = 1000")
    healthy = process.run("out = [key for key in order if key in data]")
    wanted = {
        CacheDefect.GHOST_KEYS: 3,
        CacheDefect.LOST_KEYS: 2,
        CacheDefect.SIZED_ONLY: 1,
        CacheDefect.UNSIZED: 1,
        CacheDefect.DEAD_PINS: 1,
        CacheDefect.SIZE_SUM: 1000 - (19 * 10 + 7),
    }
    before = process.run("out = state()")
    assert faults(repair(process, dry_run=True)) == wanted
    assert process.run("out = state()") == before
    assert faults(repair(process)) == wanted
    assert process.run(WHOLE) == "True"
    assert process.run("out = cache.currsize, sorted(cache.pinned_items)") == "(200, ['k1'])"
    # Lost keys are evicted first; the others keep their order.
    assert process.run("out = sorted(list(order)[:2])") == "['k5', 'k6']"
    assert process.run("out = list(order)[2:]") == healthy
    assert repair(process).caches == []


def test_a_thread_that_spins_goes_on(child: Callable[..., Any]) -> None:
    process = child()
    process.run(GHOSTS.format(ghosts=2))
    process.run(
        "thread = threading.Thread(target=cache.__setitem__, args=('new', 10)); thread.start()"
    )
    assert process.run("import time; time.sleep(0.2); out = thread.is_alive()") == "True"
    answer = repair(process)
    assert answer.caches[0].reason is None
    assert (
        process.run("thread.join(60); out = thread.is_alive(), 'new' in cache") == "(False, True)"
    )
    assert process.run(WHOLE) == "True"


def test_many_threads_at_work_meanwhile(child: Callable[..., Any]) -> None:
    process = child(entries=200, capacity=2000)
    process.run(
        """
errors, ended, lock = [], threading.Event(), threading.Lock()
def use(seed):
    number = 0
    while not ended.is_set():
        number += 1
        try:
            with lock:  # vLLM's threads take turns too
                cache[f"{seed}-{number}"] = 10
                cache.get(f"{seed}-{number - 3}")
        except Exception as error:
            errors.append(repr(error))
threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
for each in threads: each.start()
"""
    )
    for number in range(10):
        # Where the newest are, eviction does not meet it before the repair does.
        ghost = f"order['ghost-{number}'] = None; cache.pinned_items.add('ghost-{number}')"
        process.run(f"with lock: {ghost}")
        answer = repair(process)
        assert [item.reason for item in answer.caches] == [None]
    process.run("ended.set(); [each.join() for each in threads]")
    assert process.run("out = errors[:3]") == "[]"
    assert process.run(WHOLE) == "True"


def test_entries_of_the_front_end_alone_are_dropped(child: Callable[..., Any]) -> None:
    process = child(kind="LruKeyReplicatedSenderCache")
    answer = repair(process, front_only=["k3", "k4", "unknown"])
    assert faults(answer) == {CacheDefect.FRONT_ONLY: 2}
    assert process.run("out = 'k3' in cache, 'k5' in cache, len(cache)") == "(False, True, 18)"
    assert process.run(WHOLE) == "True"
    engine = child()
    assert repair(engine, front_only=["k3"]).caches == []


@long
def test_a_hundred_thousand_entries_in_time(child: Callable[..., Any]) -> None:
    process = child(entries=100_000, capacity=1_000_000)
    process.run(GHOSTS.format(ghosts=1000))
    answer = repair(process)
    assert faults(answer) == {CacheDefect.GHOST_KEYS: 1000}
    assert process.run(WHOLE) == "True"


def test_a_cache_of_another_shape_is_told(child: Callable[..., Any]) -> None:
    process = child()
    process.run("holder._cache = SimpleNamespace()")
    (item,) = repair(process).caches
    assert "has an unknown shape" in item.reason
    assert (
        process.run("from vllmops.agent import cost as account; out = dict(account.repairs)")
        == "{}"
    )
    process = child()
    process.run(GHOSTS.format(ghosts=2))
    repair(process, dry_run=True)
    repair(process)
    assert (
        process.run("from vllmops.agent import cost as account; out = dict(account.repairs)")
        == "{'cache': 1}"
    )


TWICE = """
import os, random, sys, time
from vllmops.agent.actions import cache_repair as repair
usual = sys.getswitchinterval()
random.seed(1)
seen = []
def act():
    seen.append(sys.getswitchinterval())
    time.sleep(0.003)
threads = [threading.Thread(target=repair.run_exclusively, args=(act,)) for _ in range(20)]
for each in threads:
    each.start()
    time.sleep(random.uniform(0, 0.004))
"""


def test_many_at_once_leave_the_switch_interval_as_it_was(child: Callable[..., Any]) -> None:
    process = child()
    process.run(TWICE)
    process.run("[each.join() for each in threads]")
    assert process.run("out = len(seen), min(seen) > 0.9 * repair.TURN_S") == "(20, True)"
    assert process.run("out = sys.getswitchinterval() == usual") == "True"


def test_a_child_that_is_forked_meanwhile_has_it_too(child: Callable[..., Any]) -> None:
    process = child()
    process.run(TWICE)
    ends = process.run(
        """
ends = set()
for _ in range(20):
    time.sleep(0.003)
    if not (pid := os.fork()):
        same = sys.getswitchinterval() == usual
        os._exit(0 if same and repair.run_exclusively(lambda: True) else 1)
    ends.add(os.waitpid(pid, 0)[1])
out = ends
"""
    )
    assert ends == "{0}"


def test_two_repairs_at_once(child: Callable[..., Any]) -> None:
    process = child()
    usual = process.run("import sys; out = sys.getswitchinterval()")
    for _ in range(5):
        process.run(GHOSTS.format(ghosts=3))
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: repair(process), range(4)))
        assert all(item.reason is None for answer in answers for item in answer.caches)
        assert process.run(WHOLE) == "True"
    assert process.run("out = sys.getswitchinterval()") == usual
