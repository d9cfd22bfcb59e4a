"""Spans of a real vLLM at a real receiver of OTLP, and log events of its watch."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ..support.extent import long
from ..support.otlp import PROTOCOL, TRACES, Collector, attributes
from ..support.waiting import until
from .conftest import Cli, Live

TRACE, PARENT = "ab" * 16, "cd" * 8
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "Authorization": "Bearer key-of-a-user"}
SECRET = "the secret of a user"
REQUEST = "POST /v1/responses"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def traced_server(cli: Cli, collector: Collector) -> Iterator[Live]:
    watch = ("--watch", "--env", "OTEL_BSP_SCHEDULE_DELAY=200")
    vllm = ("--otlp-traces-endpoint", f"{collector.url}{TRACES}", "--api-key", "key-of-a-user")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL)
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", PROTOCOL)
        made = cli.serve("traced", "--demo", "text", *watch, "--", *vllm)
    try:
        yield made
    finally:
        cli("stop", made.name, "--force")


@pytest.fixture
def request_sender(traced_server: Live, collector: Collector) -> Callable[..., Any]:
    def post(**body: Any) -> httpx.Response:
        made = {"model": "demo-text", "input": SECRET, "max_output_tokens": 4, **body}
        answer = httpx.post(
            f"{traced_server.url}/v1/responses", json=made, headers=HEADERS, timeout=60
        )
        return answer.raise_for_status()

    collector.traces.clear()
    return post


def wait_for_spans(collector: Collector, *names: str) -> dict[str, Span]:
    """Spans by their names, as soon as all of these are there."""

    def find_spans() -> dict[str, Span] | None:
        spans = {span.name: span for span in collector.spans}
        return spans if spans.keys() >= set(names) else None

    return until(find_spans, 20, lambda: [span.name for span in collector.spans])


def check(spans: dict[str, Span], collector: Collector, *secrets: str) -> None:
    """All are in the client's trace, below the HTTP request; none says what it must not."""
    request = spans[REQUEST]
    assert request.parent_span_id.hex() == PARENT
    for name, span in spans.items():
        assert span.trace_id.hex() == TRACE
        if name not in {REQUEST, "vllmops.carrier.open"}:
            assert span.parent_span_id == request.span_id, name
    text = str([span for name, span in spans.items() if name != "llm_request"])
    for secret in (SECRET, "key-of-a-user", *secrets):
        assert secret not in text


@long
def test_a_stored_conversation(request_sender: Callable[..., Any], collector: Collector) -> None:
    first = request_sender().json()
    wait_for_spans(collector, REQUEST, "llm_request", "vllmops.store.create")
    collector.traces.clear()
    second = request_sender(previous_response_id=first["id"]).json()
    names = ("vllmops.store.conversation", "vllmops.rehydrate", "vllmops.store.create")
    spans = wait_for_spans(collector, REQUEST, "llm_request", *names)
    check(spans, collector, first["id"], second["id"])
    create, rehydrate = attributes(spans[names[2]]), attributes(spans[names[1]])
    assert create["vllmops.store.backend"] == "sqlite"
    assert create["vllmops.status"] == "ok"
    assert create["vllmops.bytes"] > 100
    assert rehydrate["vllmops.turns"] == 1
    assert attributes(spans[REQUEST])["http.response.status_code"] == 200


@long
@pytest.mark.parametrize("way", ["stream", "background"])
def test_a_stream_and_a_background_run_stay_in_their_trace(
    request_sender: Callable[..., Any], collector: Collector, way: str
) -> None:
    request_sender(**{way: True})
    last = "vllmops.store.create" if way == "stream" else "vllmops.store.put"
    check(wait_for_spans(collector, REQUEST, "llm_request", last), collector)


@long
def test_carriers(request_sender: Callable[..., Any], collector: Collector) -> None:
    sealed = {"store": False, "include": ["reasoning.encrypted_content"]}
    answer = request_sender(**sealed).json()
    item = next(item for item in answer["output"] if item.get("encrypted_content"))
    wait_for_spans(collector, REQUEST, "vllmops.carrier.seal")
    collector.traces.clear()
    said = {"role": "user", "content": SECRET}
    request_sender(**sealed, input=[item, said])
    names = ("vllmops.carrier.open", "vllmops.rehydrate", "vllmops.carrier.seal")
    spans = wait_for_spans(collector, REQUEST, "llm_request", *names)
    check(spans, collector, item["encrypted_content"][:40])
    assert spans[names[0]].parent_span_id == spans[names[1]].span_id
    assert attributes(spans[names[0]])["vllmops.bytes"] == len(item["encrypted_content"])


@long
def test_a_stall_is_a_log_event(
    traced_server: Live, request_sender: Callable[..., Any], collector: Collector
) -> None:
    os.kill(traced_server.pids()["engine"], signal.SIGSTOP)
    try:
        request_sender(background=True)
        stalled = until(
            lambda: [one for one in collector.records if one.event_name == "vllmops.stalled"], 90
        )
    finally:
        os.kill(traced_server.pids()["engine"], signal.SIGCONT)
    assert attributes(stalled[0])["vllmops.server"] == traced_server.name
    assert SECRET not in str(stalled)
    until(lambda: any(one.event_name == "vllmops.recovered" for one in collector.records), 60)


@long
def test_a_collector_that_is_gone_slows_nothing(
    request_sender: Callable[..., Any], collector: Collector
) -> None:
    def seconds() -> float:
        began = time.monotonic()
        request_sender()
        return time.monotonic() - began

    before = statistics.median(seconds() for _ in range(20))
    collector.stop()
    after = [seconds() for _ in range(40)]  # the exporter has failed in between
    assert statistics.median(after) < 1.5 * before
    assert max(after) < 1
