"""A real server that is drained without a stop, and put back."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import httpx

from ..support.waiting import until

if TYPE_CHECKING:
    from .conftest import Live

JSON = {"Content-Type": "application/json"}


def test_a_drain_lets_finish_what_runs_and_resume_ends_it(vision_server: Live) -> None:
    server, url = vision_server, vision_server.url

    def respond(tokens: int) -> httpx.Response:
        body = {
            "model": "demo-vision",
            "input": "Hello",
            "max_output_tokens": tokens,
            "background": True,
            "ignore_eos": True,
        }
        return httpx.post(f"{url}/v1/responses", json=body, timeout=60)

    def unready() -> str:
        return str(server.row["unready"])

    short = respond(200).json()["id"]
    asked: list[int] = []
    body = {
        "model": "demo-vision",
        "prompt": "The",
        "max_tokens": 1900,
        "ignore_eos": True,
    }
    request = threading.Thread(
        target=lambda: asked.append(
            httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code
        )
    )
    worker = server.pids()["worker"]
    os.kill(worker, signal.SIGSTOP)  # else all could end before the drain begins
    request.start()
    try:
        until(lambda: server.cli("requests", "list", "-t", server.name).out.count("cmpl") >= 1)
        long = respond(1900).json()["id"]
        drained = server.cli("drain", server.name, "--json")
        os.kill(worker, signal.SIGCONT)
        assert drained.code == 0, drained
        assert drained.data["in_flight"] >= 2
        # Who has asked before gets the answers.
        path = f"{url}/v1/responses"
        assert httpx.get(f"{path}/{long}").status_code == 200
        assert httpx.post(f"{path}/{long}/cancel").json()["status"] == "cancelled"
        refused = respond(1)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        until(lambda: unready() == "draining")
        assert httpx.delete(f"{path}/{long}").is_success
        waited = server.cli("drain", server.name, "--wait", "--timeout", "200", "--json")
        assert (waited.code, waited.data["in_flight"]) == (0, 0), waited
        assert httpx.get(f"{path}/{short}").json()["status"] in {"completed", "incomplete"}
        request.join(60)
        assert asked == [200]
    finally:
        os.kill(worker, signal.SIGCONT)
        assert server.cli("resume", server.name, "--json").data["draining"] is False
        request.join()
    until(lambda: not unready())
    assert respond(1).is_success


def test_a_request_that_can_not_be_sent_leaves_nothing_behind(vision_server: Live) -> None:
    """A drain would wait for it, and the front end keep it, for ever."""
    server = vision_server
    for field in (
        r'"request_id": "\ud800"',
        r'"n": 2, "request_id": "\ud800"',
        r'"stop": "\ud800"',
        r'"vllm_xargs": {"a": "\ud800"}',
    ):
        body = f'{{"model": "demo-vision", "prompt": "The", "max_tokens": 2, {field}}}'
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=JSON, timeout=60)
        assert answer.status_code in {400, 500}, answer.text  # of n > 1 vLLM says 500
    ran = server.cli("requests", "list", "-t", server.name, "--json")
    assert (ran.code, ran.data["requests"]) == (0, []), ran.data
