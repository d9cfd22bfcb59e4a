"""``vllmops metrics`` on servers with the agent and without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllmops.commands import metrics
from vllmops.commands.options import parse_host_port
from vllmops.metrics import http_listener
from vllmops.metrics.collector import BackgroundCollector
from vllmops.servers.discovery import Server

from ..support import commands
from ..support.children import Child
from ..support.ports import free_port
from ..support.waiting import until

TITLE = "VLLM::APIServer_0"


def vllmops(child: Child, *words: str) -> list[str]:
    return [sys.executable, "-m", "vllmops", *words, "-t", str(child.process.pid)]


def run_metrics_command(child: Child, *words: str) -> str:
    environment = {**os.environ, "VLLMOPS_HOME": str(child.home)}
    done = subprocess.run(
        vllmops(child, "metrics", *words),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_with_the_agent(spawn: Callable[..., Child]) -> None:
    child = spawn(TITLE)

    def has_agent_metrics() -> bool:  # on a busy machine an agent may be late
        text = run_metrics_command(child)
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert "vllmops:agents" in families
        seen = families["vllmops:agents"].samples[0].value == 1
        told = families.keys() & {"vllmops:patch_processes", "vllmops:agent_problems"}
        return seen and bool(told)

    until(has_agent_metrics)
    rows: list[dict[str, Any]] = json.loads(run_metrics_command(child, "--json"))["data"]["metrics"]
    found = {row["name"]: row for row in rows}
    assert found["vllmops:agents"]["labels"]["role"] == "api"
    assert found["vllmops:process_resident_memory_bytes"]["value"] > 1e6


def test_without_the_agent(spawn: Callable[..., Child]) -> None:
    text = run_metrics_command(spawn(TITLE, VLLMOPS_DISABLE="1"))
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["vllmops:processes"] == 1
    assert values["vllmops:agents"] == 0
    assert "vllmops:requests" not in values


def test_over_http(spawn: Callable[..., Child]) -> None:
    child, port = spawn(TITLE), free_port()
    environment = {**os.environ, "VLLMOPS_HOME": str(child.home)}
    serving = subprocess.Popen(
        vllmops(child, "metrics", "--listen", str(port)), env=environment, stderr=subprocess.PIPE
    )
    try:

        def is_agent_count_served() -> bool:
            try:
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            except httpx.TransportError:
                return False
            return "vllmops:agents{" in text

        until(is_agent_count_served)
        taken = subprocess.run(
            vllmops(child, "metrics", "--listen", str(port), "--json"),
            env=environment,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert json.loads(taken.stdout)["errors"][0]["code"] == "metrics.listen"
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 130
    finally:
        serving.kill()
        serving.wait()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9105", ("127.0.0.1", 9105)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:9105", ("::1", 9105)),
        *((text, None) for text in ("", "x", "host:", "0", "70000", "1.2.3.4:x", "-1", "٣")),
        *((f"{host}:80", None) for host in ("a..b", "é..b", "a" * 64)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int] | None) -> None:
    if expected:
        assert parse_host_port(text) == expected
        return
    refused = commands.run_vllmops("metrics", f"--listen={text}", "--json")
    assert refused.error["code"] == "usage"


def test_an_instance_is_looked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(metrics, "resolve_server", asked.append)
    monkeypatch.setattr(metrics, "make_view_function", lambda find: find)
    monkeypatch.setattr(
        BackgroundCollector, "collect", lambda gathering: gathering.gather()
    )  # in no thread
    monkeypatch.setattr(http_listener, "make_server", lambda *_: SimpleNamespace(serve_forever=int))
    for name, target in (("a", None), ("a", "12"), (None, None), (None, "12")):
        metrics.serve_metrics(Server(name, ()), target, "127.0.0.1", 9105)
    assert [*dict.fromkeys(asked)] == ["a", None, "12"]
