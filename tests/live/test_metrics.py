"""The server's state in vLLM's own ``/metrics``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllmops.metrics.families import PREFIX

from ..support.extent import long
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


def scraped(server: Live) -> dict[str, dict[str, float]]:
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


def settled(server: Live) -> dict[str, dict[str, float]]:
    """The metrics, as soon as the server has looked at itself."""
    return until(lambda: found if (found := scraped(server)).keys() >= STATE else None, 60)


def ask(server: Live) -> None:
    server.complete(max_tokens=4)


def check(server: Live, roles: dict[str, int]) -> None:
    ask(server)
    found = settled(server)
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


def test_one_api_server(vision_server: Live) -> None:
    check(vision_server, {"api": 1, "engine": 1, "worker": 1})
    found = scraped(vision_server)
    assert sum(found["mm_cache_one_sided_keys"].values()) == 0


@long
@pytest.mark.serve("--demo", "vision", "--", "--api-server-count", "2", loses="all")
def test_several_api_servers(server: Live) -> None:
    for _ in range(4):  # whichever answers
        check(server, {"api": 2, "engine": 1, "worker": 1})
        time.sleep(0.5)
