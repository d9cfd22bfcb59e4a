"""The server's state in the registries that vLLM scrapes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Gauge, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from vllmops.agent.log import log
from vllmops.agent.versions import metrics
from vllmops.metrics import collector
from vllmops.metrics.collector import BackgroundCollector
from vllmops.model.server_metrics import MetricsSnapshot
from vllmops.model.server_snapshot import ProcessState
from vllmops.support.files import write_atomically

from ...support.waiting import until


def names(gathering: BackgroundCollector) -> set[str]:
    return {metric.name for metric in gathering.collect()}


@pytest.fixture
def stop_event() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_scrape_waits_for_nothing_and_shows_what_was_gathered(
    stop_event: threading.Event,
) -> None:
    go = threading.Event()

    def slow() -> tuple[MetricsSnapshot, int]:
        while not go.wait(0.01) and not stop_event.is_set():
            pass
        go.clear()  # there is no second look
        return MetricsSnapshot(stall="likely"), 1

    gathering = BackgroundCollector(slow, log.warning, stop_event.wait)
    assert not gathering.describe()
    assert not names(gathering)
    go.set()
    until(lambda: names(gathering) == {"vllmops:stalled"})
    gathering.collected_at -= collector.OLD * collector.LOOK_S
    assert not names(gathering)  # it shows no present


def test_metrics_are_collected_only_while_scraped(
    stop_event: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def take_snapshot() -> tuple[MetricsSnapshot, int]:
        nonlocal count
        count += 1
        return MetricsSnapshot(), 1

    monkeypatch.setattr(collector, "LOOK_S", 0.01)
    monkeypatch.setattr(collector, "SHARE", 100.0)
    gathering = BackgroundCollector(take_snapshot, log.warning, stop_event.wait)
    assert count == 0
    gathering.collect()
    until(lambda: count > 2)
    monkeypatch.setattr(collector, "IDLE_S", 0.0)
    until(lambda: gathering.pid == 0)
    ended = count
    time.sleep(0.1)
    assert count == ended
    monkeypatch.setattr(collector, "IDLE_S", 600.0)
    gathering.collect()
    monkeypatch.setattr(collector, "LOOK_S", 600.0)  # what it shows stays new
    until(lambda: count > ended and bool(names(gathering)))


def test_an_error_is_reported_once_and_the_next_look_works(
    stop_event: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def fail_then_take_snapshot() -> tuple[MetricsSnapshot, int]:
        nonlocal looks
        looks += 1
        if looks < 4:
            raise KeyError("odd")
        return MetricsSnapshot(), 1

    gathering = BackgroundCollector(fail_then_take_snapshot, log.warning, stop_event.wait)
    gathering.pause_s = 0.01
    until(lambda: names(gathering) == {"vllmops:stalled"})
    assert [record.message for record in caplog.records if "odd" in record.message][1:] == []


def test_collection_interval_follows_its_cost(
    stop_event: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent_s = 0.0

    def take_costly_snapshot() -> tuple[MetricsSnapshot, int]:
        nonlocal spent_s
        spent_s += 0.03
        return MetricsSnapshot(), 4

    clocks = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: spent_s)
    monkeypatch.setattr(collector, "time", clocks)
    gathering = BackgroundCollector(take_costly_snapshot, log.warning, stop_event.wait)
    gathering.collect()
    until(lambda: gathering.collected_at > 0)
    assert gathering.pause_s == pytest.approx(4 * collector.LOOK_S)
    monkeypatch.setattr(collector, "LOOK_S", 0.1)
    other = BackgroundCollector(take_costly_snapshot, log.warning, stop_event.wait)
    other.collect()
    until(lambda: other.collected_at > 0)
    assert other.pause_s == pytest.approx(0.03 / collector.SHARE)


def make_shared_collector(
    place: Path, gather: Callable[[], tuple[MetricsSnapshot, int]]
) -> BackgroundCollector:
    """What gathers in one of several API servers, without a thread."""
    made = BackgroundCollector(gather, log.warning, locate_shared_file=lambda: place)
    made.pid = os.getpid()
    return made


def tell(place: Path, told: collector.SharedSamples) -> None:
    """What another API server writes."""
    write_atomically(place, msgspec.json.encode(told))


def cpu_s(gathering: BackgroundCollector) -> list[float]:
    """A counter, as a scrape shows it."""
    name = "vllmops:process_cpu_seconds_total"
    found = (sample for metric in gathering.collect() for sample in metric.samples)
    return [sample.value for sample in found if sample.name == name]


def test_a_counter_never_goes_down_whichever_api_server_is_scraped(tmp_path: Path) -> None:
    spent_s = itertools.count(1)

    def take_cpu_snapshot() -> tuple[MetricsSnapshot, int]:
        spent = next(spent_s)
        process = ProcessState(role="api", pid=7, create_time=0.0, state="S", cpu_s=spent)
        return MetricsSnapshot(processes=(process,)), 2

    servers = [make_shared_collector(tmp_path / "told", take_cpu_snapshot) for _ in range(2)]
    seen = []
    for _ in range(3):
        for server in servers:
            server.collect_samples()
            seen += [cpu_s(each) for each in reversed(servers)]
    assert seen == [[count] for count in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)]
    assert [path.name for path in tmp_path.iterdir()] == ["told"]


def test_shared_samples_are_used_until_they_are_late(tmp_path: Path) -> None:
    place, now = tmp_path / "told", time.monotonic()
    server = make_shared_collector(place, lambda: (MetricsSnapshot(), 2))
    assert not server.load_shared_samples()
    sample = ("repairs_total", 3.0, {"role": "api", "what": "cache"})
    tell(place, collector.SharedSamples(1, now, 20.0, [sample]))
    assert server.load_shared_samples()
    assert names(server) == {"vllmops:repairs"}
    tell(place, collector.SharedSamples(1, now + 3600.0, 20.0, [sample]))  # of another boot
    server.collected_at -= 1.5 * 20.0
    assert not server.load_shared_samples()
    server.collect_samples()
    assert names(server) == {"vllmops:stalled"}
    assert not server.load_shared_samples()  # its own


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000])
def test_a_broken_shared_file_hides_nothing(tmp_path: Path, content: bytes) -> None:
    place = tmp_path / "told"
    place.write_bytes(content)
    server = make_shared_collector(place, lambda: (MetricsSnapshot(), 2))
    assert not server.load_shared_samples()
    server.collect_samples()
    assert names(server) == {"vllmops:stalled"}
    alone = make_shared_collector(tmp_path / "no folder" / "told", server.gather)
    with pytest.raises(FileNotFoundError):
        alone.collect_samples()
    assert names(alone) == {"vllmops:stalled"}


SCRAPE = """
import os, prometheus_client, prometheus_client.multiprocess
from prometheus_client import CollectorRegistry, REGISTRY, generate_latest
def scrape():
    registry = REGISTRY
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # as vLLM and its instrumentator do
        registry = CollectorRegistry()
        prometheus_client.multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode()
"""


@pytest.mark.parametrize("several", [False, True])
def test_in_the_registries_that_vllm_scrapes(
    spawn: Callable[..., Any], tmp_path: Path, several: bool
) -> None:
    more = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if several else {}
    child = spawn("VLLM::APIServer_0", **more)
    child.run(SCRAPE)

    def scrape_metrics() -> str:
        child.run("out = scrape()")
        text: str = child.run("out = scrape()")
        return text if "vllmops:agents{" in text else ""

    text = until(scrape_metrics)
    assert text.count("# TYPE vllmops:processes gauge") == 1
    assert 'vllmops:stalled{certainty="sure"} 0.0' in text
    remembers = "prometheus_client.openmetrics.exposition.escape_label_name.cache_info().hits > 0"
    assert (
        child.run(f"import prometheus_client.openmetrics.exposition; out = {remembers}") == "True"
    )
    # Nothing is imported before vLLM imports it.
    fresh = spawn("VLLM::APIServer_1", **more)
    assert fresh.run("import sys; out = 'prometheus_client' in sys.modules") == "False"


@pytest.mark.parametrize(
    "accepted",
    [
        "",
        *(
            f"{kind}; version=1.0.0; escaping={how}"
            for kind in ("text/plain", "application/openmetrics-text")
            for how in ("allow-utf-8", "underscores", "dots", "values")
        ),
    ],
)
def test_a_scrape_that_remembers_names_has_the_same_text(
    monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    registry = CollectorRegistry()
    for name in ("vllm:requests", "vllm.requests", "größe", "a b"):
        Gauge(name, "Help", ("model", "größe", "a.b"), registry=registry).labels("x", "y", "z").set(
            1
        )
    generate, _ = exposition.choose_encoder(accepted)
    before = generate(registry)
    for name in ("escape_metric_name", "escape_label_name"):
        monkeypatch.setattr(openmetrics, name, getattr(openmetrics, name))  # undone at the end
    metrics.cache_escaped_names(openmetrics)
    assert [generate(registry), generate(registry)] == [before, before]
    assert openmetrics.escape_label_name.cache_info().hits  # type: ignore[attr-defined]
