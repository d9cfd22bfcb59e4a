"""Every way to hang that can be made on a CPU: it is named, and what can go on does.

That of vLLM #43595, which comes in two ways, is repaired live as well, and patched away.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from vllmops.actions.request_abort import abort_requests
from vllmops.bundle import fatal_messages
from vllmops.collect.agents import agent_client
from vllmops.model.caches import EncoderCache
from vllmops.observe.requests import listing
from vllmops.servers.discovery import resolve_server

from ..support.extent import EVERYTHING, long
from ..support.waiting import until
from .conftest import Cli, Live, Ran, lose
from .hangs import (
    HANGS,
    PATCHES,
    Asked,
    Hang,
    Prone,
    input_thread_dead,
    is_real,
    larger_than_the_cache,
    leave_ghost,
    livelock,
    trigger_backtracking,
)
from .test_cache import (
    inspect_caches,
    inspect_quiet_caches,
    list_drift_codes,
    load,
    send_image_request,
    side,
)

WATCHED_S = 15.0  # until a stall is sure, a start of the command included
CAPTURED_S = 25.0
ENDED_S = 1.0  # from an abort to the client's error and to free blocks and pins
NAMED_S = 20.0  # from the call of a command that looks at a live server to its answer
REQUESTS = 60  # of a round, whose memory is to show
SPINNING = "stack.mm-cache-eviction-spin"


@pytest.fixture
def stock(hung_pair: tuple[Prone, Live]) -> Prone:
    return hung_pair[0]


@pytest.fixture
def patched_server(hung_pair: tuple[Prone, Live]) -> Live:
    return hung_pair[1]


class Requests:
    """Image requests that nobody waits for."""

    def __init__(self, url: str, *item: tuple[int, ...]) -> None:
        self.answers: dict[tuple[int, ...], int] = {}
        self.sent = item
        self.threads = [threading.Thread(target=self.send, args=(url, seeds)) for seeds in item]
        for thread in self.threads:
            thread.start()

    def send(self, url: str, seeds: tuple[int, ...]) -> None:
        self.answers[seeds] = send_image_request(url, *seeds, timeout_s=300).status_code

    def all_answered(self) -> bool:
        for thread in self.threads:
            thread.join(60)
        return self.answers == dict.fromkeys(self.sent, 200)


def text(url: str, timeout_s: float) -> int:
    message = {"role": "user", "content": "hi"}
    body = {"model": "demo-vision", "messages": [message], "max_tokens": 1}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=timeout_s).status_code


def ghosts(server: Live) -> set[str]:
    """The processes that are told to have ghost keys."""
    found = inspect_caches(server)["findings"]
    return {
        str(item["subject"]).split(" of ")[-1].split()[0]
        for item in found
        if item["code"] == "mm-cache.ghost-keys"
    }


def pids(server: Live) -> list[int]:
    return sorted(process["pid"] for process in server.row["processes"])


def repair_caches(server: Live) -> Any:
    before = pids(server)
    plan = server.cli("cache", "repair", "-t", server.name, "--dry-run", "--json")
    assert (plan.code, plan.data["dry_run"]) == (1, True)
    ran = server.cli("cache", "repair", "-t", server.name, "--json")
    assert ran.code == 0, ran.out
    assert [item["left"] for item in ran.data["repairs"]] == [None] * len(ran.data["repairs"])
    assert pids(server) == before
    return ran.data


def both_sides_agree(server: Live) -> bool:
    data = inspect_quiet_caches(server)
    front, engine = (side(data, "mm-lru", name) for name in ("P0", "P1"))
    return bool(front["keys"] == engine["keys"] and front["bytes"] == engine["bytes"])


QUICK = ("--interval", "0.5", "--checks", "2", "--patience", "3", "--for", "60")


def prove(server: Prone, code: str, shown: str = "", *, captured: bool) -> None:
    """A server that hangs is found to, and why; with ``captured`` also by a watch, from evidence.

    Args:
        server: that hangs.
        code: of the finding that names it in its stacks.
        shown: of the one that names it where more is known; the same where empty.
        captured: whether a watch is to catch it, and what it keeps to name it.
    """
    target = ("-t", server.name, "--json")
    asked: list[tuple[str, ...]] = [("doctor", *target)]
    if captured:
        bundle = caught(server, str(server.place / code))
        asked += [("doctor", bundle, "--json"), ("stacks", "explain", bundle, "--json")]
    else:
        asked += [("stacks", "dump", "--explain", *target)]
    *doctors, explained = [collect_finding_codes(server, code, *words) for words in asked]
    assert explained == [code]
    for named in doctors:
        assert {code, shown or code} & set(named), named


def collect_finding_codes(server: Prone, code: str, *words: str) -> list[str]:
    """What a command names, in time."""
    began = time.monotonic()
    ran = server.cli(*words)
    took_s = time.monotonic() - began
    print(f"{code}: {' '.join(words[:2])} took {took_s:.1f} s")  # pytest -rP shows it
    assert took_s < NAMED_S
    return codes(ran)


def caught(server: Prone, place: str) -> str:
    """The bundle of a watch that notices a stall in time."""
    began = time.monotonic()
    ran = server.cli("watch", "--once", *QUICK, "-o", place, "-t", server.name, "--json")
    assert ran.code == 1, ran
    stalled = next(event for event in ran.data["events"] if event["event"] == "stalled")
    # What it takes to be sure, and no more than its budget for the evidence.
    assert time.monotonic() - began < 3 + WATCHED_S + CAPTURED_S
    return str(stalled["bundle"])


def codes(ran: Ran) -> list[str]:
    assert ran.code == 1, ran
    return [finding["code"] for finding in ran.data["findings"]]


def test_a_small_cache_evicts_oldest_first(patched_server: Live) -> None:
    keys = []
    for seed in range(12):
        assert send_image_request(patched_server.url, seed).status_code == 200
        keys.append(side(inspect_quiet_caches(patched_server), "mm-lru", "P0")["newest"])
    data = inspect_quiet_caches(patched_server)
    for name in ("P0", "P1"):
        row = side(data, "mm-lru", name)
        assert row["keys"] == keys[-row["entries"] :]
        assert row["entries"] < 12
        assert 0.5 < row["used"] <= 1
    assert data["findings"] == []
    for images in (range(5), range(12)):  # they all fit; they do not
        with load(patched_server.url, images, threads=2):
            assert list_drift_codes(patched_server, "--apart", "0.1") == set()


def test_engine_hangs_and_is_repaired(stock: Prone) -> None:
    url = stock.url
    assert leave_ghost(url)
    engine = psutil.Process(stock.pids()["engine"])
    requests = Requests(url, *[(seed,) for seed in range(10)])
    until(lambda: engine.cpu_percent(1) > 15 and ghosts(stock) == {"engine"}, 120)
    assert len(requests.answers) < len(requests.sent)
    assert httpx.get(f"{url}/health", timeout=5).status_code == 200
    with pytest.raises(httpx.TimeoutException):
        text(url, 5)
    prove(stock, SPINNING, captured=True)
    data = repair_caches(stock)
    assert {item["role"] for item in data["repairs"]} == {"engine"}
    assert requests.all_answered()
    assert text(url, 60) == 200
    assert Requests(url, *[(seed,) for seed in range(100, 110)]).all_answered()
    assert both_sides_agree(stock)


@long
def test_front_end_hangs_and_is_repaired(stock: Prone) -> None:
    url = stock.url
    # They fit one by one, not together.
    requests = Requests(url, tuple(range(200, 207)))
    until(lambda: ghosts(stock) == {"api"})
    assert requests.answers == {}
    assert text(url, 60) == 200
    prove(stock, SPINNING, captured=EVERYTHING)
    data = repair_caches(stock)
    # It gets on to the engine, and is stuck there in the same way.
    assert {item["role"] for item in data["repairs"]} == {"api", "engine"}
    assert requests.all_answered()
    assert Requests(url, *[(seed,) for seed in range(300, 310)]).all_answered()
    assert both_sides_agree(stock)


def test_repair_of_a_healthy_server_changes_nothing(stock: Live) -> None:
    before = inspect_quiet_caches(stock)["caches"]
    ran = stock.cli("cache", "repair", "-t", stock.name)
    assert (ran.code, "Nothing to repair." in ran.out) == (0, True)
    assert inspect_quiet_caches(stock)["caches"] == before


def test_a_healthy_server_is_not_healed(patched_server: Live) -> None:
    before = inspect_quiet_caches(patched_server)["caches"]
    assert outcomes(patched_server) == (0, [])
    assert inspect_quiet_caches(patched_server)["caches"] == before
    with load(patched_server.url, range(3), threads=2):
        assert outcomes(patched_server, "--resume") == (0, [])


def test_a_patched_server_can_not_be_hung(patched_server: Live) -> None:
    url = patched_server.url
    leave_ghost(url)
    assert Requests(url, *[(seed,) for seed in range(10)]).all_answered()
    assert Requests(url, tuple(range(200, 207))).all_answered()
    assert text(url, 60) == 200
    assert ghosts(patched_server) == set()


def states(server: Live) -> dict[str, set[str]]:
    ran = server.cli("patches", "list", "-t", server.name, "--json")
    assert ran.code == 0
    return {
        patch["id"]: {process["state"] for process in patch["processes"]}
        for patch in ran.data["patches"]
    }


def test_patches_tell_what_became_of_them(stock: Live, patched_server: Live) -> None:
    assert {patch: states(stock)[patch] for patch in PATCHES} == {p: {"off"} for p in PATCHES}
    assert {patch: states(patched_server)[patch] for patch in PATCHES} == {
        p: {"applied"} for p in PATCHES
    }
    verified = stock.cli("patches", "verify", "-t", stock.name, "--json")
    present = {
        patch["id"]: any(process["present"] for process in patch["processes"])
        for patch in verified.data["patches"]
    }
    assert verified.code == 1
    assert {name for name, there in present.items() if there} == set(PATCHES)
    assert patched_server.cli("patches", "verify", "-t", patched_server.name).code == 0
    shown = " ".join(stock.cli("status", stock.name).out.split())  # it may take two lines
    assert f"off: {', '.join(PATCHES)}" in shown
    seconds = patched_server.cli("patches", "list", "-t", patched_server.name, "--json").data[
        "seconds"
    ]
    assert all(item < 0.3 for item in seconds.values())


def record_memory(server: Live, path: Path) -> Any:
    """What ``memory record`` says of a server, which is what the file says again."""
    load = ("--load", "images", "--requests", str(REQUESTS), "--seed", "1000")
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


def list_roles_with_finding(data: Any, code: str) -> set[str]:
    """The roles of the processes with such a finding."""
    return {item["subject"].split()[0] for item in data["findings"] if item["code"] == code}


@long
def test_requests_that_hold_themselves_grow_memory_and_patched_ones_do_not(
    stock: Live, patched_server: Live, tmp_path: Path
) -> None:
    left = record_memory(stock, tmp_path / "stock.json")
    assert finished_alive(left)[-1] - finished_alive(left)[0] >= 4 * REQUESTS
    assert list_roles_with_finding(left, "memory.finished-requests-alive") == {"engine"}
    assert "engine" in list_roles_with_finding(left, "memory.rss-growing")
    gone = record_memory(patched_server, tmp_path / "patched.json")
    assert max(finished_alive(gone)) <= 2
    assert list_roles_with_finding(gone, "memory.finished-requests-alive") == set()
    assert "engine" not in list_roles_with_finding(gone, "memory.rss-growing")


@pytest.mark.usefixtures("imported_vllm")
def test_patches_of_this_environment_need_no_server(cli: Cli) -> None:
    ran = cli("patches", "verify", "--json")
    assert ran.code == 0, ran.out
    for patch in ran.data["patches"]:
        (here,) = patch["processes"]
        assert (here["role"], here["present"]) == ("here", False)
        assert here["state"] in {"applied", "fixed upstream"}


def in_flight(server: Prone, *words: str) -> list[dict[str, Any]]:
    ran = server.cli("requests", "list", "-t", server.name, "--json", *words)
    assert ran.code == 0, ran
    return list(ran.data["requests"])


def end_all(server: Prone) -> list[dict[str, Any]]:
    ran = server.cli("requests", "abort", "--all", "--yes", "-t", server.name, "--json")
    return [*ran.data["requests"], {"code": ran.code}]


def holds(server: Prone) -> tuple[float, int]:
    """How much of the KV cache is in use, as a share, and the pins in the encoder cache."""
    engine = agent_client.open_agent(server.processes["engine"])
    (cache,) = (one for one in engine.fetch_caches().caches if isinstance(one, EncoderCache))
    usage = engine.fetch_engine_state().kv_cache_usage
    assert usage is not None
    return usage, sum(map(len, cache.requests_by_key.values()))


@pytest.mark.parametrize("made", [larger_than_the_cache, livelock])
def test_requests_that_nothing_schedules_can_be_ended(
    stock: Prone, made: Callable[[Prone], AbstractContextManager[list[Asked]]]
) -> None:
    with made(stock) as asked:
        until(lambda: len(in_flight(stock)) == len(asked), 40, lambda: in_flight(stock))
        time.sleep(2)
        assert len(in_flight(stock, "--stuck", "--stuck-after", "1")) == len(asked)
        server = resolve_server(stock.name)
        rows = listing.list_requests(server, 1).rows
        began = time.monotonic()
        assert {one.reason for one in abort_requests(server, rows, "")} == {""}
        assert {one.answer(ENDED_S) for one in asked} == {410}
        assert holds(stock) == (0.0, 0)
        took_s = time.monotonic() - began
        print(f"{len(asked)} requests were ended within {took_s:.2f} s")  # pytest -rP shows it
        assert took_s < ENDED_S
    assert stock.send_chat_request().answer(30) == 200


def test_a_request_is_ended_while_a_parser_blocks_the_event_loop(stock: Prone) -> None:
    endless = stock.send_chat_request(max_tokens=1000, ignore_eos=True)
    with trigger_backtracking(stock) as asked:
        (ended, result) = end_all(stock)
        assert result == {"code": 1}
        # On a busy machine the command may end before the engine's step does.
        assert re.search("^the engine has freed it; API server|has the abort", ended["left"])
        until(lambda: holds(stock) == (0.0, 0), ENDED_S)
        until(lambda: outcomes(stock, "--only", "event-loop") == (0, [("event-loop", True)]))
        assert asked[0].answer(30) == 500
    assert endless.answer(30) == 200  # ended with what it had by then
    assert stock.send_chat_request().answer(30) == 200


def test_a_request_that_only_the_engine_knows(stock: Prone) -> None:
    with larger_than_the_cache(stock) as asked:
        until(lambda: len(in_flight(stock)) == 2)
        until(lambda: stock.count_handed_requests() == 2)  # a heartbeat late
        (stock.place / "lost-abort").touch()
        for one in asked:
            one.abort()
        until(lambda: stock.count_handed_requests() == 0)
        (stock.place / "lost-abort").unlink()
        ran = stock.cli("requests", "list", "-t", stock.name, "--json", "--fail-on", "warning")
        assert (ran.code, len(ran.data["requests"])) == (1, 2)
        assert {finding["code"] for finding in ran.data["findings"]} == {"request.zombie"}
        # The first one alone can never run: the order of what is healed does not matter.
        assert outcomes(stock, "--only", "zombies") == (0, 2 * [("zombies", True)])
    assert in_flight(stock) == []
    assert stock.send_chat_request().answer(30) == 200


def outcomes(server: Live, *words: str) -> tuple[int, list[tuple[str, bool]]]:
    """The exit code of ``heal``, and what became of each thing that it has found."""
    ran = server.cli("heal", "-t", server.name, "--json", *words)
    assert ran.data["problems"] == []
    return ran.code, [(one["action"], one["done"]) for one in ran.data["actions"]]


@pytest.mark.parametrize(
    ("made", "action", "answers"),
    [(larger_than_the_cache, "admission", [410, 200]), (livelock, "encoder-cache", [200, 200])],
)
def test_a_queue_that_does_not_go_on_is_healed(
    stock: Prone,
    made: Callable[[Prone], AbstractContextManager[list[Asked]]],
    action: str,
    answers: list[int],
) -> None:
    with made(stock) as asked:
        until(lambda: len(in_flight(stock)) == len(asked), 40, lambda: in_flight(stock))
        assert outcomes(stock, "--dry-run") == (1, [(action, False)])
        # Its code depends on whether this has lasted so long that it is told as a stall.
        assert outcomes(stock, "--skip", action)[1] == []
        assert {one.answer(0.1) for one in asked} == {None}
        assert outcomes(stock) == (0, [(action, True)])
        assert [one.answer(30) for one in asked] == answers
    assert f"vllmops heal by root: {action}, engine" in stock.launched.log.read_text()


def test_heal_resumes_a_pause_or_a_stopped_process_only_with_the_option(stock: Prone) -> None:
    def ends(action: str, asked: Asked) -> None:
        assert outcomes(stock) == (1, [(action, False)])
        assert asked.answer(0.1) is None
        assert outcomes(stock, "--resume") == (0, [(action, True)])
        assert asked.answer(30) == 200

    assert httpx.post(f"{stock.url}/pause", params={"mode": "keep"}, timeout=30).status_code == 200
    shown = stock.cli("heal", "--dry-run", "-t", stock.name, "--json").data["actions"]
    assert "POST /pause from 127.0.0.1" in shown[0]["seen"]
    ends("paused", stock.send_chat_request())
    with stock.suspend_process("worker"):
        asked = stock.send_chat_request()
        until(lambda: [row["state"] for row in in_flight(stock)] == ["running"])
        behind = stock.send_chat_request()  # the engine reads it once this step is over
        until(lambda: stock.count_handed_requests() == 2)
        ends("stopped", asked)
        assert behind.answer(30) == 200


def test_a_thread_that_ended_is_started_again(stock: Prone) -> None:
    with stock.suspend_process("worker"):
        first = stock.send_chat_request()
        until(lambda: stock.count_handed_requests() == 1)
        asked = [
            stock.send_chat_request(),
            stock.unencodable(),
            stock.send_chat_request(),
        ]  # their outputs are one message
        until(lambda: stock.count_handed_requests() == 4)
    assert first.answer(30) == 200
    until(lambda: outcomes(stock, "--skip", "caches", "--dry-run") == (1, [("io-threads", False)]))
    behind = stock.send_chat_request()
    assert behind.answer(1) is None
    assert outcomes(stock, "--skip", "caches") == (0, [("io-threads", True)])
    assert [one.answer(30) for one in (*asked, behind)] == [200, 410, 200, 200]
    with input_thread_dead(stock) as asked:
        code, done = outcomes(stock)
        # The reader's end may have left a ghost key, too.
        assert (code, set(done) - {("caches", True)}) == (0, {("io-threads", True)})
        assert [one.answer(30) for one in asked] == [410, 200]
    assert stock.send_chat_request().answer(30) == 200
    written, read = fatal_messages.fetch_fatal_messages(resolve_server(stock.name))[
        -2:
    ]  # for a bundle
    assert (written.thread, read.thread) == ("output thread", "input thread")
    (type_, *frames) = read.frames
    assert (type_.head, len(frames[0].head)) == (b"\0", frames[0].size)
    assert read.requests[0].encode() in frames[0].head


@long
def test_heal_names_a_hang_it_cannot_heal_and_the_requests_in_flight(stock: Prone) -> None:
    with stock.defect("worker"):
        asked = stock.send_chat_request()
        until(lambda: bool(in_flight(stock, "--stuck", "--stuck-after", "11")))
        ran = stock.cli("heal", "-t", stock.name, "--json")
        assert (ran.code, ran.data["actions"]) == (1, [])
        stuck = ran.data["stuck"]
        assert (stuck["finding"]["code"], stuck["in_flight"]) == ("stack.worker-stuck-broadcast", 1)
    assert asked.answer(30) == 200


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(
            hang,
            marks=[*(() if hang.short else [long]), *(() if hang.lives_on else [pytest.mark.ends])],
            id=hang.name,
        )
        for hang in HANGS
    ],
)
def test_a_hang_is_named(stock: Prone, hang: Hang) -> None:
    """The last one ends the server."""
    with hang.made(stock) as asked:
        is_real(stock, asked, hang.age_s)
        prove(stock, hang.code, hang.told, captured=hang.captured or EVERYTHING)
    if hang.lives_on:
        assert {item.answer(30) for item in asked if not item.aborted} == {200}
        assert stock.send_chat_request().answer(30) == 200


def test_an_engine_that_is_killed_under_load_tells_its_last_step(patched_server: Live) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = {"model": "demo-vision", "max_tokens": 200, "ignore_eos": True}
        load = [pool.submit(patched_server.complete, **asked) for _ in range(40)]
        until(load[0].done, 60)
        live = history(patched_server)
        assert live["alive"]
        # Stopped first: vLLM ends an engine whose worker is gone, and this one is to be killed.
        engine = patched_server.pids()["engine"]
        os.kill(engine, signal.SIGSTOP)
        killed_at = time.time()
        lose(patched_server, "engine")
    dead = history(patched_server)
    assert not dead["alive"]
    assert dead["pid"] == engine
    steps = [dict(zip(dead["columns"], step, strict=True)) for step in dead["steps"]]
    last = steps[-1]
    assert live["steps"][-1][live["columns"].index("number")] <= last["number"]
    assert last["began_at"] < killed_at
    # The last one may have been stopped before it was scheduled.
    assert 1 <= max(step["requests"] for step in steps[-2:]) <= 3
    assert sum(step["tokens"] for step in steps) > 200
    numbers = [step["number"] for step in steps]
    assert numbers == sorted(numbers)
    assert all(step["ended"] == step["steps"] for step in steps[:-3])
    ending = str(last["number"] + last["steps"] - 1)
    assert ending in dead["end"]
    assert ending in patched_server.cli("doctor", "--history", "-t", str(engine)).out


def history(server: Live) -> dict[str, Any]:
    """The recording of its only engine."""
    data = server.cli("doctor", "--history", "-t", server.name, "--json").data
    (recording,) = data["recordings"]
    return {"columns": data["columns"], **recording}
