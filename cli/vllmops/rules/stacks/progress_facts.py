"""Facts that stacks do not show: pending requests, and whether tokens are produced."""

from __future__ import annotations

import re

from ...model.vllm_metrics import Metrics
from ...support.lazy_patterns import DECIMAL, compile_lazily

PACES = ("progress", "steps")  # frozen or moving
FACTS = ("running", "waiting", "deferred", "kv_usage", "still", *PACES)
# A long prompt's tokens are counted when all of them are processed.
FROZEN_S = 30.0
# For a text without blanks, because the lines of a log may be wrapped anywhere.
# It begins with what is searched fast.
STATS = compile_lazily(
    rf"Avgpromptthroughput:(?P<prompt>{DECIMAL})tokens/s,"
    rf"Avggenerationthroughput:(?P<generation>{DECIMAL})tokens/s,"
    r"Running:(?P<running>\d+)reqs,Waiting:(?P<waiting>\d+)reqs"
    rf"(?:,Deferred:(?P<deferred>\d+)reqs)?.{{0,80}}?KVcacheusage:(?P<kv>{DECIMAL})%"
)
ENGINE = compile_lazily(r"Engine(?P<id>\d+):$")
LONGEST_ID = 16  # characters


def parse_log_facts(log: str) -> dict[str, str]:
    """Facts from the last figures in vLLM's log, which is given without blanks."""
    lines = list(STATS.finditer(log))
    if not lines:
        return {}
    last = lines[-1]
    facts = {"running": last["running"], "waiting": last["waiting"], "kv_usage": last["kv"]}
    facts["deferred"] = last["deferred"] or "0"
    if not _has_no_throughput(last):
        facts["progress"] = "moving"
    else:
        # A request may have arrived just before one line; by the next it has made progress.
        latest = [line for line in lines if _find_engine_id(line) == _find_engine_id(last)][-2:]
        if len(latest) == 2 and all(
            _has_no_throughput(line) and _has_pending_requests(line) for line in latest
        ):
            facts["progress"] = "frozen"
    return facts


# As /metrics shows them, or as somebody types them. Each begins with what is searched fast.
VALUE = rf"(?P<value>{DECIMAL}(?:e\+?\d+)?)\b(?![/%])"
SERIES = rf"(?P<labels>\{{[^}}\n]*\}})?[ \t:=]+{VALUE}"
FIGURES = {
    "num_requests_running": ("running", compile_lazily(f"num_requests_running{SERIES}")),
    "num_requests_waiting": ("waiting", compile_lazily(f"num_requests_waiting{SERIES}")),
    "generation_tokens_total": ("tokens", compile_lazily(f"generation_tokens_total{SERIES}")),
    "running=": ("running", compile_lazily(rf"running=(?P<labels>){VALUE}")),
    "waiting=": ("waiting", compile_lazily(rf"waiting=(?P<labels>){VALUE}")),
}


def parse_metrics_facts(text: str) -> dict[str, str]:
    """Facts from the metrics in a text; of one that occurs again, whether it stands still.

    Args:
        text: with its blanks.
    """
    series: dict[tuple[str, str], list[float]] = {}
    for words, (name, known) in FIGURES.items():
        for row in known.finditer(text) if words in text else ():
            series.setdefault((name, row["labels"] or ""), []).append(float(row["value"]))
    facts = {}
    for name in ("running", "waiting"):
        if last := [values[-1] for (row, _), values in series.items() if row == name]:
            facts[name] = f"{sum(last):g}"
    tokens = [values for (row, _), values in series.items() if row == "tokens"]
    if any(len(set(values)) > 1 for values in tokens):
        facts["progress"] = "moving"
    elif any(len(values) > 1 for values in tokens) and any(map(float, facts.values())):
        facts["progress"] = "frozen"
    return facts


def _find_engine_id(line: re.Match[str]) -> str:
    """The engine whose figures they are; empty if the line has none."""
    match = ENGINE.search(line.string, max(line.start() - LONGEST_ID, 0), line.start())
    return match["id"] if match else ""


def _has_no_throughput(line: re.Match[str]) -> bool:
    return float(line["prompt"]) == 0 and float(line["generation"]) == 0


def _has_pending_requests(line: re.Match[str]) -> bool:
    return any(int(line[name] or 0) for name in ("running", "waiting", "deferred"))


def make_metrics_facts(
    first_metrics: Metrics | None, last_metrics: Metrics | None, seconds: float
) -> dict[str, str]:
    """Facts from metrics; a number of requests only if it is the same before and after."""
    if first_metrics is None or last_metrics is None:
        return {}
    facts = {}
    for name, was, now in (
        ("running", first_metrics.running, last_metrics.running),
        ("waiting", first_metrics.waiting, last_metrics.waiting),
        ("deferred", first_metrics.deferred, last_metrics.deferred),
    ):
        if now is not None and was == now:
            facts[name] = f"{now:g}"
    if last_metrics.kv_cache_usage is not None:
        facts["kv_usage"] = f"{100 * last_metrics.kv_cache_usage:g}"
    if first_metrics.tokens is not None and last_metrics.tokens is not None:
        if last_metrics.tokens != first_metrics.tokens:
            facts["progress"] = "moving"
        elif seconds >= FROZEN_S and (last_metrics.running or last_metrics.waiting):
            facts["progress"] = "frozen"
    return facts


def matches_condition(value: str, condition: str) -> bool:
    """Whether a fact meets a condition: ``>0``, ``=0``, ``<1``, or a word."""
    if condition[0] not in "><=":
        return value == condition
    try:
        number, limit = float(value), float(condition[1:])
    except ValueError:
        return False
    return {">": number > limit, "<": number < limit, "=": number == limit}[condition[0]]
