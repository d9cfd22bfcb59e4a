"""``vllmops cache compare`` without a vLLM: what it refuses, and what it prints."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from vllmops.commands.cache.compare import build_comparison_data, render_comparison
from vllmops.model.cache_comparison import CacheComparison, ComparisonSample
from vllmops.model.caches import Cache, EncoderCache, ProcessCaches, ProcessGap, WorkerEncoderCache
from vllmops.model.roles import Role

from ..rules.test_cache_comparison import lru

Spawn = Callable[..., Any]


def compare(*options: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "vllmops", "cache", "compare", "--json", *map(str, options)],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)["errors"][0]


def test_a_server_without_an_engine_process(spawn: Spawn) -> None:
    child = spawn("VLLM::APIServer_0", Role.API)
    code, error = compare("-t", child.process.pid)
    assert (code, error["code"]) == (5, "compare.no-engine")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in error["message"]


@pytest.mark.parametrize("option", ["--apart", "--timeout"])
def test_no_time_at_all(option: str) -> None:
    assert compare(option, 0)[1]["code"] == "usage"


def comparison() -> CacheComparison:
    front = ProcessCaches(pid=10001, parent=1, role="api", caches=[lru("P0", ["a", "b"])])
    manager = EncoderCache(
        name="m", slots=1, free_slots=1, freeable_slots=1, requests_by_key={"a": []}, freeable={}
    )
    caches: list[Cache] = [lru("P1", ["a"]), manager]
    engine = ProcessCaches(
        pid=10002, parent=10001, role="engine", caches=caches, unfinished_requests=4, step=77
    )
    outputs = WorkerEncoderCache(name="r", rank=0, keys=["a"], bytes=1)
    worker = ProcessCaches(pid=10003, parent=10002, role="worker", caches=[outputs])
    look = ComparisonSample(front=front, engines=[engine, worker], engine_requests=4, rendering=1)
    return CacheComparison(samples=[look, look], front_after=front, end=front, settled=True)


def render_to_text(data: dict[str, Any], width: int = 60) -> str:
    console = Console(width=width, file=StringIO())
    console.print(*render_comparison(data), sep="\n")
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_comparison_output_shows_pairs_gaps_and_findings() -> None:
    silent = ProcessGap(
        role="api", pid=10004, code="agent.stale", reason="nobody listens", hint="x"
    )
    data = build_comparison_data("demo", [comparison()], [silent])
    output = render_to_text(data)
    assert "P0: api 10001   P1: engine 10002" in output
    assert "scheduler: engine 10002   worker 10003" in output
    assert "api 10004 did not answer: nobody listens" in output
    assert "[mm-cache.front-only]" in output
    assert "No drift" not in output
    assert (data["step"], data["in_flight"]["engine"]) == (77, 4)
    assert max(map(len, output.splitlines())) <= 60


def test_findings_shared_by_api_servers_are_reported_once() -> None:
    one, two = (
        build_comparison_data("demo", [comparison()], []),
        build_comparison_data("demo", [comparison()] * 2, []),
    )
    assert one["findings"] == two["findings"]
    assert len(one["pairs"]) == len(two["pairs"]) == 2
    assert one["in_flight"]["engine"] == two["in_flight"]["engine"] == 4
