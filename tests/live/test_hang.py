"""The hang of vLLM #43595, both ways over HTTP: told, repaired live, and patched away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ..support.waiting import until
from .conftest import Cli, Live, PlugIn, side_by_side
from .test_cache import FEW_IMAGES_GB, ask, look, settled, side

PATCHES = ("mm-lru-ghost-keys", "mm-lru-stale-eviction", "request-hash-cycle")

# vLLM 0.24 and newer leave no ghost keys, and 0.16 and newer no cycle in a request: a plug-in puts
# the old code back, before ours looks. Requests of so small a model end while they are young, and
# the garbage collector's first generations would take what in production only the last one does.
OLD = """
import gc
from functools import partial, wraps
from multiprocessing import current_process
from vllm.utils.cache import LRUCache
from vllm.v1.request import Request

def touch(self, key):  # as it was until vLLM 0.23
    try:
        self._LRUCache__order.move_to_end(key)
    except KeyError:
        self._LRUCache__order[key] = None

construct = Request.__init__

@wraps(construct)
def init(self, *args, block_hasher=None, **fields):  # as it was until vLLM 0.15.1
    self.get_hash_new_full_blocks = None
    construct(self, *args, **fields)
    if block_hasher is not None:
        self.get_hash_new_full_blocks = partial(block_hasher, self)
        self.block_hashes = self.get_hash_new_full_blocks()

def update_block_hashes(self):
    if self.get_hash_new_full_blocks is not None:
        self.block_hashes.extend(self.get_hash_new_full_blocks())

def register():
    LRUCache.touch = touch
    Request.__init__ = init
    Request.update_block_hashes = update_block_hashes
    if current_process().name.startswith("EngineCore"):
        gc.disable()
"""


@pytest.fixture(scope="module")
def old_code(plug_in: PlugIn) -> Path:
    return plug_in("old_code", OLD)


@pytest.fixture(scope="module")
def pair(cli: Cli, old_code: Path) -> Iterator[list[Live]]:
    """The same server without patches and with them."""

    def serve(name: str) -> Live:
        off = [word for patch in PATCHES for word in ("--no-patch", patch)]
        words = ("--demo", "vision", "--env", f"PYTHONPATH={old_code}", "--env", "SPAWNED=1")
        limits = ("--mm-processor-cache-gb", FEW_IMAGES_GB, "--limit-mm-per-prompt", '{"image":8}')
        return cli.serve(name, *words, *(off if name == "stock" else ()), "--", *limits)

    both = side_by_side(serve, ["stock", "patched"])
    yield both
    for each in both:
        cli("stop", each.name, "--force")


@pytest.fixture
def stock(pair: list[Live]) -> Live:
    return pair[0]


@pytest.fixture
def patched(pair: list[Live]) -> Live:
    return pair[1]


class Requests:
    """Image requests that nobody waits for."""

    def __init__(self, url: str, *each: tuple[int, ...]) -> None:
        self.answers: dict[tuple[int, ...], int] = {}
        self.sent = each
        self.threads = [threading.Thread(target=self.send, args=(url, seeds)) for seeds in each]
        for thread in self.threads:
            thread.start()

    def send(self, url: str, seeds: tuple[int, ...]) -> None:
        self.answers[seeds] = ask(url, *seeds, timeout_s=300).status_code

    def all_answered(self) -> bool:
        for thread in self.threads:
            thread.join(60)
        return self.answers == dict.fromkeys(self.sent, 200)


def drifted(url: str) -> Iterator[int]:
    """Images that the front end alone may have cached.

    A text fits before the image's placeholder is expanded, and not after: some lengths do so. Those
    that fit at all come last.
    """
    for length in range(2044, 2017, -1):
        assert ask(url, 1000 + length, text="z" * length).status_code in {200, 400}
        yield 1000 + length


def leave_ghost(url: str) -> bool:
    """Ask again for such images; whether the engine has failed on one.

    Its reuse leaves a key without data in the engine.
    """
    return any(ask(url, seed).status_code == 500 for seed in drifted(url))


def text(url: str, timeout_s: float) -> int:
    message = {"role": "user", "content": "hi"}
    body = {"model": "demo-vision", "messages": [message], "max_tokens": 1}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s).status_code


def ghosts(server: Live) -> set[str]:
    """The processes that are told to have ghost keys."""
    found = look(server)["findings"]
    return {
        str(each["subject"]).split(" of ")[-1].split()[0]
        for each in found
        if each["code"] == "mm-cache.ghost-keys"
    }


def pids(server: Live) -> list[int]:
    return sorted(process["pid"] for process in server.row["processes"])


def repaired(server: Live) -> Any:
    before = pids(server)
    plan = server.cli("cache", "repair", "-t", server.name, "--dry-run", "--json")
    assert (plan.code, plan.data["dry_run"]) == (1, True)
    ran = server.cli("cache", "repair", "-t", server.name, "--json")
    assert ran.code == 0, ran.out
    assert [each["left"] for each in ran.data["repairs"]] == [None] * len(ran.data["repairs"])
    assert pids(server) == before
    return ran.data


def both_sides_agree(server: Live) -> bool:
    data = settled(server)
    front, engine = (side(data, "mm-lru", name) for name in ("P0", "P1"))
    return bool(front["keys"] == engine["keys"] and front["bytes"] == engine["bytes"])


def test_engine_hangs_and_is_repaired(stock: Live) -> None:
    url = stock.url
    assert leave_ghost(url)
    engine = psutil.Process(stock.pids()["engine"])
    requests = Requests(url, *[(seed,) for seed in range(10)])
    until(lambda: engine.cpu_percent(1) > 50 and ghosts(stock) == {"engine"})
    assert len(requests.answers) < len(requests.sent)
    assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    with pytest.raises(httpx.TimeoutException):
        text(url, 5)
    data = repaired(stock)
    assert {each["role"] for each in data["repairs"]} == {"engine"}
    assert requests.all_answered()
    assert text(url, 60) == 200
    assert Requests(url, *[(seed,) for seed in range(100, 110)]).all_answered()
    assert both_sides_agree(stock)


def test_front_end_hangs_and_is_repaired(stock: Live) -> None:
    url = stock.url
    # They fit one by one, not together.
    requests = Requests(url, tuple(range(200, 207)))
    until(lambda: ghosts(stock) == {"api"})
    assert requests.answers == {}
    assert text(url, 60) == 200
    data = repaired(stock)
    # It gets on to the engine, and is stuck there in the same way.
    assert {each["role"] for each in data["repairs"]} == {"api", "engine"}
    assert requests.all_answered()
    assert Requests(url, *[(seed,) for seed in range(300, 310)]).all_answered()
    assert both_sides_agree(stock)


def test_nothing_to_repair_changes_nothing(stock: Live) -> None:
    before = settled(stock)["caches"]
    ran = stock.cli("cache", "repair", "-t", stock.name)
    assert (ran.code, "Nothing to repair." in ran.out) == (0, True)
    assert settled(stock)["caches"] == before


def test_a_patched_server_can_not_be_hung(patched: Live) -> None:
    url = patched.url
    leave_ghost(url)
    assert Requests(url, *[(seed,) for seed in range(10)]).all_answered()
    assert Requests(url, tuple(range(200, 207))).all_answered()
    assert text(url, 60) == 200
    assert ghosts(patched) == set()


def states(server: Live) -> dict[str, set[str]]:
    ran = server.cli("patches", "list", "-t", server.name, "--json")
    assert ran.code == 0
    return {
        patch["id"]: {process["state"] for process in patch["processes"]}
        for patch in ran.data["patches"]
    }


def test_patches_tell_what_became_of_them(stock: Live, patched: Live) -> None:
    assert {patch: states(stock)[patch] for patch in PATCHES} == {p: {"off"} for p in PATCHES}
    assert {patch: states(patched)[patch] for patch in PATCHES} == {p: {"applied"} for p in PATCHES}
    verified = stock.cli("patches", "verify", "-t", stock.name, "--json")
    present = {
        patch["id"]: any(process["present"] for process in patch["processes"])
        for patch in verified.data["patches"]
    }
    assert verified.code == 1
    assert {name for name, there in present.items() if there} == set(PATCHES)
    assert patched.cli("patches", "verify", "-t", patched.name).code == 0
    told = " ".join(stock.cli("status", stock.name).out.split())  # it may take two lines
    assert f"off: {', '.join(PATCHES)}" in told
    seconds = patched.cli("patches", "list", "-t", patched.name, "--json").data["seconds"]
    assert all(each < 0.3 for each in seconds.values())


def recorded(server: Live, path: Path) -> Any:
    """What ``memory record`` says of a server, which is what the file says again."""
    load = ("--load", "images", "--requests", "60", "--seed", "1000")
    files = ("--save", str(path), "--plot", str(path.with_suffix(".png")))
    ran = server.cli("memory", "record", "-t", server.name, *load, *files, "--json")
    again = server.cli("memory", "report", str(path), "--json")
    assert (again.code, {**again.data, "plot": ran.data["plot"]}) == (ran.code, ran.data)
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert [sample["round"] for sample in ran.data["samples"]] == [0, 1, 2, 3, 4, 5]
    return ran.data


def finished_alive(data: Any) -> list[int]:
    """After each round, how many finished requests the engine still had."""
    return [
        process["agent"]["requests"]["finished_alive"]
        for sample in data["samples"][1:]
        for process in sample["processes"]
        if process["role"] == "engine"
    ]


def accused(data: Any, code: str) -> set[str]:
    """The roles of the processes with such a finding."""
    return {each["subject"].split()[0] for each in data["findings"] if each["code"] == code}


def test_requests_that_hold_themselves_grow_memory_and_patched_ones_do_not(
    stock: Live, patched: Live, tmp_path: Path
) -> None:
    left = recorded(stock, tmp_path / "stock.json")
    assert finished_alive(left)[-1] - finished_alive(left)[0] >= 4 * 60
    assert accused(left, "memory.finished-requests-alive") == {"engine"}
    assert "engine" in accused(left, "memory.rss-growing")
    gone = recorded(patched, tmp_path / "patched.json")
    assert max(finished_alive(gone)) <= 2
    assert accused(gone, "memory.finished-requests-alive") == set()
    assert "engine" not in accused(gone, "memory.rss-growing")


def test_patches_of_this_environment_need_no_server(cli: Cli) -> None:
    ran = cli("patches", "verify", "--json")
    assert ran.code == 0, ran.out
    for patch in ran.data["patches"]:
        (here,) = patch["processes"]
        assert (here["role"], here["present"]) == ("here", False)
        assert here["state"] in {"applied", "fixed upstream"}
