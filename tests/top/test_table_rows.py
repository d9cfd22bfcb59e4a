from __future__ import annotations

from typing import Any

import pytest

from vllmops.model.findings import Severity
from vllmops.model.server_snapshot import Gap
from vllmops.support.output import make_console
from vllmops.support.streams import UNSAFE
from vllmops.top import plain_screen, table_rows

from ..rules.sample_servers import process, pulse
from .sample_snapshots import (
    hostile,
    make_busy_server_sample,
    make_stalled_samples,
    make_target_sample,
    make_working_samples,
    unreachable,
)


def test_a_server_at_work_has_its_processes_and_figures() -> None:
    row = table_rows.make_server_row("demo", make_working_samples(), 30.5)
    assert (row.state, row.severity, row.age_s) == ("ready", None, 0.5)
    (node,) = row.nodes
    assert [item.role for item in node.processes] == ["api", "engine", "worker"]
    engine = node.processes[1]
    assert (engine.state, engine.step, engine.running, engine.waiting) == ("at work", 4711, 1, 1)
    assert engine.cpu == pytest.approx(0.5)
    assert row.figures == table_rows.ServerFigures(100.0, 1, 1, 0.45, 0.8, None)
    (cache,) = row.caches
    assert (cache.name, cache.entries, cache.usage) == ("mm-lru P0", 3, 1 << 30)
    assert (len(row.requests), row.findings, row.gaps) == (2, (), ())


def test_figures_are_unknown_before_metrics_are_read_twice() -> None:
    blind = [
        make_target_sample(float(at_s), server_sample=make_busy_server_sample(at_s, metrics=None))
        for at_s in range(3)
    ]
    figures = table_rows.make_server_row("demo", blind, 3.0).figures
    assert figures == table_rows.ServerFigures(running=1, waiting=1)
    (once,) = make_working_samples(until_s=0)
    assert table_rows.make_server_row("demo", [once], 0.0).figures.tokens_per_s is None


def test_counters_that_start_anew_give_no_rate() -> None:
    looks = [
        make_target_sample(0.0, server_sample=make_busy_server_sample(50.0)),
        make_target_sample(1.0, server_sample=make_busy_server_sample(0.0)),
        make_target_sample(2.0, server_sample=make_busy_server_sample(1.0)),
    ]
    assert table_rows.compute_figures(looks[:2]).tokens_per_s is None
    assert table_rows.compute_figures(looks).tokens_per_s == 100.0


def test_rates_are_per_second_however_far_readings_are_apart() -> None:
    looks = [
        make_target_sample(
            at_s,
            server_sample=make_busy_server_sample(at_s)
            if at_s % 5 == 0
            else make_busy_server_sample(at_s, metrics=None),
        )
        for at_s in map(float, range(11))
    ]
    assert table_rows.compute_figures(looks).tokens_per_s == 100.0
    found = table_rows.make_sparkline_series(looks)
    assert found["tokens_per_s"] == [100.0, 100.0]
    assert found["kv"] == [0.45] * 3
    assert found["running"] == [1.0] * 11


def test_a_stall_is_a_finding_and_the_state() -> None:
    row = table_rows.make_server_row("demo", make_stalled_samples(), 30.0)
    assert (row.state, row.severity) == ("stalled for 22 s", Severity.ERROR)
    assert row.findings[0].code == "engine.no-progress"
    assert len(row.findings) == 2
    ranks = [found.severity.rank for found in row.findings]
    assert ranks == sorted(ranks, reverse=True)


def test_a_stall_that_only_stacks_can_prove_is_a_warning() -> None:
    from vllmops.rules.progress import Stall

    doubt = Stall("api.no-progress", "api 10", 12.0, "an HTTP request arrived", alternative="work")
    row = table_rows.make_server_row("demo", [make_target_sample(1.0, stalls=(doubt,))], 1.0)
    assert (row.state, row.severity) == ("perhaps stalled for 12 s", Severity.WARNING)
    assert row.findings[0].severity is Severity.WARNING
    assert "stacks" in row.findings[0].evidence


@pytest.mark.parametrize(
    ("state", "fields", "text", "severity"),
    [
        ("S", None, "no agent", Severity.INFO),
        ("", {}, "has ended", Severity.ERROR),
        ("Z", {}, "has ended", Severity.ERROR),
        ("T", {}, "stopped by a signal", Severity.ERROR),
        ("S", {"age_s": 9.0}, "no heartbeat for 9 s", Severity.WARNING),
        ("S", {"loop_s": 8.0}, "event loop blocked for 8 s", Severity.ERROR),
        ("S", {"still_s": 4.0, "running": 1}, "no token for 4 s", Severity.WARNING),
        ("S", {"still_s": 1.0, "running": 1}, "at work", None),
        ("S", {"unready": "draining"}, "draining", Severity.WARNING),
        ("S", {}, "idle", None),
    ],
)
def test_process_state_has_a_text_and_a_severity(
    state: str, fields: dict[str, Any] | None, text: str, severity: Severity | None
) -> None:
    shown = None if fields is None else pulse("engine", **fields)
    assert table_rows.describe_process_state(process("engine", state), shown) == (text, severity)


def test_a_server_that_drains_says_so() -> None:
    drains = make_busy_server_sample(
        1.0, health=503, heartbeats=(pulse("api", engine_requests=1, unready="draining"),)
    )
    row = table_rows.make_server_row("demo", [make_target_sample(1.0, server_sample=drains)], 1.0)
    assert (row.state, row.severity, row.findings) == (
        "ready, draining",
        Severity.WARNING,
        (),
    )


def test_nodes_and_ranks_make_a_tree() -> None:
    placed = tuple(
        process("worker", pid=number, node=f"n{number // 2}", ranks=f"TP{number}")
        for number in range(4)
    )
    row = table_rows.make_server_row(
        "demo",
        [
            make_target_sample(
                1.0, server_sample=make_busy_server_sample(1.0, processes=placed, heartbeats=())
            )
        ],
        1.0,
    )
    found = {node.name: [item.ranks for item in node.processes] for node in row.nodes}
    assert found == {"n0": ["TP0", "TP1"], "n1": ["TP2", "TP3"]}


def test_a_server_that_starts_fails_or_is_not_reached() -> None:
    starting = make_target_sample(1.0, state="starting", stage="loading weights", reason="starting")
    row = table_rows.make_server_row("demo", [starting], 1.0)
    assert (plain_screen.format_state(row), row.severity, row.gaps) == (
        "starting: loading weights",
        None,
        (),
    )
    failed = table_rows.make_server_row(
        "demo",
        [make_target_sample(1.0, state="failed", reason="it failed: OOM", server_sample=None)],
        1.0,
    )
    assert (failed.state, failed.severity) == ("failed", Severity.ERROR)
    assert failed.gaps == (Gap("demo", "target.over", "it failed: OOM", "vllmops logs demo"),)
    away = table_rows.make_server_row("x", [unreachable()], 40.0)
    assert (away.state, away.severity) == ("not seen", Severity.ERROR)
    assert away.gaps[0].code == "admin.unreachable"
    late = table_rows.make_server_row("x", make_working_samples(), 40.0)
    assert plain_screen.format_state(late) == "ready (seen 10s ago)"
    assert table_rows.make_server_row("x", [], 1.0).state == "not seen yet"


@pytest.mark.parametrize(("state", "text"), [("?", "not reached"), ("", "ended")])
def test_a_server_whose_processes_are_all_lost_is_not_up(state: str, text: str) -> None:
    lost = make_busy_server_sample(1.0, processes=(process("api", state), process("engine", state)))
    row = table_rows.make_server_row(
        "x", [make_target_sample(1.0, state="", server_sample=lost)], 1.0
    )
    assert (row.state, row.severity) == (text, Severity.ERROR)


@pytest.mark.parametrize("colour", ["", "1"])
def test_the_screen_fits_a_small_terminal_and_obeys_no_escape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", colour)
    output = [
        table_rows.make_server_row("demo", make_working_samples(), 31.0),
        table_rows.make_server_row("two", make_stalled_samples(), 30.0),
        table_rows.make_server_row("away", [unreachable()], 31.0),
        table_rows.make_server_row("evil", [hostile()], 1.0),
    ]
    for part in plain_screen.render_servers(output):
        make_console().print(part)
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown)
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("100 tokens/s", "KV 45%", "engine", "chatcmpl-1f0c", "engine.no-progress"):
        assert text in shown
