"""What an agent tells of memory, in a real process with vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllmops.collect.agents.agent_client import open_agent
from vllmops.model.memory import AgentMemory, CacheUsage, StoreCounts
from vllmops.model.roles import Role

Spawn = Callable[..., Any]

# A module that stands for vLLM's: importing the real one takes seconds and torch.
REQUEST = """
import gc, sys, types
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects

gc.disable()
class Request:
    def __init__(self, request_id, keep=None):
        self.request_id = request_id
        self.done = False
        self.keep = self if keep else None
        self.status = 1
    def is_finished(self):
        return self.done
module = types.ModuleType("vllm.v1.request")
module.Request = Request
objects.hook_constructor("request", "Request", module)
class Scheduler: pass
scheduler = Scheduler()
scheduler.requests = {}
objects.track_object("scheduler", scheduler)
def add(name, keep=None):
    scheduler.requests[name] = Request(name, keep)
def finish(name):
    scheduler.requests[name].done = True
    del scheduler.requests[name]
"""


def fetch_memory(child: Any) -> AgentMemory:
    answer: AgentMemory = open_agent(child.process).fetch_memory()
    return answer


def counts(child: Any) -> tuple[int, int, int]:
    found = fetch_memory(child).requests
    assert found is not None
    return found.alive_requests, found.finished_alive, found.known_requests


def test_live_and_finished_requests(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    assert fetch_memory(child).requests is None
    child.run(REQUEST)
    assert counts(child) == (0, 0, 0)
    child.run("add('a'); add('b'); add('c', keep=True)")
    assert counts(child) == (3, 0, 3)
    child.run("finish('a'); finish('c')")
    assert counts(child) == (2, 1, 1)
    child.run("coming = Request('d')")  # not yet with the scheduler
    assert counts(child) == (3, 1, 1)
    child.run("finish('b'); del coming; gc.collect()")
    assert counts(child) == (0, 0, 0)
    found = fetch_memory(child).requests
    assert found is not None
    assert 0 <= found.late_s < 60


def test_request_under_construction_counts_as_alive(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    child.run(REQUEST + "half = Request.__new__(Request); objects.track_object('request', half)")
    assert counts(child) == (1, 0, 0)


def test_very_many_are_counted_by_subtraction(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    child.run(REQUEST + "left = [Request(str(each)) for each in range(3000)]; add('a')")
    assert counts(child) == (3001, 3000, 1)


def test_requests_do_not_try_to_bring_the_agent_up(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    child.run(REQUEST + "tried = []\n")
    child.run("objects.hook_constructors(lambda: tried.append(1))\nadd('a')")
    assert child.run("out = tried") == "[]"
    assert child.run("objects.track_object('scheduler', scheduler); out = tried") == "[1]"


def test_a_request_costs_a_microsecond_or_two_more(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    child.run("class Bare:\n    def __init__(self, x, keep=None): pass\n")
    child.run(REQUEST)
    # The best of several: the machine has other work too.
    code = (
        "import timeit; out = min(timeit.repeat(lambda: Request(''), number=2000, repeat=9)) / 2000"
    )
    assert float(child.run(code)) < 10e-6


CACHES = """
import cachetools
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects

class LruKeyReplicatedSenderCache: pass
class LruKeyReplicatedReceiverCache: pass
class MultiModalProcessorOnlyCache: pass
class Shm(SimpleNamespace): pass
class Worker(SimpleNamespace): pass
class Serving: pass
class Scheduler(SimpleNamespace): pass
holders = []
for kind in (
    LruKeyReplicatedSenderCache, LruKeyReplicatedReceiverCache, MultiModalProcessorOnlyCache
):
    holder = kind()
    holder._cache = cachetools.LRUCache(1000, lambda value: value)
    holders.append(holder)
holders[1]._cache["a"] = 300
ring = SimpleNamespace(data_buffer_start=100, data_buffer_end=350)
storage = SimpleNamespace(is_writer=True, key_index={"a": 1}, ring_buffer=ring)
holders += [Shm(_shm_cache=storage), Shm()]
for holder in holders:
    objects.track_object("mm-cache", holder)
scheduler = Scheduler(
    requests={},
    encoder_cache_manager=SimpleNamespace(cache_size=10, num_free_slots=6, cached={"a": set()}),
)
objects.track_object("scheduler", scheduler)
tensor = SimpleNamespace(nbytes=64, device="cpu")
worker = Worker(model_runner=SimpleNamespace(encoder_cache={"a": tensor}), rank=0)
objects.track_object("worker", worker)
serving = Serving()
serving.response_store, serving.msg_store, serving.event_store = {"a": 1, "b": 2}, {"a": 1}, {}
objects.track_object("responses", serving)
"""


def test_caches_and_the_store(spawn: Spawn) -> None:
    child = spawn()
    child.run(CACHES)
    found = fetch_memory(child)
    assert found.problems == ()
    assert [(item.kind, item.entries, item.bytes, item.is_own_memory) for item in found.caches] == [
        ("mm-lru", 0, 0, False),
        ("mm-lru", 1, 300, True),
        ("mm-processor-only", 0, 0, True),
        ("mm-shm", 1, 250, False),
        ("encoder", 1, None, False),
        ("encoder-outputs", 1, 64, True),
    ]
    assert found.caches[4] == CacheUsage(kind="encoder", name="SimpleNamespace", entries=1, slots=4)
    assert found.store == StoreCounts(responses=2, messages=1, events=0)
    assert len(found.gc) == 3


def test_objects_of_unknown_shape_are_reported_as_problems(spawn: Spawn) -> None:
    child = spawn()
    child.run(CACHES + "del serving.msg_store, holders[0]._cache._Cache__data")
    found = fetch_memory(child)
    assert found.store is None
    assert len(found.caches) == 5
    assert [item.split(":")[0] for item in found.problems] == [
        "the size of LruKeyReplicatedSenderCache can't be read",
        "the size of the Responses store can't be read",
    ]
