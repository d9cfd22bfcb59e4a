"""The alert rules, judged by promtool: on which series each fires, and on which it does not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from vllmops.docs import load_pages
from vllmops.metrics import metric_families
from vllmops.metrics.alerts import AlertFormat, render_alert_rules
from vllmops.metrics.metric_families import FAMILIES, PREFIX
from vllmops_responses.server.metrics import COUNTERS

from ..support.extent import long, programs
from ..support.prometheus import program

pytestmark = programs

RULES: list[dict[str, Any]] = yaml.safe_load(render_alert_rules(AlertFormat.PROMETHEUS))["groups"][
    0
]["rules"]
NAMES = [rule["alert"] for rule in RULES]
WHERE = 'job="vllm", instance="one:8000"'
WORKER = f'{WHERE}, role="worker", node="n"'
ENGINE = f'{WHERE}, role="engine", node="n"'
API = f'{WHERE}, role="api", node="n"'
HOUR = 60
DAY = 24 * HOUR
GIB = 1 << 30

Series = dict[str, str]
CACHE = f'vllmops:mm_cache_%s{{{ENGINE}, kind="mm-lru", side="P1"}}'
MEMORY = f"vllmops:process_resident_memory_bytes{{{WORKER}}}"
KEY = f'vllmops:key_not_after_timestamp_seconds{{{WHERE}, kid="k1", status="%s"}}'
STALLED = f'vllmops:stalled{{{WHERE}, certainty="%s"}}'
RESPONSES = f'vllmops:store_responses{{{WHERE}, backend="sqlite", status="%s"}}'
CAPACITY = f'vllmops:store_capacity_responses{{{WHERE}, backend="sqlite"}}'
FAILURES = f'vllmops:store_failures_total{{{WHERE}, backend="redis", operation="get", reason="e"}}'
OPERATIONS = f'vllmops:store_operation_seconds_count{{{WHERE}, backend="redis", operation="get"}}'
BAD = f'vllmops:known_bad_versions{{{WHERE}, package="nccl", version="2.28.9"}}'
GPU = f'vllmops:gpu_%s{{{WHERE}, node="n", gpu="0"}}'


def watts(drawn: int) -> Series:
    return {GPU % "power_watts": f"{drawn}x9", GPU % "power_limit_watts": "700x9"}


ALIVE = {
    f"vllmops:processes{{{API}}}": "1x600",
    f"vllmops:processes{{{ENGINE}}}": "2x600",
    f"vllmops:agents{{{API}}}": "1x600",
    f"vllmops:agents{{{ENGINE}}}": "2x600",
}
# By the alert: series, one value each minute, on which it fires in the end, and those on which not.
FIRES: dict[str, list[Series]] = {
    "VllmopsStall": [{STALLED % "sure": "0x10 1x10"}],
    "VllmopsStallLikely": [{STALLED % "likely": "0x10 1x10"}],
    "VllmopsEngineGone": [
        {f"vllmops:processes{{{API}}}": "1x13", f"vllmops:processes{{{ENGINE}}}": "1x10 stale"},
        {f"vllmops:processes{{{API}}}": "1x13", f"vllmops:processes{{{ENGINE}}}": "4x10 3x3"},
    ],
    "VllmopsCacheDrift": [
        {CACHE % "ghost_keys": "0x10 2x30"},
        {CACHE % "inconsistent_keys": "1x30"},
        # Nobody knows while requests are in flight.
        {CACHE % "one_sided_keys": "3 _x2 3 _x3 3 _x2 3 _x3 3 _x2 3 _x3 3 _x2 3"},
    ],
    "VllmopsMemoryGrowing": [{MEMORY: f"{4 * GIB}+{GIB // HOUR}x{8 * HOUR}"}],
    "VllmopsStoreNearlyFull": [
        {RESPONSES % "completed": "50x60", RESPONSES % "failed": "45x60", CAPACITY: "100x60"}
    ],
    "VllmopsStoreRefuses": [{FAILURES: "0+60x20", OPERATIONS: "0+600x20"}],
    "VllmopsKeyEnds": [{KEY % "primary": f"{6 * 86400}x20"}],
    "VllmopsAgentSilent": [ALIVE | {f"vllmops:agents{{{ENGINE}}}": "2x590 1x10"}],
    "VllmopsBusyButIdleWatts": [
        {GPU % "busy_ratio": "1x9", GPU % "memory_busy_ratio": "0x9", **watts(210)},
    ],
    "VllmopsKnownBadVersion": [{BAD: "1x20"}],
}
QUIET: dict[str, list[Series]] = {
    "VllmopsStall": [{STALLED % "sure": "0x20", STALLED % "likely": "1x20"}],
    "VllmopsStallLikely": [{STALLED % "likely": "0x10 0 0 1 0 0 1"}],
    "VllmopsEngineGone": [
        ALIVE,
        {f"vllmops:processes{{{API}}}": "1x10", f"vllmops:processes{{{ENGINE}}}": "_x4 2x6"},
        # The whole server was stopped.
        {
            f"vllmops:processes{{{API}}}": "1x10 stale",
            f"vllmops:processes{{{ENGINE}}}": "1x10 stale",
        },
    ],
    "VllmopsCacheDrift": [
        {CACHE % "ghost_keys": "0x60", CACHE % "one_sided_keys": "0 4 0 3 0x20 7 0x3"},
    ],
    "VllmopsMemoryGrowing": [
        {MEMORY: f"{4 * GIB}x{8 * HOUR}"},
        {MEMORY: f"{GIB}+{GIB // 30}x{HOUR} {31 * GIB // 10}x{7 * HOUR}"},  # it warms up
        {MEMORY: f"{GIB}+{GIB // HOUR}x{3 * HOUR}"},  # it is young
        {MEMORY: f"{4 * GIB}+{GIB // DAY // 4}x{8 * HOUR}"},  # slowly
    ],
    "VllmopsStoreNearlyFull": [{RESPONSES % "completed": "89x60", CAPACITY: "100x60"}],
    "VllmopsStoreRefuses": [{FAILURES: "0+1x20", OPERATIONS: "0+600x20"}],
    "VllmopsKeyEnds": [
        {KEY % "primary": f"{30 * 86400}x20", KEY % "verify-only": f"{86400}x20"},
    ],
    "VllmopsAgentSilent": [
        ALIVE,
        # It runs without the agent.
        {f"vllmops:processes{{{API}}}": "1x20", f"vllmops:agents{{{API}}}": "0x20"},
    ],
    "VllmopsBusyButIdleWatts": [
        # It decodes, it computes, nothing runs, it does not tell its power.
        {GPU % "busy_ratio": "1x9", GPU % "memory_busy_ratio": "0.4x9", **watts(210)},
        {GPU % "busy_ratio": "1x9", GPU % "memory_busy_ratio": "0x9", **watts(600)},
        {GPU % "busy_ratio": "0x9", GPU % "memory_busy_ratio": "0x9", **watts(70)},
        {GPU % "busy_ratio": "1x9", GPU % "memory_busy_ratio": "0x9"},
    ],
    "VllmopsKnownBadVersion": [{BAD: "_x20"}],
}


def trial(alert: str, given: Series) -> dict[str, Any]:
    """A test of promtool's that fails where the alert fires at the end of the series."""
    end = max(length(values) for values in given.values()) - 1
    return {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in given.items()],
        # Nothing is expected, so that what fires is told.
        "alert_rule_test": [{"eval_time": f"{end}m", "alertname": alert}],
    }


def run_alert_trials(tmp_path: Path, *trials: dict[str, Any]) -> str:
    """What promtool says of alerts that fire in these; empty where none does."""
    (tmp_path / "rules.yml").write_text(render_alert_rules(AlertFormat.PROMETHEUS))
    case = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": trials}
    (tmp_path / "case.yml").write_text(json.dumps(case))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "case.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    words = done.stdout + done.stderr
    if done.returncode == 0:
        return ""
    assert "got:[" in words.replace(" ", "").replace("\n", ""), words
    return words


def length(values: str) -> int:
    """How many samples a series of promtool's notation has: ``_x3`` are 3, and ``1x3`` are 4."""
    repeated = [(word.startswith("_"), re.search(r"x(\d+)$", word)) for word in values.split()]
    return sum(int(found[1]) + (not gap) if found else 1 for gap, found in repeated)


def list_series_params(cases: dict[str, list[Series]]) -> list[Any]:
    """Each alert's first series, and all others in the long form: each takes a promtool."""
    return [
        pytest.param(alert, given, marks=long if number else ())
        for alert, several in cases.items()
        for number, given in enumerate(several)
    ]


@pytest.mark.parametrize(("alert", "given"), list_series_params(FIRES))
def test_it_fires(tmp_path: Path, alert: str, given: Series) -> None:
    assert run_alert_trials(tmp_path, trial(alert, given))


def test_no_alert_fires_for_harmless_series(tmp_path: Path) -> None:
    trials = [trial(alert, given) for alert, several in QUIET.items() for given in several]
    assert not run_alert_trials(tmp_path, *trials)


def test_each_alert_has_test_series_and_a_manual_page() -> None:
    assert list(FIRES) == list(QUIET) == NAMES
    assert [page.name for page in load_pages().values() if page.kind == "alert"] == NAMES
    for rule in RULES:
        assert rule["annotations"]["page"] == f"vllmops help {rule['alert']}"


def test_the_rules_name_metrics_that_there_are() -> None:
    known = {PREFIX + name for name in FAMILIES}
    for counter in COUNTERS:
        known |= {f"{name}{end}" for name in [counter._name] for end in ("_total", "_count")}
    for rule in RULES:
        names = set(re.findall(r"vllmops:\w+", rule["expr"]))
        assert names
        assert names <= known
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        of_rule = {
            label
            for name in names
            if (f := FAMILIES.get(name.removeprefix(PREFIX)))
            for label in f.labels
        }
        assert labels <= of_rule | {"instance", "job", "backend"}
    assert metric_families.PREFIX == "vllmops:"


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_types_of_each_expression_agree(rule: dict[str, Any]) -> None:
    """Also where there is no promtool."""
    promql_parser.parse(rule["expr"])


def test_prometheus_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(render_alert_rules(AlertFormat.PROMETHEUS))
    done = subprocess.run(
        [program("promtool"), "check", "rules", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_object_of_kubernetes_has_the_same_rules() -> None:
    made = yaml.safe_load(render_alert_rules(AlertFormat.KUBERNETES))
    assert (made["kind"], made["apiVersion"]) == ("PrometheusRule", "monitoring.coreos.com/v1")
    assert made["spec"]["groups"][0]["rules"] == RULES
