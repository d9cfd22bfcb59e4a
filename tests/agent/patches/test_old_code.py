"""Each defect on the real code that has it, and nothing changed on code that has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllmops.agent.patches.registry import PATCHES
from vllmops.model.patches import PatchState

from ...support.versions import INSTALLED, OLD

FIXED, APPLIED = PatchState.FIXED.value, PatchState.APPLIED.value

# What vllm-internals tell of each release, as the probes see it.
# Its readers do not wait for notifications.
SPINNING = {"broadcast-recheck"}
EXPECTED = {
    "0.14.0": dict.fromkeys(PATCHES.keys() - SPINNING, APPLIED),
    "0.15.1": {**dict.fromkeys(PATCHES, APPLIED), "encoder-decoder-free-order": FIXED},
    "0.23.0": {
        **dict.fromkeys(PATCHES, APPLIED),
        "encoder-decoder-free-order": FIXED,
        "request-hash-cycle": FIXED,
    },
    INSTALLED: {
        **dict.fromkeys(PATCHES, APPLIED),
        "encoder-decoder-free-order": FIXED,
        "request-hash-cycle": FIXED,
        "mm-lru-ghost-keys": FIXED,
        "broadcast-recheck": FIXED,
    },
}

IMPORT = """
import importlib, gc, random, time
from vllmops.agent.patches import registry
def load(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name):
            raise
for patch in registry.PATCHES.values():
    for name in patch.modules:
        load(name)
managers = load("vllm.v1.core.encoder_cache_manager")
request = load("vllm.v1.request")
from vllmops.agent.patches.probe_objects import ScratchRequest, SLOTS
"""

FREE_ORDER = """
manager = managers.EncoderDecoderCacheManager(cache_size=100)
worker, out = set(), []
for step in range(6):
    new = [f"audio-{step}"] if step < 4 else []
    for key in new:
        manager.allocate(ScratchRequest(key, (key,)), 0)
    # What the runner does: free what it is told, then run the encoder.
    worker.difference_update(manager.get_freed_mm_hashes())
    worker.update(new)
    out.append(sorted(worker))
"""

SLOTS = """
manager = managers.EncoderDecoderCacheManager(cache_size=60)
chance, live, out, number = random.Random(1), [], None, 0
for _ in range(5000):
    held = sum(len(each.hashes) for each in live if each.holds)
    act = chance.choice("add step preempt end".split())
    if act == "add":
        hashes = tuple(f"h{number}-{n}" for n in range(chance.randint(1, 3)))
        each = ScratchRequest(f"r{number}", hashes)
        number += 1
        each.holds = manager.can_allocate(each, 0, 1000, SLOTS * (len(each.hashes) - 1))
        if each.holds:
            for n in range(len(each.hashes)):
                manager.allocate(each, n)
            live.append(each)
    elif act == "step":  # the scheduler frees every input after every step
        for each in live:
            for n in manager.get_cached_input_ids(each):
                manager.free_encoder_input(each, n)
            each.holds = False
    elif live and act == "preempt":  # it starts over, and allocates anew
        each = chance.choice(live)
        if each.holds or manager.can_allocate(each, 0, 1000, SLOTS * (len(each.hashes) - 1)):
            for n in range(len(each.hashes)):
                manager.allocate(each, n)
            each.holds = True
    elif live and act == "end":
        manager.free(live.pop(chance.randrange(len(live))))
    held = sum(len(each.hashes) for each in live if each.holds)
    if manager.num_free_slots != manager.cache_size - SLOTS * held:
        out = (manager.num_free_slots, manager.cache_size, held)
        break
"""

CYCLE = """
import inspect, weakref
hasher_calls = []
def hasher(request):
    hasher_calls.append(request.request_id)
    tokens, done = request._all_token_ids, len(request.block_hashes)
    return [hash(tuple(tokens[: (n + 1) * 4])) for n in range(done, len(tokens) // 4)]
given = dict(request_id="a", prompt_token_ids=list(range(10)), pooling_params=None,
             sampling_params=request.SamplingParams(max_tokens=9), block_hasher=hasher)
if "eos_token_id" in inspect.signature(request.Request).parameters:
    given["eos_token_id"] = None
gc.disable()
one = request.Request(**given)
first = list(one.block_hashes)
one.append_output_token_ids([11, 12, 13])
hashes = list(one.block_hashes)
gone = weakref.ref(one)
del one
dies, _ = gone() is None, gc.enable()
out = (dies, first, hashes, len(hasher_calls))
"""

RACE = """
import threading, sys
from types import SimpleNamespace
caches = load("vllm.multimodal.cache.lru") or load("vllm.multimodal.cache")
lru = load("vllm.utils.cache").LRUCache
cls = next(
    each for name, each in vars(caches).items()
    if name in ("LruKeyReplicatedReceiverCache", "MultiModalReceiverCache")
)
holder = object.__new__(cls)
holder._cache = lru(50, getsizeof=lambda value: 1)
interval = sys.getswitchinterval()
sys.setswitchinterval(1e-6)
errors, ended = [], threading.Event()
def use():
    number = 0
    while not ended.is_set():
        number += 1
        names = [f"{number}-{n}" for n in range(5)]
        features = [SimpleNamespace(identifier=n, mm_hash=n, data=n) for n in names]
        try:
            holder.get_and_update_features(features)
        except Exception as error:
            errors.append(repr(error))
def reset():
    for _ in range(1500):
        try:
            holder.clear_cache()
        except Exception as error:
            errors.append(repr(error))
user = threading.Thread(target=use)
user.start()
reset()
ended.set(); user.join(); sys.setswitchinterval(interval)
c = holder._cache
whole = set(c._LRUCache__order) == set(c._Cache__data) == set(c._Cache__size)
out = (len(errors), whole and c.currsize == len(c))
"""


@pytest.mark.parametrize("version", [*OLD, INSTALLED])
def test_probes_and_patches(vllm: Callable[[str], Any], version: str) -> None:
    process = vllm(version)
    assert process.run(IMPORT) is None
    assert process.run("out = type(registry.observe_patches()).__name__") == "ProcessPatches"

    stale = process.run(FREE_ORDER)
    if version == "0.14.0":
        # Told in the step that makes them: the worker has each for ever.
        assert stale[-1] == [f"audio-{n}" for n in range(4)]
    assert (process.run(SLOTS) is not None) is True
    before = process.run(CYCLE)
    assert before[0] is (EXPECTED[version]["request-hash-cycle"] == FIXED)
    # The race is left to its probe here: unpatched, it can spin for ever.
    module = "load('vllm.multimodal.cache.lru') or load('vllm.multimodal.cache')"
    probe = f"registry.PATCHES['mm-cache-reset-race'].present({module})"
    assert process.run(f"out = {probe}") is True

    process.run("before = {name: dict(vars(c)) for name, c in {'r': request.Request}.items()}")
    process.run("registry.install_patches()")
    states = process.run(
        "out = {each.id: (each.state.value, each.present) "
        "for each in registry.observe_patches(verify=True).patches}"
    )
    assert states == {name: (state, False) for name, state in EXPECTED[version].items()}
    same = process.run("out = before['r'] == dict(vars(request.Request))")
    assert same is (EXPECTED[version]["request-hash-cycle"] == FIXED)

    fresh = process.run(FREE_ORDER)
    assert fresh[-1] == []
    # Each is there for the step that runs it.
    assert all(f"audio-{step}" in fresh[step] for step in range(4))
    assert process.run(SLOTS) is None
    after = process.run(CYCLE)
    assert after == (True, *before[1:])
    assert process.run(RACE) == (0, True)
    # Once more changes nothing.
    process.run("registry.install_patches()")
    assert (
        process.run("out = registry.observe_patches().patches[0].state.value")
        == states["mm-lru-ghost-keys"][0]
    )
    assert process.run(CYCLE) == after


@pytest.mark.parametrize("version", [*OLD, INSTALLED])
def test_the_patches_cost_little(vllm: Callable[[str], Any], version: str) -> None:
    process = vllm(version)
    assert process.run(IMPORT) is None
    process.run(
        "began = time.process_time(); registry.install_patches(); took = time.process_time() - "
        "began"
    )
    assert process.run("out = took") < 1.0  # a benchmark measures it; here the machine is busy


LOST = """
import sys, threading, time
from vllm.distributed.device_communicators import shm_broadcast as code
from vllmops.agent.actions import lost_broadcast as broadcast
from vllmops.agent.patches import broadcast_recheck, registry
def said(healed, patched):
    if patched:
        broadcast_recheck.RECHECK_MS = 300
        registry.install_patches()
    writer = code.MessageQueue(n_reader=1, n_local_reader=1)
    reader = code.MessageQueue.create_from_handle(writer.export_handle(), 0)
    both = threading.Thread(target=writer.wait_until_ready)
    both.start(); reader.wait_until_ready(); both.join()
    condition, got = reader._spin_condition, []
    condition.busy_loop_s = 0
    def read():
        for _ in range(2):
            got.append(reader.dequeue(indefinite=True))
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    def polls():
        frame = sys._current_frames().get(thread.ident)
        while frame and frame.f_code.co_name != "poll":
            frame = frame.f_back
        return frame is not None
    while not polls():
        time.sleep(0.02)
    writer._spin_condition.notify = lambda: None
    looks = [len(broadcast.find_stuck_readers())]
    writer.enqueue("a")
    while not (patched or broadcast.find_stuck_readers()):
        time.sleep(0.02)
    looks.append(len(broadcast.find_stuck_readers()))
    if healed:
        broadcast.wake_readers(["reader 0"])
    if healed or patched:
        while len(got) < 1:
            time.sleep(0.02)
    else:
        time.sleep(1)
    looks.append(len(broadcast.find_stuck_readers()))
    waits, wait = [], condition.wait
    def counted(*given, **named):
        waits.append(1)
        return wait(*given, **named)
    condition.wait = counted
    time.sleep(0.5)
    return got, looks, len(waits) < 100
"""


@pytest.mark.parametrize(
    ("healed", "patched", "got", "looks"),
    [
        (False, False, [], [0, 1, 1]),  # the defect
        (True, False, ["a"], [0, 1, 0]),
        (False, True, ["a"], None),
    ],
)
def test_a_notification_that_is_lost(
    vllm: Callable[[str], Any], *, healed: bool, patched: bool, got: list[str], looks: Any
) -> None:
    process = vllm("0.24.0")
    assert process.run(LOST) is None
    found = process.run(f"out = said({healed}, {patched})")
    assert (found[0], found[2]) == (got, True), found
    if looks is not None:
        assert found[1] == looks
    state = "{each.id: each.state.value for each in registry.observe_patches().patches}"
    assert process.run(f"out = {state}.get('broadcast-recheck')") == (APPLIED if patched else None)
