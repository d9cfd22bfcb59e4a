"""A real vLLM that is started in the foreground, dies as it loads, or refuses its arguments."""

from __future__ import annotations

import signal
import subprocess

import httpx
import pytest

from ..support.extent import long
from ..support.waiting import until
from .conftest import Cli, Live, kill
from .foreground import Foreground
from .test_cache import show_three, told_as


@long
def test_vllm_says_itself_what_is_wrong_with_its_arguments(cli: Cli) -> None:
    ran = cli("serve", "--demo", "text", "--name", "wrong", "--", "--frobnicate")
    assert ran.code == 1
    last = ran.err[ran.err.index("error:") :]
    assert last.startswith("error: unrecognized arguments: --frobnicate")
    assert str(cli.home / "instances/wrong/server.log") in last
    assert "Traceback" not in last


@long
@pytest.mark.serve("--demo", "vision", "--", "--mm-processor-cache-gb", "0", loses="engine")
def test_a_server_without_a_multimodal_cache_is_told_as_such(server: Live) -> None:
    show_three(server)
    told_as(server, "cache-off", {"encoder"})


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
