"""The hang of vLLM #43595, both ways over HTTP: told, repaired live, and patched away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .conftest import Cli, Live, until
from .test_cache import FEW_IMAGES_GB, ask, look, settled, side

PATCHES = ("mm-lru-ghost-keys", "mm-lru-stale-eviction")

# vLLM 0.24 and newer leave no ghost keys: a plug-in puts the old method back, before ours looks.
TOUCH = """
from vllm.utils.cache import LRUCache

def touch(self, key):  # as it was until vLLM 0.23
    try:
        self._LRUCache__order.move_to_end(key)
    except KeyError:
        self._LRUCache__order[key] = None

def register():
    LRUCache.touch = touch
"""


@pytest.fixture(scope="module")
def old_touch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plug-in")
    (folder / "old_touch.py").write_text(TOUCH)
    metadata = folder / "old_touch-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: old-touch\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nold_touch = old_touch:register\n"
    (metadata / "entry_points.txt").write_text(entry)
    return folder


def serve(cli: Cli, name: str, plug_in: Path, *options: str) -> Live:
    words = ("--demo", "vision", "--env", f"PYTHONPATH={plug_in}", *options)
    limits = ("--mm-processor-cache-gb", FEW_IMAGES_GB, "--limit-mm-per-prompt", '{"image":8}')
    return cli.serve(name, *words, "--", *limits)


@pytest.fixture(scope="module")
def stock(cli: Cli, old_touch: Path) -> Iterator[Live]:
    off = [word for patch in PATCHES for word in ("--no-patch", patch)]
    yield serve(cli, "stock", old_touch, *off)
    cli("stop", "stock", "--force")


@pytest.fixture(scope="module")
def patched(cli: Cli, old_touch: Path) -> Iterator[Live]:
    yield serve(cli, "patched", old_touch)
    cli("stop", "patched", "--force")


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


def leave_ghost(url: str) -> bool:
    """Cache images in the front end alone, then ask again; whether the engine has failed on one.

    A text fits before the image's placeholder is expanded, and not after: only the front end has
    cached the image, and a reuse leaves a key without data in the engine.
    """
    for length in range(2018, 2045):
        assert ask(url, 1000 + length, text="z" * length).status_code in {200, 400}
        if ask(url, 1000 + length).status_code == 500:
            return True
    return False


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
    assert f"off: {', '.join(PATCHES)}" in stock.cli("status", stock.name).out
    seconds = patched.cli("patches", "list", "-t", patched.name, "--json").data["seconds"]
    assert all(each < 0.3 for each in seconds.values())


def test_patches_of_this_environment_need_no_server(cli: Cli) -> None:
    ran = cli("patches", "verify", "--json")
    assert ran.code == 0, ran.out
    for patch in ran.data["patches"]:
        (here,) = patch["processes"]
        assert (here["role"], here["present"]) == ("here", False)
        assert here["state"] in {"applied", "fixed upstream"}
