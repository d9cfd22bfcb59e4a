"""``vllmops top`` on a real server: one screen, and the full one by Textual's pilot."""

from __future__ import annotations

import asyncio
import difflib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..support.waiting import until
from .conftest import Live
from .test_cache import send_image_request as see

pytest.importorskip("textual")

from textual.pilot import Pilot

from vllmops.collect.http.vllm_client import fetch_metrics
from vllmops.model.vllm_metrics import Metrics
from vllmops.top import table_rows
from vllmops.top.full_screen import TopApp
from vllmops.top.server_followers import METRICS_S, FollowedServers, ServerFollower

from ..top.screens import lines, wait_for_texts

LONG = {"model": "demo-vision", "prompt": "The quick", "max_tokens": 1500, "ignore_eos": True}
# What `VLLMOPS_WRITE_SCREENS=1 pytest tests/live/test_top.py` writes anew.
SCREENS = Path(__file__).with_name("top")
WRITE = os.environ.get("VLLMOPS_WRITE_SCREENS") == "1"
# What another server, machine or moment shows otherwise: frames, what a thread does, what caches
# have, names of requests, sparklines, numbers, and one that is not known yet.
VARIES = re.compile(
    r"\S+ \(.*:\d+\)|(?<=MainThread: )\w+|of \w+ \d+.*|(\d+ )?entries,.*|cmpl-\S+|[▁-█]+"
    r"|\d[\d:.,]*[%s]?|(?<= )-(?= |$)"
)
LOOKS = 100
MOST = 0.02  # of a core, at one look per second


@pytest.fixture
def server(vision_server: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    for name in ("VLLMOPS_HOME", "PYTHONPATH"):
        monkeypatch.setenv(name, vision_server.cli.environment[name])
    return vision_server


def request_completion(server: Live, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**LONG, **fields}, timeout=120)


@pytest.fixture
def load(server: Live) -> Iterator[None]:
    """One request after the other."""
    over = threading.Event()

    def send_requests() -> None:
        while not over.is_set():
            request_completion(server)

    asking = threading.Thread(target=send_requests)
    asking.start()
    yield
    over.set()
    asking.join()


@pytest.fixture
def pending_answers(server: Live) -> Iterator[list[httpx.Response]]:
    """A request that gets no further, as its worker is stopped; its answer, once it has one."""
    answers: list[httpx.Response] = []
    worker, url = server.pids()["worker"], server.url
    asking = threading.Thread(target=lambda: answers.append(request_completion(server)))
    asking.start()
    until(lambda: (fetch_metrics(url) or Metrics()).running)
    os.kill(worker, signal.SIGSTOP)
    yield answers
    os.kill(worker, signal.SIGCONT)
    asking.join()


def test_top_once_shows_the_work_of_a_server(server: Live, load: None) -> None:
    def row() -> Any:
        (found,) = server.cli("top", "--once", "--json", "-t", server.name).data["servers"]
        return found if found["figures"]["tokens_per_s"] and found["requests"] else None

    found = until(row, 120)  # a look takes 5 s and more
    assert found["state"] == "ready"
    assert found["findings"] == []
    (node,) = found["nodes"]
    states = {process["role"]: process["state"] for process in node["processes"]}
    assert states["engine"] in {"at work", "idle"}
    assert {"mm-lru P0", "mm-lru P1"} <= {cache["name"] for cache in found["caches"]}
    assert found["requests"][0]["id"].startswith("cmpl-")
    until(lambda: "tokens/s" in server.cli("top", "--once", "-t", server.name).out)


def test_the_full_screen_shows_and_ends_a_request(
    server: Live, pending_answers: list[httpx.Response]
) -> None:
    async def script() -> None:
        app = TopApp(FollowedServers([server.name, "nobody"]))
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_for_texts(app, pilot, f"{server.name}  ready", "nobody  not seen")
            await pilot.press("r")
            await wait_for_texts(app, pilot, "1 running", "cmpl-")
            await pilot.press("a")
            await wait_for_texts(app, pilot, "requests abort", "y runs it")
            # The engine learns of the end once its step is over.
            again = (server.pids()["worker"], signal.SIGCONT)
            threading.Timer(1.5, os.kill, again).start()
            await pilot.press("y")
            await wait_for_texts(app, pilot, "ended 1 request", "exit code 0")
            await pilot.press("q", "f", "down", "s")
            await wait_for_texts(app, pilot, "MainThread", ".py:")
            await pilot.press("l")
            await wait_for_texts(app, pilot, "INFO")
            await pilot.press("d", "y")
            await wait_for_texts(app, pilot, "exit code")
            await pilot.press("q", "q")

    asyncio.run(script())
    until(lambda: pending_answers)
    assert not pending_answers[0].is_success or "an operator ended it" in pending_answers[0].text


@contextmanager
def pause_with_request(server: Live) -> Iterator[None]:
    """A server that keeps its requests as they are, and a request."""
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(request_completion(server, max_tokens=1))
    )
    httpx.post(f"{server.url}/pause", params={"mode": "keep"}, timeout=30).raise_for_status()
    try:
        asking.start()
        yield
    finally:
        httpx.post(f"{server.url}/resume", timeout=30).raise_for_status()
        asking.join()
    assert answers[0].is_success


def stable(line: str) -> str:
    """A line without what varies; what follows at a distance stays in its column."""
    parts = re.split(r"(  +)", line)
    return "".join(VARIES.sub("#", part).ljust(len(part)) for part in parts).rstrip()


async def looks_as_it_did(name: str, app: TopApp, pilot: Pilot[None], *texts: str) -> None:
    """Compare a screen that has these texts with the one that is kept, until they are the same."""
    await wait_for_texts(app, pilot, *texts)
    path = SCREENS / f"{name}.txt"
    if WRITE:
        await pilot.pause(5)
        path.write_text("\n".join(map(stable, lines(app))) + "\n")
    for _ in range(100):
        now = [*map(stable, lines(app))]
        kept = path.read_text().splitlines()
        if now == kept:
            return
        await pilot.pause(0.2)
    changed = "\n".join(difflib.unified_diff(kept, now, str(path), "now", lineterm=""))
    raise AssertionError(f"{changed}\n\nVLLMOPS_WRITE_SCREENS=1 writes it anew")


def test_the_full_screen_looks_as_it_did(server: Live) -> None:
    see(server.url, 47110)  # all caches have been asked for something

    async def script() -> None:
        app = TopApp(FollowedServers([server.name, "nobody"]))
        async with app.run_test(size=(80, 24)) as pilot:
            texts = (f"{server.name}  ready", "nobody  not seen", "mm-lru P0")
            await looks_as_it_did("overview", app, pilot, *texts)
            await pilot.press("down", "s")
            await looks_as_it_did("stacks", app, pilot, "MainThread", ".py:")
            with pause_with_request(server):
                await pilot.press("r")
                await looks_as_it_did("requests", app, pilot, "cmpl-", "paused")
            await pilot.press("q")

    asyncio.run(script())


def test_a_stopped_process_is_a_finding_and_its_end_is_seen(server: Live) -> None:
    follower = ServerFollower(server.name)

    def row() -> table_rows.ServerRow:
        follower.take_sample()
        time.sleep(0.2)
        return table_rows.make_server_row(server.name, follower.samples, time.monotonic())

    assert row().findings == ()
    api = server.pids()["api"]
    os.kill(api, signal.SIGSTOP)
    try:
        until(lambda: any(found.code.startswith(("process", "api")) for found in row().findings))
        assert "stalled" in row().state
    finally:
        os.kill(api, signal.SIGCONT)
    until(lambda: not row().findings)
    assert row().state == "ready"


def test_looks_cost_two_per_cent_of_a_core(server: Live) -> None:
    follower = ServerFollower(server.name)
    follower.take_sample()

    def measure_cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def cost_s(count: int, *, asks: bool) -> float:
        began = measure_cpu_s()
        for _ in range(count):
            follower.asked_s = float("-inf") if asks else time.monotonic()
            follower.take_sample()
            table_rows.make_server_row(server.name, follower.samples, time.monotonic())
        return (measure_cpu_s() - began) / count

    assert cost_s(LOOKS, asks=False) + cost_s(10, asks=True) / METRICS_S <= MOST
