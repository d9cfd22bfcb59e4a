"""A vLLM server's own HTTP API: health and metrics.

``/health`` makes no round trip to the engine: a server that hangs still answers 200.
"""

from __future__ import annotations

import httpx

from ..snapshots.metrics import Metrics

TIMEOUT_S = 2.0


# A sample's name, and labels that it must have, to the field that it adds to.
FIELDS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("vllm:num_requests_running", {}, "running"),
    ("vllm:num_requests_waiting", {}, "waiting"),
    ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}, "deferred"),
    ("vllm:engine_sleep_state", {"sleep_state": "awake"}, "awake"),
    ("vllm:kv_cache_usage_perc", {}, "kv_cache_usage"),
    ("vllm:prefix_cache_hits_total", {}, "prefix_hits"),
    ("vllm:prefix_cache_queries_total", {}, "prefix_queries"),
    ("vllm:mm_cache_hits_total", {}, "mm_hits"),
    ("vllm:mm_cache_queries_total", {}, "mm_queries"),
    ("vllm:prompt_tokens_total", {}, "tokens"),
    ("vllm:generation_tokens_total", {}, "tokens"),
    ("vllm:num_preemptions_total", {}, "preemptions"),
    ("vllm:request_success_total", {}, "finished"),
    ("vllm:request_success_total", {"finished_reason": "error"}, "failed"),
    ("http_requests_total", {}, "answers"),
    ("http_requests_total", {"status": "5xx"}, "errors"),
    *(
        (f"vllm:{name}_seconds_{end}", {}, f"{field}_{unit}")
        for name, field in (
            ("request_queue_time", "queue"),
            ("request_prefill_time", "prefill"),
            ("request_decode_time", "decode"),
            ("time_to_first_token", "first"),
            ("inter_token_latency", "between"),
            ("e2e_request_latency", "whole"),
        )
        for end, unit in (("sum", "s"), ("count", "n"))
    ),
)


def healthy(url: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether ``/health`` answers 200; its certificate is not judged here."""
    return status(url, timeout_s=timeout_s) == httpx.codes.OK


def status(url: str, *, timeout_s: float = TIMEOUT_S) -> int | None:
    """The status of ``/health``, None where nothing answers."""
    try:
        return get(f"{url}/health", timeout_s).status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def get(url: str, timeout_s: float) -> httpx.Response:
    # A proxy for the outside is not for a server on this machine, whose certificate is its own.
    return httpx.get(url, timeout=timeout_s, trust_env=False, verify=False)  # noqa: S501


def metrics(url: str, *, timeout_s: float = TIMEOUT_S) -> Metrics | None:
    """The server's metrics, None where it does not give them."""
    try:
        answer = get(f"{url}/metrics", timeout_s).raise_for_status()
        return read(answer.text)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def read(text: str) -> Metrics:
    """What a text in Prometheus' format says.

    Raises:
        ValueError: it is in another.
    """
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    fields: dict[str, list[tuple[dict[str, str], str]]] = {}
    for name, labels, field in FIELDS:
        fields.setdefault(name, []).append((labels, field))
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for labels, field in fields.get(sample.name, ()):
                if labels.items() <= sample.labels.items():
                    values.setdefault(field, []).append(sample.value)
    return Metrics(**{f: max(v) if f == "kv_cache_usage" else sum(v) for f, v in values.items()})
