"""Spans of the Responses API, as OpenTelemetry's SDK takes them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from vllmops_responses.keys.keyring import generate_secret, make_single_key_ring
from vllmops_responses.server import tracing
from vllmops_responses.server.carriers import carrier_sealing
from vllmops_responses.server.carriers.carrier_merge import RequestCarrier
from vllmops_responses.server.wire_format import ApiError
from vllmops_responses.store.backend import EVERYBODY, Limits, Response
from vllmops_responses.store.backends.memory import Memory
from vllmops_responses.store.response_store import ResponseStore
from vllmops_responses.store.settings import CarrierSettings

TRACE, PARENT = "ab" * 16, "cd" * 8
SECRET = "a secret of a user"
OWNER, ID = "e3b0c44298fc1c149afb", "resp_of_somebody"


class Failing(Memory):
    async def delete(self, owner: str, response_id: str) -> bool:
        raise OSError(f"{SECRET} {response_id}")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(tracing, "_tracer", None)
    yield exporter
    provider.shutdown()


def run_in_request(work: Any, *headers: tuple[bytes, bytes]) -> None:
    """Does some work in an HTTP request."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await work()
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None: ...

    scope = {
        "method": "POST",
        "headers": [(b"authorization", b"Bearer " + OWNER.encode()), *headers],
    }
    asyncio.run(tracing.answer_in_span("/v1/responses/{response_id}", answer, scope, send, send))  # type: ignore[arg-type]


def parent() -> tuple[bytes, bytes]:
    return b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def make_response() -> Response:
    return Response(
        id=ID, owner=OWNER, model="m", status="completed", body=b'{"output":[]}', input=b'["hi"]'
    )


def test_the_store_below_the_request_below_the_clients_span(spans: InMemorySpanExporter) -> None:
    backend = Memory("memory://", Limits())
    tracing.start_tracing(backend)
    given: dict[str, str] = {}

    async def use_store() -> None:
        async with ResponseStore(backend) as store:
            await store.create(make_response())
            assert await store.get(OWNER, ID)
            assert await store.get(OWNER, "resp_none") is None
            given.update(tracing.make_trace_headers() or {})

    run_in_request(use_store, parent())
    found = by_name(spans)
    request = found["POST /v1/responses/{response_id}"]
    assert request.parent
    assert request.context
    assert f"{request.parent.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert given["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert request.attributes
    assert request.attributes["http.response.status_code"] == 200
    create = found["vllmops.store.create"]
    assert create.parent == request.context
    attributes = dict(create.attributes or {})
    assert attributes.pop("vllmops.bytes", 0)
    assert attributes == {
        "vllmops.store.backend": "memory",
        "vllmops.store.operation": "create",
        "vllmops.status": "ok",
    }
    assert all(ID not in span.to_json() and OWNER not in span.to_json() for span in found.values())


def test_work_that_outlasts_its_request_still_has_spans(spans: InMemorySpanExporter) -> None:
    backend = Memory("memory://", Limits())
    tracing.start_tracing(backend)

    async def run() -> None:
        tasks: list[asyncio.Task[Any]] = []

        async def later() -> None:
            await asyncio.sleep(0.02)
            await backend.create(make_response())

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            tasks.append(asyncio.create_task(later()))

        none: Any = None
        scope = {"method": "POST", "headers": []}
        await tracing.answer_in_span("/v1/responses", answer, scope, none, none)
        await tasks[0]
        await asyncio.create_task(backend.sweep(), name="beside requests")

    asyncio.run(run())
    found = by_name(spans)
    assert found["vllmops.store.create"].parent == found["POST /v1/responses"].context
    assert len(found) == 2


def test_an_error_is_named_and_not_quoted(spans: InMemorySpanExporter) -> None:
    backend = Failing("memory://", Limits())
    tracing.start_tracing(backend)

    async def fail_to_delete() -> None:
        with pytest.raises(OSError, match=SECRET):
            await backend.delete(OWNER, ID)

    run_in_request(fail_to_delete)
    span = by_name(spans)["vllmops.store.delete"]
    assert span.attributes
    assert span.attributes["error.type"] == "OSError"
    assert span.attributes["vllmops.status"] == "failed"
    assert not span.status.is_ok
    assert SECRET not in span.to_json()
    assert ID not in span.to_json()


def test_carriers(spans: InMemorySpanExporter) -> None:
    tracing.start_tracing(Memory("memory://", Limits()))
    ring = make_single_key_ring(generate_secret())
    text: list[str] = []

    async def seal_and_open_carriers() -> None:
        made = await carrier_sealing.seal_carrier(
            [{"role": "user", "content": SECRET}],
            9,
            CarrierSettings(),
            ring,
            model="m",
            owner=OWNER,
        )
        assert made
        text.append(made)
        await carrier_sealing.open_carrier(
            RequestCarrier(made, 0, "input"), ring, model="m", owner=OWNER
        )
        with pytest.raises(ApiError):
            await carrier_sealing.open_carrier(
                RequestCarrier(made[:-9], 0, "input"), ring, model="m", owner=OWNER
            )

    run_in_request(seal_and_open_carriers, parent())
    seal, opened, refused = [
        span for span in spans.get_finished_spans() if span.name.startswith("vllmops.carrier")
    ]
    assert seal.attributes
    assert opened.attributes
    assert refused.attributes
    assert seal.attributes["vllmops.bytes"] == opened.attributes["vllmops.bytes"] == len(text[0])
    assert opened.name == refused.name == "vllmops.carrier.open"
    assert refused.attributes["error.type"] == "CarrierError"
    assert all(
        word not in span.to_json()
        for span in spans.get_finished_spans()
        for word in (SECRET, text[0][:40])
    )


def test_without_a_request_and_with_a_trace_that_is_not_sampled_there_are_none(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Memory("memory://", Limits())
    tracing.start_tracing(backend)
    asyncio.run(backend.create(make_response()))
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("vllmops"))

    async def get_response() -> None:
        assert await backend.get(EVERYBODY, ID)

    run_in_request(get_response)
    assert not spans.get_finished_spans()


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import asyncio, sys\n"
        "from vllmops_responses.server import tracing\n"
        "async def answer(*words): pass\n"
        "asyncio.run(tracing.answer_in_span('/', answer, {}, None, None))\n"
        "with tracing.start_span('rehydrate', {}) as add: add(1)\n"
        "assert tracing.make_trace_headers() is None\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
