"""``vllmops cache inspect`` on real processes with vLLM's titles, and on saved snapshots."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmops.model import snapshot_files
from vllmops.model.caches import (
    CacheSample,
    CacheSetup,
    CacheSnapshot,
    EncoderCache,
    LruCache,
    ProcessCaches,
    ProcessGap,
    WorkerEncoderCache,
)
from vllmops.model.roles import Role

from ..support.commands import Answer, background, run_vllmops

Spawn = Callable[..., Any]

CACHES = """
import cachetools
from types import SimpleNamespace
from vllmops.agent.hooks import vllm_objects as objects

class Lru(cachetools.LRUCache): pass
class LruKeyReplicatedReceiverCache: pass
class EncoderCacheManager(SimpleNamespace): pass
class Scheduler: pass

cache = Lru(1000, lambda value: value)
cache.pinned_items, cache._hits, cache._total = {"b"}, 1, 4
cache["a"], cache["b"], cache["c"] = 100, 200, 300
holder = LruKeyReplicatedReceiverCache()
holder._cache = cache
objects.track_object("mm-cache", holder)
scheduler = Scheduler()
scheduler.requests = {}
scheduler.encoder_cache_manager = EncoderCacheManager(
    cache_size=10, num_free_slots=6, num_freeable_slots=10, cached={"a": set()},
    num_embeds_by_hash={"a": 4}, freeable={"a": 4}, request_cached_ids={},
)
objects.track_object("scheduler", scheduler)
"""


def inspect(*options: object, **env: str) -> Answer:
    return run_vllmops("cache", "inspect", *map(str, options), env={"COLUMNS": "80", **env})


@pytest.fixture
def engine(spawn: Spawn) -> Any:
    child = spawn("VLLM::EngineCore", Role.ENGINE)
    child.run(CACHES)
    return child


def test_figures_of_a_live_process(engine: Any) -> None:
    done = inspect("-t", engine.process.pid, "--json", "--keys")
    assert done.code == 0, done.err
    lru, encoder = done.data["caches"]
    assert lru == {
        "role": "engine",
        "pid": engine.process.pid,
        "node": os.uname().nodename,
        "dp_rank": None,
        "tp_rank": None,
        "pp_rank": None,
        "ranks": "",
        "kind": "mm-lru",
        "side": "P1",
        "entries": 3,
        "bytes": 600,
        "capacity_bytes": 1000,
        "used": 0.6,
        "hits": 1,
        "queries": 4,
        "hit_rate": 0.25,
        "pinned": 1,
        "oldest": "a",
        "newest": "c",
        "keys": ["a", "b", "c"],
    }
    assert encoder == {
        "role": "engine",
        "pid": engine.process.pid,
        "node": os.uname().nodename,
        "dp_rank": None,
        "tp_rank": None,
        "pp_rank": None,
        "ranks": "",
        "kind": "encoder",
        "side": "scheduler",
        "entries": 1,
        "slots": 10,
        "free_slots": 6,
        "freeable_slots": 10,
        "used": 0.4,
        "referenced": 0,
        "oldest": "a",
        "newest": "a",
        "keys": ["a"],
    }
    assert done.data["findings"] == []
    assert engine.run("out = (cache._hits, cache._total, list(cache._LRUCache__order))") == str(
        (1, 4, ["a", "b", "c"])
    )


def test_findings_evidence_exit_code_and_the_same_from_a_file(engine: Any, tmp_path: Path) -> None:
    engine.run("cache._LRUCache__order['ghost'] = None; cache._hits = 9")
    path = tmp_path / "snapshot.json"
    live = inspect("-t", engine.process.pid, "--json", "--save", path)
    assert live.code == 1
    found = live.data["findings"]
    assert [item["code"] for item in found] == ["mm-cache.ghost-keys", "mm-cache.hit-count"]
    assert found[0]["severity"] == "error"
    assert found[0]["evidence"] == "1: ghost"
    assert live.data["samples"] == 3
    saved = inspect(path, "--json")
    assert saved.out == live.out
    assert saved.code == 1
    engine.run("del cache._LRUCache__order['ghost']")
    assert inspect("-t", engine.process.pid).code == 0
    assert inspect("-t", engine.process.pid, "--fail-on", "warning").code == 1
    assert inspect(path, VLLMOPS_TARGET="none").code == 1


def test_a_stopped_process_is_told_and_the_others_shown(engine: Any, spawn: Spawn) -> None:
    worker = int(
        engine.run(
            "import subprocess, sys\n"
            "out = subprocess.Popen(['VLLM::Worker', '-c', 'input()'],"
            f" executable={sys.executable!r}, stdin=subprocess.PIPE).pid"
        )
    )
    done = inspect("-t", engine.process.pid)
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    assert f"worker {worker} did not answer: worker {worker} has no agent" in shown
    assert "No findings in what could be read." in shown
    assert "LruKeyReplicated" not in done.out


def test_no_process_that_tells_is_exit_code_5(engine: Any, patience: pytest.MonkeyPatch) -> None:
    patience.undo()
    os.kill(engine.process.pid, signal.SIGSTOP)
    done = inspect("-t", engine.process.pid, "--json")
    assert done.code == 5
    (error,) = json.loads(done.out)["errors"]
    assert error["code"] == "cache.no-agent"
    assert "last heartbeat is" in error["message"]
    assert error["hint"] == f"vllmops stacks dump -t {engine.process.pid}"
    assert done.data["silent"][0]["code"] == "agent.timeout"


def test_a_repair_gives_a_silent_agent_up_soon(engine: Any, patience: pytest.MonkeyPatch) -> None:
    patience.undo()
    os.kill(engine.process.pid, signal.SIGSTOP)
    done = run_vllmops("cache", "repair", "-t", str(engine.process.pid))
    assert done.code == 5
    assert "did not answer within 5 s" in " ".join(done.err.split())


def test_without_an_agent_is_exit_code_5(spawn: Spawn) -> None:
    child = spawn("VLLM::EngineCore", VLLMOPS_DISABLE="1")
    done = inspect("-t", child.process.pid)
    assert done.code == 5
    assert "has no agent" in done.err
    assert "hint:" in done.err
    assert done.out == ""


def test_watching_ends_quietly(engine: Any) -> None:
    words = ["cache", "inspect", "--watch", "--interval", "0.2", "-t", str(engine.process.pid)]
    watch = background(*words)
    assert watch.stdout is not None
    seen = 0
    while seen < 3:
        line = watch.stdout.readline()
        assert line
        seen += "No findings." in line
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=60)
    assert (watch.returncode, err) == (130, "")


# Saved snapshots.

KEYS = [f"{number:064x}" for number in range(3)]


def lru(side: str, keys: list[str] = KEYS) -> LruCache:
    return LruCache(
        kind="mm-lru",
        side=side,
        name="Cache",
        order=keys,
        sizes=[1024] * len(keys),
        digest="".join(keys),
        oldest_key=keys[0],
        newest_key=keys[-1],
        pinned_keys=[],
        pinned_only=[],
        entries=len(keys),
        bytes=1024 * len(keys),
        sum_bytes=1024 * len(keys),
        capacity_bytes=4 * 2**30,
        hits=3,
        queries=6,
    )


def snapshot(**changes: Any) -> CacheSnapshot:
    setup = CacheSetup(multimodal=True, cache_gb=4.0, cache_type="lru")
    manager = EncoderCache(
        name="EncoderCacheManager",
        slots=2048,
        free_slots=2036,
        freeable_slots=2048,
        requests_by_key={key: [] for key in KEYS},
        slots_by_key=dict.fromkeys(KEYS, 4),
        freeable=dict.fromkeys(KEYS, 4),
        inputs={},
    )
    tensors = WorkerEncoderCache(name="Runner", rank=0, keys=KEYS, bytes=1536, device="cuda:0")
    sample = {
        "taken_at": 1.0,
        "quiet": True,
        "processes": [
            ProcessCaches(pid=4194301, parent=1, role="api", caches=[lru("P0")]),
            ProcessCaches(
                pid=4194302, parent=4194301, role="engine", caches=[lru("P1"), manager], setup=setup
            ),
            ProcessCaches(pid=4194303, parent=4194302, role="worker", caches=[tensors]),
        ],
    }
    return CacheSnapshot(server="demo", samples=[CacheSample(**{**sample, **changes})])


@pytest.fixture
def saved_snapshot_path(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.json"
    snapshot_files.save_snapshot(path, snapshot())
    return path


def test_inspect_shows_both_sides_beside_each_other(saved_snapshot_path: Path) -> None:
    out = inspect(saved_snapshot_path).out
    lines = [line.split() for line in out.splitlines()]
    assert ["P0:", "api", "4194301", "P1:", "engine", "4194302"] in lines
    assert ["scheduler:", "engine", "4194302", "worker", "4194303"] in lines
    assert ["entries", "3", "3"] in lines
    assert ["bytes", "3.0", "KiB", "3.0", "KiB"] in lines
    assert ["device", "-", "cuda:0"] in lines
    assert KEYS[0] not in out
    assert KEYS[0] in inspect(saved_snapshot_path, "--keys").out
    assert out.rstrip().endswith("No findings.")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_fits_the_terminal(saved_snapshot_path: Path, columns: int) -> None:
    out = inspect(saved_snapshot_path, COLUMNS=str(columns)).out
    assert max(map(len, out.splitlines())) <= columns
    assert "4194302" in out


def test_drift_of_the_two_sides(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    whole = snapshot()
    processes = whole.samples[0].processes
    ahead = ProcessCaches(pid=4194301, parent=1, role="api", caches=[lru("P0", [*KEYS, "new"])])
    snapshot_files.save_snapshot(path, snapshot(processes=[ahead, *processes[1:]]))
    done = inspect(path, "--fail-on", "warning", "--json")
    assert done.code == 1
    assert [item["code"] for item in done.data["findings"]] == ["mm-cache.front-only"]
    assert inspect(path).code == 0


def test_a_silent_process_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    silent = ProcessGap(
        role="engine", pid=7, code="agent.stale", reason="nobody listens", hint="restart"
    )
    snapshot_files.save_snapshot(path, snapshot(gaps=[silent], quiet=False))
    done = inspect(path)
    assert done.code == 0
    assert "engine 7 did not answer: nobody listens" in done.out


@pytest.mark.parametrize(
    ("content", "code", "exit_code"),
    [
        (None, "file.unreadable", 1),
        (b"", "file.not-a-snapshot", 1),
        (b"{", "file.not-a-snapshot", 1),
        (b'{"kind":"caches","schema":99}', "file.newer", 1),
        (b'{"kind":"stacks","schema":1}', "file.other-kind", 2),
        (b'{"kind":"caches","schema":1,"server":"s","samples":[]}', "file.not-a-snapshot", 1),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, code: str, exit_code: int) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    done = inspect(path, "--json")
    assert done.code == exit_code
    assert json.loads(done.out)["errors"][0]["code"] == code
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "options", [["-t", "1"], ["--watch"], ["--save", "x"]], ids=lambda options: str(options[0])
)
def test_a_file_goes_with_no_server(saved_snapshot_path: Path, options: list[str]) -> None:
    assert inspect(saved_snapshot_path, *options).code == 2


def test_watching_is_for_a_person() -> None:
    assert inspect("--watch", "--json").code == 2
