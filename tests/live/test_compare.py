"""``vllmops cache compare`` on a real server at work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx

from ..support.extent import EVERYTHING, long
from ..support.waiting import until
from .test_cache import (
    compare,
    inspect_caches,
    inspect_quiet_caches,
    list_drift_codes,
    load,
    send_image_request,
)


@contextmanager
def suspend_process(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_quiet_server_has_no_drift(vision_server: Any) -> None:
    for seed in range(20_000, 20_005):
        assert send_image_request(vision_server.url, seed).status_code == 200
    data = compare(vision_server).data
    assert (data["findings"], data["notes"], data["silent"], data["problems"]) == ([], [], [], [])
    mirrored, encoder = data["pairs"]
    assert (mirrored["sides"], encoder["sides"]) == (["P0", "P1"], ["scheduler", "worker"])
    for pair in (mirrored, encoder):
        entries = pair["entries"][0]
        assert entries >= 5
        assert pair["entries"] == [entries, entries]
        assert (pair["common"], pair["judged"], pair["only"]) == (entries, entries, [0, 0])
    assert mirrored["same_order"]
    assert data["samples"] == 2
    assert data["step"] > 0
    assert set(data["in_flight"].values()) == {0}
    shown = vision_server.cli("cache", "compare", "-t", vision_server.name)
    assert shown.out.endswith("No drift.\n")


@long
def test_no_finding_and_no_drift_while_images_flow(vision_server: Any) -> None:
    with load(vision_server.url, range(20_100, 20_400), threads=4) as statuses:
        inspected = [inspect_caches(vision_server) for _ in range(15 if EVERYTHING else 4)]
        looks = [compare(vision_server, "--apart", "0.2") for _ in range(4)]
        shown = vision_server.cli("doctor", "-t", vision_server.name, "--json").data
    assert statuses == {200}
    assert not any(data["findings"] for data in inspected)
    assert not all(data["quiet"] for data in inspected)
    assert inspect_quiet_caches(vision_server)["findings"] == []
    assert [item.data["findings"] for item in looks] == [[]] * 4
    assert [item for item in shown["findings"] if item["severity"] != "info"] == []
    assert sum(item.data["in_flight"]["http"] for item in looks) > 0
    # The more there are, the more of them nobody has used meanwhile.
    assert max(item.data["pairs"][0]["judged"] for item in looks) > 20
    assert all(pair["judged"] for pair in looks[-1].data["pairs"])


def test_drift_is_told_while_requests_are_in_flight(vision_server: Any) -> None:
    """An image of a request that is refused as too long stays in the front end alone."""
    url = vision_server.url
    for length in range(2030, 2038):
        assert send_image_request(url, 21_000 + length, text="z" * length).status_code in {200, 400}
    # So many newer entries that those in use meanwhile are among them, on a fast machine too.
    for first in range(20_100, 20_200, 2):
        assert send_image_request(url, first, first + 1).status_code == 200
    with load(url, range(20_100, 20_120), threads=1) as statuses:
        assert list_drift_codes(vision_server, "--apart", "0.1") == {"mm-cache.front-only"}
        ran = compare(vision_server, "--apart", "0.1", "--fail-on", "warning")
        # Within a second, on a machine that is as busy, it may come to know nothing.
        until(lambda: "mm-cache.front-only" in told_by_doctor(vision_server), 150)
    assert ran.code == 1
    assert statuses == {200}
    (drift,) = ran.data["findings"]
    assert "P0 of api" in drift["subject"]
    assert vision_server.cli("cache", "reset", "-t", vision_server.name).code == 0
    assert list_drift_codes(vision_server) == set()


def told_by_doctor(server: Any) -> set[str]:
    data = server.cli("doctor", "-t", server.name, "--json").data
    return {item["code"] for item in data["findings"]}


def test_an_engine_or_a_worker_that_hangs(vision_server: Any) -> None:
    log = vision_server.cli("logs", vision_server.name).out
    for role in ("engine", "worker"):
        with suspend_process(vision_server.pids()[role]):
            began = time.monotonic()
            ran = compare(vision_server, "--timeout", "1")
            assert time.monotonic() - began < 8
        assert (ran.code, ran.error["code"]) == (3, "compare.timeout")
        assert "vllmops stacks dump" in ran.error["hint"]
        assert send_image_request(vision_server.url, 1).status_code == 200
        assert list_drift_codes(vision_server) == set()
    written = vision_server.cli("logs", vision_server.name).out.removeprefix(log)
    assert "Traceback" not in written
    assert "ERROR" not in written


class Slow(BaseHTTPRequestHandler):
    """Gives a picture only when it is told to."""

    go = threading.Event()

    def do_GET(self) -> None:
        self.go.wait(30)
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """No line for each request."""


def test_a_request_that_does_not_get_to_the_engine_leaves_it_open(vision_server: Any) -> None:
    origin = HTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    image = {
        "type": "image_url",
        "image_url": {"url": f"http://127.0.0.1:{origin.server_port}/a.png"},
    }
    body = {"model": "demo-vision", "messages": [{"role": "user", "content": [image]}]}
    statuses = list[int]()

    def request_slow_image() -> None:
        answer = httpx.post(f"{vision_server.url}/v1/chat/completions", json=body, timeout=60)
        statuses.append(answer.status_code)

    caller = threading.Thread(target=request_slow_image)
    caller.start()
    try:
        until(lambda: compare(vision_server, "--timeout", "5").data["in_flight"]["rendering"])
        data = compare(vision_server, "--timeout", "5").data
        assert [note["code"] for note in data["notes"]] == ["unsettled"]
        assert data["findings"] == []
        # Scheduler and worker are judged in any case.
        assert [bool(pair["judged"]) for pair in data["pairs"]] == [False, True]
    finally:
        Slow.go.set()
        caller.join()
        origin.shutdown()
    assert statuses
    assert statuses[0] >= 400
