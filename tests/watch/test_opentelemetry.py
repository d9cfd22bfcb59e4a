"""Events as log records, at a real receiver of OTLP."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber

from vllmops.model.watch_events import WatchEvent
from vllmops.support.errors import VllmopsError
from vllmops.watch import opentelemetry

from ..support.otlp import PROTOCOL, Collector, attributes

STALLED = WatchEvent(
    event="stalled",
    happened_at=1_700_000_000.5,
    server="demo",
    text="demo stalls: resp_of_somebody",
    url="http://user:secret@localhost:8000",
    model="/models/demo",
    number=2,
    seconds=31.5,
    code="stack.mm-cache-eviction-spin",
    title="The eviction of the multimodal cache spins",
    subject="engine DP0",
    victims=("api",),
    evidence="a secret of a user",
    next_step="vllmops cache repair",
    findings=("stack.mm-cache-eviction-spin",),
    bundle="/home/somebody/bundle",
)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL)
    yield made
    made.stop()


def test_a_stall_and_its_end(collector: Collector) -> None:
    send = opentelemetry.make_otlp_sender(os.environ)
    assert send
    send(STALLED)
    send(
        WatchEvent(
            event="recovered",
            happened_at=1_700_000_040,
            server="demo",
            text="demo recovered",
            number=2,
        )
    )
    stalled, recovered = collector.records
    assert stalled.event_name == "vllmops.stalled"
    assert stalled.severity_number == SeverityNumber.SEVERITY_NUMBER_WARN
    assert stalled.time_unix_nano == 1_700_000_000_500_000_000
    assert stalled.body.string_value == STALLED.title
    found = attributes(stalled)
    assert found["vllmops.code"] == STALLED.code
    assert found["vllmops.seconds"] == 31.5
    assert found["vllmops.number"] == 2
    assert [value.string_value for value in found["vllmops.victims"].values] == ["api"]
    for private in (STALLED.text, STALLED.url, STALLED.evidence, STALLED.bundle):
        assert str(private) not in str(collector.logs)
    assert recovered.severity_number == SeverityNumber.SEVERITY_NUMBER_INFO
    assert "vllmops.code" not in attributes(recovered)


def test_a_collector_that_is_gone_is_reported_in_time(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    send = opentelemetry.make_otlp_sender(os.environ)
    assert send
    collector.stop()
    calls: list[object] = []
    connect = socket.socket.connect

    def record_connect(self: socket.socket, address: Any) -> None:
        calls.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", record_connect)
    with pytest.raises(VllmopsError) as error:
        send(STALLED)
    assert error.value.code == "watch.otlp"
    # With its default of ten seconds, it is called eight times; on a busy machine maybe never.
    assert len(calls) <= 4
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://x", "OTEL_LOGS_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"},
    ],
)
def test_otlp_is_off_without_a_configured_collector(environment: dict[str, str]) -> None:
    assert opentelemetry.make_otlp_sender(environment) is None


def test_an_unsupported_protocol_and_a_missing_package_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    with pytest.raises(VllmopsError, match="none of grpc, http"):
        opentelemetry.make_otlp_sender({**named, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(VllmopsError) as error:
        opentelemetry.make_otlp_sender(named)
    assert error.value.hint == "pip install 'vllmops-cli[otel]'"


def test_over_grpc() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", GRPC],
        env={**os.environ, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "vllmops.stalled\n", ran.stderr


# In a process of its own, as gRPC breaks every later fork.
GRPC = """
import os
from concurrent.futures import ThreadPoolExecutor
import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as pb
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as service
from vllmops.model.watch_events import WatchEvent
from vllmops.watch import opentelemetry as otlp

class Logs(service.LogsServiceServicer):
    def Export(self, request, context):
        print(request.resource_logs[0].scope_logs[0].log_records[0].event_name)
        return pb.ExportLogsServiceResponse()

server = grpc.server(ThreadPoolExecutor(1))
service.add_LogsServiceServicer_to_server(Logs(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
send = otlp.make_otlp_sender(os.environ)
send(WatchEvent(event="stalled", happened_at=1.0, server="demo", text=""))
server.stop(0).wait()
"""
