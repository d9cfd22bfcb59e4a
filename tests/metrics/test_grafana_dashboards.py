"""The boards: their queries name what there is, and their panels lie beside each other."""

from __future__ import annotations

import re

import promql_parser
import pytest

from vllmops.commands.metrics import Dashboard
from vllmops.metrics.grafana_dashboards import BOARDS, build_dashboard
from vllmops.metrics.metric_families import FAMILIES, PREFIX
from vllmops_responses.server.metrics import COUNTERS


def test_the_command_offers_them() -> None:
    assert [*BOARDS] == [*Dashboard]


@pytest.mark.parametrize("name", BOARDS)
def test_queries_name_metrics_that_there_are(name: str) -> None:
    known = {PREFIX + metric for metric in FAMILIES}
    known |= {counter._name + end for counter in COUNTERS for end in ("_total", "_bucket")}
    for panel in BOARDS[name]:
        for expr, _ in panel.queries:
            # Grafana replaces its variables before Prometheus sees the query.
            promql_parser.parse(expr.replace("$__rate_interval", "1m"))
            assert set(re.findall(r"vllmops:\w+", expr)) <= known
            selectors = re.findall(r"vllm(?:ops)?:\w+(\{[^}]*\})?", expr)
            assert all('instance=~"$instance"' in selector for selector in selectors)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    places = [
        (grid["x"] + x, grid["y"] + y)
        for panel in build_dashboard(name)["panels"]
        for grid in [panel["gridPos"]]
        for x in range(grid["w"])
        for y in range(grid["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    titles = [panel["title"] for panel in build_dashboard(name)["panels"]]
    assert len(titles) == len(set(titles))
