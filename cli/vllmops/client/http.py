"""A vLLM server's own HTTP API: health and metrics.

``/health`` makes no round trip to the engine: a server that hangs still answers 200.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx

TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Metrics:
    """What vLLM counts, summed over its engines; None where this vLLM does not count it.

    Args:
        running: requests being decoded.
        waiting: requests queued.
        kv_cache_usage: share of the KV cache in use, 0 to 1.
        prefix_hits, prefix_queries: tokens.
        mm_hits, mm_queries: multimodal items.
        tokens: of prompts and answers, from the server's start.
    """

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    mm_hits: float | None = None
    mm_queries: float | None = None
    tokens: float | None = None


NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:mm_cache_hits_total": "mm_hits",
    "vllm:mm_cache_queries_total": "mm_queries",
    "vllm:prompt_tokens_total": "tokens",
    "vllm:generation_tokens_total": "tokens",
}


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
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    try:
        answer = get(f"{url}/metrics", timeout_s).raise_for_status()
        families = list(text_string_to_metric_families(answer.text))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    values: dict[str, list[float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        if field := NAMES.get(sample.name):
            values.setdefault(field, []).append(sample.value)
    return Metrics(**{f: max(v) if f == "kv_cache_usage" else sum(v) for f, v in values.items()})
