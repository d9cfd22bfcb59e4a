"""A real vLLM that is started, started again, and drained; and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from ..support.extent import long
from ..support.waiting import until
from .conftest import Cli, Live, Ran, kill
from .foreground import Foreground
from .test_cache import show_three, told_as

MODEL = "demo-vision"
ALLOWED = "somebody_elses,forked,patient"  # without ours


def test_vllm_says_itself_what_is_wrong_with_its_arguments(cli: Cli) -> None:
    ran = cli("serve", "--demo", "text", "--name", "wrong", "--", "--frobnicate")
    assert ran.code == 1
    last = ran.err[ran.err.index("error:") :]
    assert last.startswith("error: unrecognized arguments: --frobnicate")
    assert str(cli.home / "instances/wrong/server.log") in last
    assert "Traceback" not in last


class Restarted(NamedTuple):
    """A detached server that was started again; what was told of it before, and by that."""

    server: Live
    before: Any
    ran: Ran


@pytest.fixture(scope="module")
def restarted(cli: Cli) -> Iterator[Restarted]:
    plug_in = ("--env", f"VLLM_PLUGINS={ALLOWED}")
    words = ("--demo", "vision", *plug_in, "--", "--mm-processor-cache-gb", "0")
    server = cli.serve("plugins", *words)
    try:
        yield Restarted(server, server.row, cli("restart", "plugins", "--json"))
    finally:
        cli("stop", "plugins", "--force")


def test_the_agent_joins_an_allow_list_and_a_restart_keeps_it(restarted: Restarted) -> None:
    server, before, ran = restarted
    assert {p["agent"] for p in before["processes"] if p["role"] != "other"} == {"answers"}
    assert ran.code == 0, ran.err
    assert ran.data["environment"]["VLLM_PLUGINS"] == f"{ALLOWED},vllmops"
    after = server.row
    assert after["port"] == before["port"]
    assert after["pid"] != before["pid"]
    show_three(server)
    told_as(server, "cache-off", {"encoder"})


def test_a_detached_server_outlives_its_supervisor_and_is_drained(restarted: Restarted) -> None:
    server = restarted.server
    footprint = server.footprint()
    first = server.supervisor()
    kill(first)
    seen = server.row
    assert seen["supervised"] is False
    assert seen["state"] == "ready"
    assert server.complete(model=MODEL).status_code == 200
    # The command above took it under supervision again.
    assert server.row["supervised"] is True
    assert server.supervisor() != first
    assert sorted(footprint.pids) == sorted(p["pid"] for p in server.row["processes"])

    worker = server.pids()["worker"]
    kill(server.supervisor())
    url, answers = server.url, list[httpx.Response]()
    asked = {"model": MODEL, "prompt": "The quick", "max_tokens": 50, "ignore_eos": True}
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=asked, timeout=120))
    )
    # A stopped worker keeps the request in flight for as long as the steps below take.
    os.kill(worker, signal.SIGSTOP)
    try:
        caller.start()
        until(lambda: "1 running" in server.cli("status", server.name).out)
        stopping = server.cli.begin("stop", server.name, stderr=subprocess.PIPE)
        refused = until(lambda: refusal(url))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert refused == httpx.codes.SERVICE_UNAVAILABLE
    caller.join(120)
    assert answers[0].json()["usage"]["completion_tokens"] == asked["max_tokens"]
    assert stopping.wait(60) == 0
    footprint.wait_gone(0)
    assert server.row["state"] == "stopped"
    assert server.row["failure"] is None


def refusal(url: str) -> int | None:
    """The status of a new request, None while it is still taken."""
    answer = httpx.get(f"{url}/v1/models", timeout=10)
    return None if answer.status_code == 200 else answer.status_code


@long
def test_a_foreground_serve_outlives_its_supervisor_and_ends_by_ctrl_c(cli: Cli) -> None:
    """One whose server listens on a Unix socket, and is spawned as a user's is."""
    path = cli.home / "Some.sock"
    words = ("--env", "SPAWNED=1", "--demo", "text", "--", "--uds", str(path))
    serve = Foreground(cli, "unix", *words)
    live = serve.live
    row = live.row
    assert (row["state"], row["port"], row["uds"]) == ("ready", None, str(path))
    assert any(name.startswith("sem.mp-") for name in live.footprint().segments)
    canary = cli("doctor", "-t", "unix", "--canary", "--only", "canary", "--json")
    assert canary.code == 0, canary.out
    assert canary.data["findings"] == []
    assert cli("responses", "list", "-t", f"unix:{path}", "--json").code == 0
    first = live.supervisor()
    kill(first)
    until(lambda: live.row["supervised"] and live.supervisor() != first)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=120) as client:
        asked = {"model": "demo-text", "prompt": "The quick brown", "max_tokens": 1}
        assert client.post("http://unix/v1/completions", json=asked).status_code == 200
    assert serve.process.poll() is None
    serve.end_by(signal.SIGINT)
    assert serve.process.returncode == 130
    assert not path.exists()


@long
def test_a_server_that_dies_while_loading_leaves_nothing(cli: Cli) -> None:
    serving = cli.begin(
        *("serve", "--demo", "text", "--name", "early", "--env", "SPAWNED=1", "--json"),
        stdout=subprocess.PIPE,
    )
    live = Live(cli, "early")
    until(lambda: "early" in cli("ps", "--all").out)
    worker = until(lambda: live.pids().get("worker"), 120)
    footprint = live.footprint()
    kill(worker)
    out, _ = serving.communicate(timeout=60)
    assert serving.returncode == 1
    assert b"serve.failed" in out
    footprint.wait_gone(0)


def test_an_engine_that_is_killed_under_load_tells_its_last_step(cli: Cli) -> None:
    server = cli.serve("recorded", "--demo", "text")
    try:
        with ThreadPoolExecutor(3) as pool:
            load = [
                pool.submit(server.complete, max_tokens=200, ignore_eos=True) for _ in range(40)
            ]
            until(load[0].done, 60)
            live = history(server)
            assert live["alive"]
            # Stopped first: vLLM ends an engine whose worker is gone, and this one is to be killed.
            engine = server.pids()["engine"]
            os.kill(engine, signal.SIGSTOP)
            killed_at = time.time()
            kill(engine)
            until(lambda: server.row["state"] == "failed", 60)
        dead = history(server)
        assert not dead["alive"]
        assert dead["pid"] == engine
        steps = [dict(zip(dead["columns"], step, strict=True)) for step in dead["steps"]]
        last = steps[-1]
        assert killed_at - 2 < last["began_at"] < killed_at
        # The last one may have been stopped before it was scheduled.
        assert 1 <= max(step["requests"] for step in steps[-2:]) <= 3
        assert sum(step["tokens"] for step in steps) > 200
        numbers = [step["number"] for step in steps]
        assert numbers == sorted(numbers)
        assert all(step["ended"] == step["steps"] for step in steps[:-3])
        ending = str(last["number"] + last["steps"] - 1)
        assert ending in dead["end"]
        assert ending in cli("doctor", "--history", "-t", str(engine)).out
    finally:
        cli("stop", server.name, "--force")


def history(server: Live) -> dict[str, Any]:
    """The recording of its only engine."""
    data = server.cli("doctor", "--history", "-t", server.name, "--json").data
    (recording,) = data["recordings"]
    return {"columns": data["columns"], **recording}
