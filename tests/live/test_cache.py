"""``vllmops cache inspect`` on real servers, and the checks on vLLM's own classes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from vllmops.agent.state import caches
from vllmops.collect.agents import agent_client, agent_files
from vllmops.collect.machine.processes import Process
from vllmops.demo.inputs import make_chat_request, make_wav
from vllmops.model import process_identity
from vllmops.model.caches import EncoderCache
from vllmops.model.roles import Role
from vllmops.rules.caches import check_cache

from ..support.extent import long
from ..support.waiting import until
from .conftest import Live, Ran


def send_image_request(
    url: str, *seeds: int, text: str = "hi", timeout_s: float = 120
) -> httpx.Response:
    """One chat request with images."""
    body = make_chat_request(list(seeds), text)
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s)


def inspect_caches(server: Any, *options: str) -> Any:
    ran = server.cli("cache", "inspect", "-t", server.name, "--json", "--keys", *options)
    assert ran.code in {0, 1}, ran.err
    return ran.data


def side(data: Any, kind: str, name: str) -> Any:
    (row,) = (row for row in data["caches"] if (row["kind"], row["side"]) == (kind, name))
    return row


def inspect_quiet_caches(server: Any) -> Any:
    """A look with nothing in flight."""
    for _ in range(50):
        data = inspect_caches(server)
        if data["quiet"]:
            return data
        time.sleep(0.1)
    raise AssertionError("never quiet")


def compare(server: Any, *options: str) -> Ran:
    ran: Ran = server.cli("cache", "compare", "-t", server.name, "--json", *options)
    return ran


def list_drift_codes(server: Any, *options: str) -> set[str]:
    ran = compare(server, *options)
    assert ran.code == 0, ran.out
    return {item["code"] for item in ran.data["findings"]}


@contextmanager
def load(url: str, images: range, threads: int = 6) -> Iterator[set[int]]:
    """Requests with two images each, until the end of the block; their statuses."""
    over, statuses = threading.Event(), set[int]()

    def send_requests(number: int) -> None:
        choice = random.Random(number)
        while not over.is_set():
            statuses.add(
                send_image_request(url, choice.choice(images), choice.choice(images)).status_code
            )

    callers = [threading.Thread(target=send_requests, args=(number,)) for number in range(threads)]
    for item in callers:
        item.start()
    try:
        yield statuses
    finally:
        over.set()
        for item in callers:
            item.join()


def test_distinct_images_are_entries_on_both_sides_and_a_repeat_is_a_hit(
    vision_server: Any,
) -> None:
    before = inspect_quiet_caches(vision_server)
    url = vision_server.url
    for seed in range(100, 107):
        assert send_image_request(url, seed).status_code == 200
    after = inspect_quiet_caches(vision_server)
    for name in ("P0", "P1"):
        grown = side(after, "mm-lru", name)["entries"] - side(before, "mm-lru", name)["entries"]
        assert grown == 7
    front, back = side(after, "mm-lru", "P0"), side(after, "mm-lru", "P1")
    assert front["bytes"] == back["bytes"]
    assert front["keys"] == back["keys"]
    assert front["queries"] - side(before, "mm-lru", "P0")["queries"] == 7
    assert front["hits"] == side(before, "mm-lru", "P0")["hits"]

    assert send_image_request(url, 100).status_code == 200
    repeated = inspect_quiet_caches(vision_server)
    again = side(repeated, "mm-lru", "P0")
    assert (again["entries"], again["hits"] - front["hits"]) == (front["entries"], 1)
    # The one that was asked for again is the newest now.
    assert again["newest"] == front["keys"][-7]
    assert again["keys"] == side(repeated, "mm-lru", "P1")["keys"]
    assert repeated["findings"] == []


def test_the_worker_holds_what_the_scheduler_says(vision_server: Any) -> None:
    for seed in range(200, 205):
        assert send_image_request(vision_server.url, seed).status_code == 200
    data = inspect_quiet_caches(vision_server)
    scheduler, worker = side(data, "encoder", "scheduler"), side(data, "encoder", "worker")
    assert scheduler["entries"] == worker["entries"] >= 5
    assert set(scheduler["keys"]) == set(worker["keys"])
    assert scheduler["referenced"] == 0
    assert scheduler["freeable_slots"] == scheduler["slots"]
    assert worker["bytes"] > 0
    assert worker["device"] == "cpu"


def test_looking_changes_nothing(vision_server: Any) -> None:
    assert send_image_request(vision_server.url, 300, 301).status_code == 200
    first, second = inspect_quiet_caches(vision_server), inspect_quiet_caches(vision_server)
    assert first["caches"] == second["caches"]


def test_a_request_that_only_the_front_end_saw_is_told(vision_server: Any) -> None:
    # Long enough for the limit that the engine's request has, and not for the front end's first.
    for length in range(2020, 2040):
        refused = send_image_request(vision_server.url, 10_000 + length, text="z" * length)
        found = inspect_quiet_caches(vision_server)["findings"]
        if found:
            break
        assert refused.status_code in {200, 400}
    assert {item["code"] for item in found} >= {"mm-cache.front-only"}
    assert all(item["severity"] != "error" for item in found)
    assert send_image_request(vision_server.url, 10_000 + length).status_code == 500
    assert send_image_request(vision_server.url, 10_000 + length).status_code == 200


def test_a_saved_snapshot_gives_the_same_answer(vision_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    options = ("--json", "--save", str(path))
    live = vision_server.cli("cache", "inspect", "-t", vision_server.name, *options)
    assert vision_server.cli("cache", "inspect", str(path), "--json").out == live.out


def test_a_stopped_engine_is_told_and_the_others_shown(vision_server: Any) -> None:
    engine = vision_server.pids()["engine"]
    os.kill(engine, signal.SIGSTOP)
    try:
        time.sleep(2)
        ran = vision_server.cli("cache", "inspect", "-t", vision_server.name)
    finally:
        os.kill(engine, signal.SIGCONT)
    shown = " ".join(ran.out.split())
    assert ran.code == 0
    assert f"engine {engine} did not answer" in shown
    assert "its last heartbeat is" in shown
    assert "P0: api" in shown
    assert inspect_quiet_caches(vision_server)["silent"] == []


def test_draining_refuses_new_requests(vision_server: Any) -> None:
    rows = vision_server.row["processes"]
    row = next(row for row in rows if row["role"] == "api")
    created = process_identity.read_identity(row["pid"]).start_ticks
    api = agent_client.open_agent(Process(Role.API, row["pid"], created))
    url = vision_server.url
    before = api.fetch_traffic()
    assert before.in_flight == 0
    assert api.set_draining().draining
    try:
        refused = send_image_request(url, 1)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200
    finally:
        assert not api.set_draining(False).draining
    assert httpx.get(f"{url}/health").status_code == 200
    assert send_image_request(url, 1).status_code == 200
    # Neither what was refused nor the probes.
    assert api.fetch_traffic().started_requests == (before.started_requests or 0) + 1


def test_engine_state(vision_server: Any) -> None:
    pid = vision_server.pids()["engine"]
    engine = agent_client.open_agent(
        Process(Role.ENGINE, pid, process_identity.read_identity(pid).start_ticks)
    )
    before = engine.fetch_engine_state()
    assert send_image_request(vision_server.url, 2).status_code == 200
    after = engine.fetch_engine_state()
    assert (after.running, after.waiting, after.unfinished_requests) == (0, 0, 0)
    assert (after.current_step or 0) > (before.current_step or 0)
    assert (after.pause_state, after.sleeping) == ("unpaused", False)
    assert 0 <= (after.kv_cache_usage or 0.0) < 1
    assert (after.kv_cache_blocks or 0) > 0
    hello = engine.fetch_hello()
    assert (hello.role, hello.problems) == ("engine", ())
    time.sleep(1.2)
    pulse = agent_files.read_heartbeat(engine.process)
    assert pulse is not None
    assert pulse.heartbeat.current_step == after.current_step
    assert not pulse.is_late


def transcribe(url: str, seed: int) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/audio/transcriptions",
        data={"model": "demo-audio"},
        files={"file": ("tone.wav", make_wav(seed))},
        timeout=120,
    )


def told_as(server: Any, note: str, kinds: set[str]) -> Any:
    """What is told of a healthy server of a kind."""
    data = inspect_quiet_caches(server)
    assert [item["code"] for item in data["notes"]] == [note]
    assert {row["kind"] for row in data["caches"]} == kinds
    assert (data["problems"], data["silent"]) == ([], [])
    assert all(item["severity"] == "info" for item in data["findings"])
    compared = compare(server).data
    assert [item["code"] for item in compared["notes"]] == [note]
    assert [pair["kind"] for pair in compared["pairs"]] == ["encoder"]
    assert (compared["findings"], compared["problems"]) == ([], [])
    return data


# vLLM 0.14.1 and newer free an encoder-decoder model's entries in time: a plug-in puts the old code
# back, before ours looks.
OLD_ORDER = """
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager

construct = EncoderDecoderCacheManager.__init__

def init(self, cache_size):  # as they were until vLLM 0.14.0
    construct(self, cache_size)
    self.freed = []

def allocate(self, request, input_id):
    self.num_free_slots -= request.get_num_encoder_embeds(input_id)
    self.freed.append(request.mm_features[input_id].identifier)

def get_freed_mm_hashes(self):
    freed, self.freed = self.freed, []
    return freed

def register():
    for each in (allocate, get_freed_mm_hashes):
        setattr(EncoderDecoderCacheManager, each.__name__, each)
    EncoderDecoderCacheManager.__init__ = init
"""


@long
@pytest.mark.serve("--demo", "audio", plug_in=("old_order", OLD_ORDER), loses="worker")
def test_a_patched_whisper_ends_with_an_empty_worker_cache(server: Live) -> None:
    for seed in range(3):
        assert transcribe(server.url, seed).status_code == 200
    data = told_as(server, "encoder-decoder", {"encoder"})
    assert side(data, "encoder", "worker")["entries"] == 0
    listed = server.cli("patches", "list", "-t", server.name, "--json").data["patches"]
    states = {patch["id"]: {item["state"] for item in patch["processes"]} for patch in listed}
    assert states["encoder-decoder-free-order"] == {"applied"}


def show_three(server: Live) -> None:
    for seed in (1, 2, 1):
        assert send_image_request(server.url, seed).status_code == 200


@long
@pytest.mark.serve("--demo", "vision", "--", "--mm-processor-cache-type", "shm", loses="api")
def test_a_server_whose_cache_is_in_shared_memory(server: Live) -> None:
    show_three(server)
    data = told_as(server, "shm", {"mm-shm", "mm-processor-only", "encoder"})
    row = side(data, "mm-shm", "P0")
    assert (row["entries"], row["hits"], row["queries"]) == (2, 1, 3)


@long
@pytest.mark.serve("--demo", "vision", "--", "--api-server-count", "2", loses="all")
def test_a_server_with_two_front_ends(server: Live) -> None:
    show_three(server)
    data = told_as(server, "processor-only", {"mm-processor-only", "encoder"})
    rows = [row for row in data["caches"] if row["role"] == "api"]
    assert len({row["pid"] for row in rows}) == 2
    assert sum(row["queries"] for row in rows) == 3


# vLLM's own classes, without a server.


@pytest.mark.usefixtures("imported_vllm")
def test_vllms_lru_cache_in_use_gives_no_finding_and_is_not_changed() -> None:
    from vllm.utils.cache import LRUCache

    choice = random.Random(7)
    cache = LRUCache(100, getsizeof=lambda value: value)
    holder = type("LruKeyReplicatedSenderCache", (SimpleNamespace,), {})(_cache=cache)
    for _ in range(20_000):
        key = str(choice.randrange(40))
        match choice.randrange(5):
            case 0 | 1:
                cache.put_if_fits(key, choice.randrange(110))
            case 2:
                cache.get(key)
            case 3:
                cache.touch(key)
            case _:
                cache.pop(key, None)
        if choice.random() < 0.05:
            before = (cache.stat(), list(cache.order), cache.currsize)
            snapshot = caches.observe_lru_cache(holder, keys=True)
            assert check_cache(snapshot) == []
            assert (cache.stat(), snapshot.order, snapshot.bytes) == before
            assert snapshot.entries == len(cache)


@long
@pytest.mark.usefixtures("imported_vllm")
def test_vllms_encoder_cache_manager_in_use_gives_no_finding() -> None:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    choice = random.Random(7)
    manager = EncoderCacheManager(cache_size=60)
    requests: dict[str, Any] = {}
    scheduler = SimpleNamespace(encoder_cache_manager=manager, requests=requests)
    looks = 0
    for number in range(20_000):
        if choice.random() < 0.4 or not requests:
            inputs = [choice.randrange(20) for _ in range(choice.randrange(1, 4))]
            name = f"r{number}"
            requests[name] = SimpleNamespace(
                request_id=name,
                mm_features=[SimpleNamespace(identifier=f"image{item}") for item in inputs],
                get_num_encoder_embeds=lambda i, inputs=inputs: 1 + inputs[i] % 7,
                is_finished=lambda: False,
            )
        name = choice.choice(list(requests))
        request = requests[name]
        index = choice.randrange(len(request.mm_features))
        match choice.randrange(4):
            case 0 | 1:
                if not manager.check_and_update_cache(request, index) and manager.can_allocate(
                    request, index, 100, 0
                ):
                    manager.allocate(request, index)
            case 2:
                manager.free_encoder_input(request, index)
            case _:
                manager.free(request)
                del requests[name]
        if number % 20 == 0:
            looks += 1
            cache = caches.observe_encoder_cache(scheduler)
            assert isinstance(cache, EncoderCache)
            assert check_cache(cache) == []
            assert cache.slots_by_key == manager.num_embeds_by_hash
    assert looks == 1000


SPIN = """
import sys, threading, time
from types import SimpleNamespace
from vllm.utils.cache import LRUCache
from vllmops.agent.state import caches
from vllmops.model import process_identity as identity
cache = LRUCache(3, getsizeof=lambda value: 1)
for key in "abc":
    cache[key] = key
cache._LRUCache__order["ghost"] = None
cache._LRUCache__order.move_to_end("ghost", last=False)
thread = threading.Thread(target=cache.__setitem__, args=("new", 1), daemon=True)
thread.start()
time.sleep(0.2)
began = time.monotonic()
found = caches.observe_lru_cache(SimpleNamespace(_cache=cache))
print(thread.is_alive(), found.order_only, found.entries, time.monotonic() - began < 1)
"""


@long
def test_vllms_eviction_that_spins_is_read_in_time() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPIN],
        env={**os.environ, "VLLMOPS_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "True ['ghost'] 3 True"


def test_a_reset_empties_both_sides(vision_server: Any) -> None:
    for seed in (9001, 9002):
        assert send_image_request(vision_server.url, seed).status_code == 200
    ran = vision_server.cli("cache", "reset", "-t", vision_server.name, "--json")
    assert ran.code == 0, ran.out
    data = inspect_quiet_caches(vision_server)
    assert [side(data, "mm-lru", name)["entries"] for name in ("P0", "P1")] == [0, 0]
    assert send_image_request(vision_server.url, 9001).status_code == 200
    assert inspect_quiet_caches(vision_server)["findings"] == []


def test_a_reset_waits_for_what_is_in_flight(vision_server: Any) -> None:
    url, statuses = vision_server.url, list[int]()
    # A stopped worker keeps the request in flight for as long as the steps below take.
    worker = vision_server.pids()["worker"]
    caller = threading.Thread(
        target=lambda: statuses.append(send_image_request(url, 9100).status_code)
    )
    os.kill(worker, signal.SIGSTOP)
    try:
        caller.start()
        until(lambda: "1 running" in vision_server.cli("status", vision_server.name).out)
        words = ("cache", "reset", "-t", vision_server.name, "--timeout")
        ran = vision_server.cli(*words, "1", "--json")
        assert (ran.code, ran.error["code"]) == (3, "reset.busy")
        assert "1 request in flight" in ran.err
        # It takes requests again.
        assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
        resetting = vision_server.cli.begin(*words, "60")
        until(lambda: httpx.get(f"{url}/v1/models", timeout=10).status_code == 503)
        assert resetting.poll() is None
    finally:
        os.kill(worker, signal.SIGCONT)
    caller.join(60)
    assert resetting.wait(60) == 0
    assert statuses == [200]
    data = inspect_quiet_caches(vision_server)
    assert [side(data, "mm-lru", name)["entries"] for name in ("P0", "P1")] == [0, 0]
    assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 200
