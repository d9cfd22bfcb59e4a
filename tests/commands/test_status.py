"""``vllmops status``, with a stand-in for vLLM (see supervision/standin.py)."""

import threading
from typing import Any

from vllmops.commands.status import CacheUse, make_cache_rows
from vllmops.supervision import shutdown

from ..support.waiting import until


def test_status_fits_one_narrow_screen(lab: Any) -> None:
    record = lab.serve("a")
    threading.Thread(target=lab.cut_off, args=(f"{record.url}/slow/600",)).start()
    until(lambda: shutdown.count_in_flight(record.processes, record.url) == 1)
    data = lab.vllmops("status", "--json").data
    assert data["instance"]["name"] == "a"
    assert data["stage"] == "ready"
    assert data["metrics"]["running"] == 1.0
    answer = lab.vllmops("status", "a", columns=60)
    assert answer.code == 0
    assert len(answer.out.splitlines()) < 24
    assert max(map(len, answer.out.splitlines())) <= 60
    assert "1 running, 0 waiting (metrics)" in answer.out
    for word in (record.url, "ready", "engine", "patches", str(record.session)):
        assert word in answer.out
    assert "…" not in answer.out


def test_status_reports_a_replaced_supervisor(lab: Any) -> None:
    lab.serve("a")
    lab.kill_supervisor("a")
    answer = lab.vllmops("status", "a")
    assert answer.code == 0
    assert "its supervisor had died; a new one has started" in answer.out


def test_status_shows_a_server_that_vllmops_did_not_start(lab: Any) -> None:
    server = lab.stranger()
    answer = lab.vllmops("status", "--json")
    assert (answer.code, answer.data["instance"]["pid"]) == (0, server.pid)
    assert answer.data["stage"] is None
    assert "vllmops did not start it" in lab.vllmops("status", str(server.pid)).out
    lab.kill(server.pid)
    engine = next(p["pid"] for p in answer.data["instance"]["processes"] if p["role"] == "engine")
    until(lambda: server.poll() is not None)
    answer = lab.vllmops("status", str(engine))
    assert answer.code == 0
    assert "orphaned" in answer.out
    assert "unknown: no agent answers, and /metrics does not either" in answer.out


def test_targets_that_are_none(lab: Any) -> None:
    assert lab.vllmops("status", "--json").error["code"] == "target.none"
    answer = lab.vllmops("status", "nobody", "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.unknown")
    record = lab.serve("a")
    lab.kill(record.session)
    until(lambda: lab.state("a") == "failed")
    answer = lab.vllmops("status", "a", "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.over")
    assert "SIGKILL" in answer.error["message"]


def test_caches_of_several_api_servers_are_told_apart() -> None:
    engine = CacheUse("engine 3", "P1", "mm-lru", 1, 10, 100)
    front = [CacheUse(f"api {pid}", "P0", "mm-lru", 1, 10, 100) for pid in (1, 2)]
    labels = [label for label, _ in make_cache_rows([*front, engine])]
    assert labels == ["mm-lru P0, api 1", "mm-lru P0, api 2", "mm-lru P1"]
