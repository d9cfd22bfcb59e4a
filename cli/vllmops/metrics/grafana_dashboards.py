"""Two boards for Grafana: how a server does, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

OF: Final = 'instance=~"$instance"'
REFUSED: Final = f'{{{OF}, action="refused"}}'
RATE: Final = "[$__rate_interval]"
WIDTH, HEIGHT, ACROSS = 8, 7, 3


class Panel(NamedTuple):
    """A graph over time.

    Args:
        title: what it shows.
        unit: Grafana's name of it.
        queries: each with the legend of its lines.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def make_process_legend(name: str) -> str:
    """The legend of what is of one process."""
    return f"{name}{{{{role}}}} {{{{dp_rank}}}} {{{{tp_rank}}}} {{{{node}}}}"


def make_cache_query(metric: str) -> str:
    return f"vllmops:mm_cache_{metric}{{{OF}}}"


REQUESTS: Final = Panel(
    "Requests by state",
    "short",
    ((f"sum by (state, cause) (vllmops:requests{{{OF}}})", "{{state}} {{cause}}"),),
)
STALLED: Final = Panel(
    "Stall", "short", ((f"max by (certainty) (vllmops:stalled{{{OF}}})", "{{certainty}}"),)
)
PROGRESS: Final = Panel(
    "Seconds without progress, requests pending",
    "s",
    ((f"vllmops:no_progress_seconds{{{OF}}}", make_process_legend("")),),
)
BOARDS: Final[dict[str, Sequence[Panel]]] = {
    "overview": (
        STALLED,
        REQUESTS,
        Panel(
            "Tokens per second",
            "short",
            (
                (f"sum(rate(vllm:prompt_tokens_total{{{OF}}}{RATE}))", "prompts"),
                (f"sum(rate(vllm:generation_tokens_total{{{OF}}}{RATE}))", "answers"),
            ),
        ),
        Panel(
            "KV cache in use", "percentunit", ((f"vllm:kv_cache_usage_perc{{{OF}}}", "{{engine}}"),)
        ),
        Panel(
            "Multimodal caches: share in use",
            "percentunit",
            (
                (
                    f"{make_cache_query('bytes')} / {make_cache_query('capacity_bytes')}",
                    "{{side}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Multimodal caches: share of queries that hit",
            "percentunit",
            (
                (
                    f"rate({make_cache_query('hits_total')}{RATE}) / "
                    f"clamp_min(rate({make_cache_query('queries_total')}{RATE}), 1e-9)",
                    "{{side}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Memory of processes",
            "bytes",
            ((f"vllmops:process_resident_memory_bytes{{{OF}}}", make_process_legend("")),),
        ),
        Panel(
            "Stored responses",
            "short",
            ((f"sum by (status) (vllmops:store_responses{{{OF}}}) or vector(0)", "{{status}}"),),
        ),
        Panel(
            "Operations of the store, 99 % faster than",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, operation) "
                    f"(rate(vllmops:store_operation_seconds_bucket{{{OF}}}{RATE})))",
                    "{{operation}}",
                ),
            ),
        ),
    ),
    "incident": (
        STALLED,
        PROGRESS,
        REQUESTS,
        Panel(
            "API servers: event loop blocked, oldest request before the engine",
            "s",
            (
                (f"vllmops:event_loop_blocked_seconds{{{OF}}}", "blocked {{node}}"),
                (f"vllmops:rendering_seconds{{{OF}}}", "rendering {{node}}"),
            ),
        ),
        Panel(
            "Age of heartbeats",
            "s",
            ((f"vllmops:heartbeat_age_seconds{{{OF}}}", make_process_legend("")),),
        ),
        Panel(
            "Processes, and those whose agent is silent",
            "short",
            (
                (f"sum by (role) (vllmops:processes{{{OF}}})", "{{role}}"),
                (
                    f"sum by (role) (vllmops:processes{{{OF}}} - vllmops:agents{{{OF}}})",
                    "silent {{role}}",
                ),
            ),
        ),
        Panel(
            "Faults of multimodal caches",
            "short",
            (
                (make_cache_query("ghost_keys"), "ghost keys {{side}}"),
                (make_cache_query("inconsistent_keys"), "inconsistent {{side}}"),
                (
                    f"sum by (side) ({make_cache_query('one_sided_keys')}) or vector(0)",
                    "one-sided {{side}}",
                ),
            ),
        ),
        Panel(
            "Encoder caches",
            "short",
            (
                (f"vllmops:encoder_cache_entries{{{OF}}}", "entries {{side}}"),
                (f"vllmops:encoder_cache_free_slots{{{OF}}}", "free slots"),
                (f"vllmops:encoder_cache_stray_requests{{{OF}}}", "stray requests"),
            ),
        ),
        Panel(
            "CPU of processes",
            "short",
            ((f"rate(vllmops:process_cpu_seconds_total{{{OF}}}{RATE})", make_process_legend("")),),
        ),
        Panel(
            "Failures of the store, refused carriers, repairs",
            "short",
            (
                (f"sum(rate(vllmops:store_failures_total{{{OF}}}{RATE})) or vector(0)", "store"),
                (
                    f"sum(rate(vllmops:carriers_total{REFUSED}{RATE})) or vector(0)",
                    "carriers",
                ),
                (f"sum(increase(vllmops:repairs_total{{{OF}}}{RATE})) or vector(0)", "repairs"),
            ),
        ),
        Panel(
            "Patches by state",
            "short",
            ((f"sum by (state) (vllmops:patch_processes{{{OF}}})", "{{state}}"),),
        ),
        Panel(
            "CPU of the agents' threads",
            "percentunit",
            ((f"rate(vllmops:agent_cpu_seconds_total{{{OF}}}{RATE})", make_process_legend("")),),
        ),
    ),
}


def build_dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana imports it.

    Args:
        name: one of `BOARDS`.
    """
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": f"vllmops-{name}",
        "title": f"vllmops: {name}",
        "tags": ["vllmops", "vllm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(vllmops:processes, instance)",
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                },
            ]
        },
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {
                    "x": number % ACROSS * WIDTH,
                    "y": number // ACROSS * HEIGHT,
                    "w": WIDTH,
                    "h": HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + place_),
                        "datasource": source,
                        "expr": expr,
                        "legendFormat": legend,
                    }
                    for place_, (expr, legend) in enumerate(panel.queries)
                ],
            }
            for number, panel in enumerate(BOARDS[name])
        ],
    }
