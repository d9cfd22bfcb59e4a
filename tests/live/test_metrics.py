"""The server's state in vLLM's own ``/metrics``."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllmops.metrics.grafana_dashboards import BOARDS
from vllmops.metrics.metric_families import PREFIX

from ..support.extent import long
from ..support.ports import free_port
from ..support.prometheus import program
from ..support.waiting import until

if TYPE_CHECKING:
    from .conftest import Live

STATE = {
    *("stalled", "no_progress_seconds", "event_loop_blocked_seconds", "rendering_seconds"),
    *("processes", "agents", "heartbeat_age_seconds", "agent_problems", "patch_processes"),
    *("process_resident_memory_bytes", "process_cpu_seconds_total", "requests"),
    *("encoder_cache_entries", "encoder_cache_bytes", "encoder_cache_slots"),
    *("encoder_cache_free_slots", "encoder_cache_stray_requests"),
    *("mm_cache_entries", "mm_cache_capacity_bytes", "mm_cache_queries_total"),
    *("mm_cache_hits_total", "mm_cache_ghost_keys", "mm_cache_inconsistent_keys"),
}


def scrape_metrics(server: Live) -> dict[str, dict[str, float]]:
    """What vllmops adds: values by name, and by labels; each once."""
    answer = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = " ".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                values = found.setdefault(sample.name.removeprefix(PREFIX), {})
                assert labels not in values, (sample.name, labels)
                values[labels] = sample.value
    return found


def wait_for_state_metrics(server: Live) -> dict[str, dict[str, float]]:
    """The metrics, as soon as the server has looked at itself."""
    return until(lambda: found if (found := scrape_metrics(server)).keys() >= STATE else None, 60)


def send_completion(server: Live) -> None:
    server.complete(max_tokens=4)


def check(server: Live, roles: dict[str, int]) -> None:
    send_completion(server)
    found = wait_for_state_metrics(server)
    counted = {
        labels.rpartition("role=")[2]: number for labels, number in found["processes"].items()
    }
    assert {role: counted[role] for role in roles} == roles
    agents = found["agents"]
    assert agents.items() <= found["processes"].items()
    assert len(agents) >= len(roles)
    assert set(found["stalled"].values()) == {0}
    assert set(found["mm_cache_ghost_keys"].values()) == {0}
    assert all("pid" not in labels for values in found.values() for labels in values)
    # Stock's are still there.
    assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics", timeout=30).text


def test_metrics_cover_a_single_api_server(vision_server: Live) -> None:
    check(vision_server, {"api": 1, "engine": 1, "worker": 1})
    # On a busy machine no two readings of both sides may be in time.
    one_sided = until(lambda: scrape_metrics(vision_server).get("mm_cache_one_sided_keys"))
    assert sum(one_sided.values()) == 0


@pytest.fixture
def prometheus(vision_server: Live, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server each second."""
    program_, port = program("prometheus"), free_port()
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [
                    {
                        "job_name": "vllm",
                        "static_configs": [{"targets": [urlsplit(vision_server.url).netloc]}],
                    }
                ],
            }
        )
    )
    words = ("--config.file=prometheus.yml", "--storage.tsdb.path=data")
    running = subprocess.Popen(
        [program_, *words, f"--web.listen-address=127.0.0.1:{port}"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}"
    running.kill()
    running.wait()


def test_no_panel_of_a_board_is_without_data(vision_server: Live, prometheus: str) -> None:
    queries = [
        expr.replace("$instance", ".*").replace("$__rate_interval", "20s")
        for panels in BOARDS.values()
        for panel in panels
        for expr, _ in panel.queries
    ]

    def value(query: str) -> list[Any]:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=10)
        answer.raise_for_status()
        found: list[Any] = answer.json()["data"]["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    def list_empty_queries() -> list[str]:
        send_completion(vision_server)
        stored = {"model": "demo-vision", "input": "hi", "max_output_tokens": 1}
        httpx.post(f"{vision_server.url}/v1/responses", json=stored, timeout=60)
        try:
            return [query for query in queries if not value(query)]
        except httpx.HTTPError:  # it is not ready yet
            return queries

    until(lambda: not list_empty_queries(), 60, list_empty_queries)


@long
@pytest.mark.serve("--demo", "vision", "--", "--api-server-count", "2", loses="all")
def test_several_api_servers(server: Live) -> None:
    for _ in range(4):  # whichever answers
        check(server, {"api": 2, "engine": 1, "worker": 1})
        time.sleep(0.5)
