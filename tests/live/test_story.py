"""One server from its start to its end: the live part of the gate.

Nothing in it depends on how fast the machine is: what must be stuck is held by a stopped process.
"""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from vllmops.demo.inputs import make_chat_request

from ..support.waiting import until
from .conftest import Cli
from .hangs import Asked

# A start takes 20 s of a core, of which a busy machine may leave a tenth.
pytestmark = pytest.mark.timeout(1500)


def test_a_server_is_looked_into_healed_drained_and_stopped(cli: Cli) -> None:
    server = cli.serve("story", "--demo", "vision")
    target = ("-t", server.name, "--json")

    for seed in (1, 2, 3, 1):
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=make_chat_request([seed]), timeout=600
        )
        assert answer.status_code == 200, answer.text
    inspected = cli("cache", "inspect", *target).data
    front = next(row for row in inspected["caches"] if row.get("side") == "P0")
    assert (front["entries"], front["hits"], front["queries"]) == (3, 1, 4)
    assert inspected["findings"] == []

    # A worker that is stopped is the hang: /health succeeds, and nothing is answered.
    worker = server.pids()["worker"]
    os.kill(worker, signal.SIGSTOP)
    asked = Asked(server.url, make_chat_request([4]))
    try:
        run = {"model": "demo-vision", "input": "Hello", "background": True}
        made = httpx.post(f"{server.url}/v1/responses", json=run, timeout=600).json()
        assert asked.answer(1) is None
        assert httpx.get(f"{server.url}/health", timeout=600).status_code == 200
        named = cli("doctor", *target)
        assert (named.code, named.data["findings"][0]["code"]) == (1, "process.stopped"), named
        dumped = cli("stacks", "dump", "--timeout", "300", *target).data["processes"]
        (stopped,) = (process for process in dumped if process["pid"] == worker)
        assert "execute_model" in str(stopped) or "dequeue" in str(stopped), stopped

        # What can't end by itself is cancelled.
        cancelled = cli("responses", "cancel", made["id"], *target)
        assert cancelled.code == 0, cancelled
        listed = cli("responses", "list", *target).data["responses"]
        assert [(row["id"], row["status"]) for row in listed] == [(made["id"], "cancelled")]

        healed = cli("heal", "--resume", *target)
        assert healed.data["actions"], healed
        assert all(action["done"] for action in healed.data["actions"]), healed
        assert asked.answer(600) == 200
        assert server.pids()["worker"] == worker
    finally:
        os.kill(worker, signal.SIGCONT)
        asked.abort()

    assert cli("responses", "delete", made["id"], *target).code == 0
    assert cli("responses", "list", *target).data["responses"] == []

    rotated = cli("keys", "rotate", "--json")
    assert rotated.code == 0, rotated
    until(lambda: rotated.data["kid"] in str(cli("keys", "status", *target).data), 600)

    assert cli("drain", *target).code == 0
    refused = httpx.post(
        f"{server.url}/v1/chat/completions", json=make_chat_request([1]), timeout=600
    )
    assert refused.status_code == 503
    footprint = server.footprint()
    assert cli("stop", server.name).code == 0
    footprint.wait_gone(600)
