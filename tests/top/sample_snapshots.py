"""Looks to change: at a server at work, at one that stalls, and at one that can't be reached."""

from __future__ import annotations

from typing import Any

import msgspec

from vllmops.model.caches import LruCache, ProcessCaches
from vllmops.model.findings import Severity
from vllmops.model.server_snapshot import Gap, ServerSample
from vllmops.model.vllm_metrics import Metrics
from vllmops.observe.requests.listing import InFlightRequest
from vllmops.rules.progress import find_stalls
from vllmops.rules.requests import RULES
from vllmops.servers.discovery import Server
from vllmops.top.server_followers import (
    FollowedServers,
    ServerDetails,
    ServerFollower,
    TargetSample,
)

from ..rules.sample_servers import make_healthy_sample, process, pulse

ESCAPES = "\x1b[2J[red]evil[/red]\u202e\n"
ROWS = (
    InFlightRequest(
        id="cmpl-a",
        http_id="chatcmpl-1f0c",
        state="running",
        age_s=12.0,
        prompt_tokens=1024,
        output_tokens=77,
        kv_blocks=9,
    ),
    InFlightRequest(
        id="cmpl-b", http_id="chatcmpl-77aa", state="waiting", age_s=3.0, prompt_tokens=31
    ),
)
CACHE = LruCache(
    kind="mm-lru",
    side="P0",
    name="MultiModalCache",
    digest="",
    pinned_keys=[],
    pinned_only=[],
    entries=3,
    bytes=1 << 30,
    sum_bytes=1 << 30,
    capacity_bytes=4 << 30,
    hits=1,
    queries=4,
)
CACHES = (ProcessCaches(pid=10, parent=1, role="api", caches=[CACHE]),)


def make_busy_server_sample(
    at_s: float,
    still_s: float = 0.0,
    *,
    running: int = 1,
    kv: float = 0.45,
    tokens: float | None = None,
    **fields: Any,
) -> ServerSample:
    """Three processes at work on some requests; the engine may make no progress."""
    pulses = (
        pulse("api", engine_requests=running + 1, loop_s=0.0),
        pulse("engine", running=running, waiting=1, still_s=still_s, current_step=4711),
        pulse("worker"),
    )
    processes = tuple(
        process(role, cpu_s=at_s / 2, rss_bytes=1 << 30) for role in ("api", "engine", "worker")
    )
    metrics = Metrics(
        running=running,
        waiting=1,
        kv_cache_usage=kv,
        tokens=100.0 * at_s if tokens is None else tokens,
        prefix_hits=80,
        prefix_queries=100,
    )
    whole = {"heartbeats": pulses, "processes": processes, "metrics": metrics, "health": 200}
    return make_healthy_sample(at_s, **{**whole, **fields})


def make_target_sample(at_s: float, target: str = "demo", **fields: Any) -> TargetSample:
    """A look at it."""
    whole: dict[str, Any] = {
        "state": "ready",
        "url": "http://127.0.0.1:8000",
        "model": "Qwen/Qwen3-0.6B",
        "server_sample": make_busy_server_sample(at_s),
        "details": ServerDetails(requests=ROWS, caches=CACHES),
    }
    return TargetSample(target=target, at_s=at_s, **{**whole, **fields})


def make_working_samples(target: str = "demo", *, until_s: int = 30) -> list[TargetSample]:
    """Looks at a server at work, one for each second."""
    return [make_target_sample(float(at_s), target) for at_s in range(until_s + 1)]


def make_stalled_samples(target: str = "demo") -> list[TargetSample]:
    """Looks at a server whose engine makes no progress."""
    observed = [make_busy_server_sample(28.0 + at_s, still_s=20.0 + at_s) for at_s in range(3)]
    lone = RULES[0].make_finding("cmpl-a", "the engine does not know it")
    return [
        make_target_sample(
            item.at_s,
            target,
            server_sample=item,
            stalls=tuple(find_stalls([item])),
            details=ServerDetails(requests=ROWS, findings=(lone,), caches=CACHES),
        )
        for item in observed
    ]


def unreachable(target: str = "https://gpu7.example") -> TargetSample:
    """A look at a server that does not answer."""
    why = Gap(target, "admin.unreachable", "gpu7.example does not answer", "look at its log")
    return TargetSample(target=target, at_s=30.0, problem=why)


def hostile(target: str = "demo") -> TargetSample:
    """A look at a server whose every text tries to move the cursor or to look like markup."""
    rows = tuple(
        msgspec.structs.replace(row, http_id=ESCAPES, id=ESCAPES, state=ESCAPES) for row in ROWS
    )
    why = Gap(ESCAPES, "agent.absent", ESCAPES, ESCAPES)
    found = msgspec.structs.replace(
        RULES[0].make_finding(ESCAPES, ESCAPES),
        severity=Severity.ERROR,
        title=ESCAPES,
        next_step=ESCAPES,
    )
    asked = ServerDetails(requests=rows, findings=(found,), gaps=(why,), note=ESCAPES)
    node = tuple(process(role, node=ESCAPES) for role in ("api", "engine"))
    return make_target_sample(
        1.0,
        target,
        state=ESCAPES,
        model=ESCAPES,
        details=asked,
        server_sample=make_busy_server_sample(1.0, processes=node),
    )


class Fake(ServerFollower):
    """A follower of a server that there is not."""

    def take_sample(self) -> None:
        pass

    def fetch_details(self) -> None:
        pass


def board(**looks: list[TargetSample]) -> FollowedServers:
    """A board that shows such looks, by target."""

    def make(target: str, server: Server | None) -> ServerFollower:
        made = Fake(target, server)
        made.samples = tuple(looks[target])
        return made

    return FollowedServers(tuple(looks), make)
