"""The gate around the HTTP application; a stand-in for FastAPI, real asyncio."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from vllmops.agent.hooks import request_gate
from vllmops.agent.hooks.request_gate import Gate, hook_fastapi


class App:
    """What `hook_fastapi` needs of FastAPI: an ASGI callable (tests/live has the real one)."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.inner: App | None = None
        self.root_path: str | None = None  # as vLLM sets it
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope)
        if self.inner is not None:
            await self.inner(dict(scope), receive, send)
        await self.go.wait()
        if scope["path"] == "/crash":
            raise ValueError("crash")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    call = App.__call__
    monkeypatch.setattr(request_gate, "gate", Gate())
    fastapi = ModuleType("fastapi.applications")
    fastapi.FastAPI = App  # type: ignore[attr-defined]
    hook_fastapi(fastapi)
    hook_fastapi(fastapi)
    yield request_gate.gate
    App.__call__ = call  # type: ignore[method-assign]


def scope(path: str = "/v1/completions", kind: str = "http") -> dict[str, Any]:
    return {"type": kind, "path": path, "method": "POST"}


async def answer(app: App, asked: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(asked, None, send)
    return sent


def test_a_websocket_of_responses_counts_by_its_requests(gate: Gate) -> None:
    async def run_websocket() -> None:
        app = App()
        socket = asyncio.ensure_future(answer(app, scope("/v1/responses", "websocket")))
        await asyncio.sleep(0.01)
        assert (gate.in_flight, gate.started_requests) == (0, 0)
        began = time.monotonic()
        with request_gate.count_websocket_request(
            scope("/v1/responses"), rendering=True
        ) as arrival:
            assert gate.rendering_requests == {arrival}
            now = time.monotonic()
            assert gate.measure_rendering_s(now) <= now - began
            assert arrival.route == "POST /v1/responses"
            assert gate.mark_reached_engine() is arrival
            assert (gate.in_flight, len(gate.rendering_requests)) == (1, 0)
        assert (gate.in_flight, gate.started_requests) == (0, 1)
        app.go.set()
        await socket

    asyncio.run(run_websocket())


def test_counts_what_is_in_flight(gate: Gate) -> None:
    async def run_requests() -> None:
        app, inner = App(), App()
        app.inner = inner
        inner.go.set()
        tasks = [asyncio.ensure_future(answer(app, scope())) for _ in range(3)]
        tasks += [asyncio.ensure_future(answer(app, scope(path))) for path in ("/health", "/ping")]
        await asyncio.sleep(0.01)
        assert (gate.in_flight, gate.started_requests) == (3, 3)
        assert len(inner.seen) == 5
        app.go.set()
        await asyncio.gather(*tasks)
        assert (gate.in_flight, gate.started_requests) == (0, 3)

    asyncio.run(run_requests())


def test_a_request_that_fails_or_is_given_up_is_over(gate: Gate) -> None:
    async def run_failing_requests() -> None:
        app = App()
        given_up = asyncio.ensure_future(answer(app, scope()))
        await asyncio.sleep(0)
        assert gate.in_flight == 1
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        app.go.set()
        with pytest.raises(ValueError, match="crash"):
            await answer(app, scope("/crash"))
        assert (gate.in_flight, gate.started_requests) == (0, 2)

    asyncio.run(run_failing_requests())


def test_draining_refuses_new_requests_and_finishes_old_ones(gate: Gate) -> None:
    async def drain_requests() -> None:
        app = App()
        old = asyncio.ensure_future(answer(app, scope()))
        await asyncio.sleep(0)
        gate.draining = True
        for path in ("/v1/completions", "/health"):
            start, body = await answer(app, scope(path))
            assert start["status"] == 503
            assert int(dict(start["headers"])[b"retry-after"]) > 0
            assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        extended: dict[str, Any] = {"extensions": {"websocket.http.response": {}}}
        start, body = await answer(app, {**scope(kind="websocket"), **extended})
        assert (start["type"], start["status"]) == ("websocket.http.response.start", 503)
        assert int(dict(start["headers"])[b"retry-after"]) > 0
        assert (body["type"], bool(body["body"])) == ("websocket.http.response.body", True)
        lacking: tuple[Any, ...] = (None, {})
        for extensions in lacking:
            (closed,) = await answer(app, {**scope(kind="websocket"), "extensions": extensions})
            assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
        app.go.set()
        assert await answer(app, scope("/metrics")) == []
        await old
        assert [item["path"] for item in app.seen] == ["/v1/completions", "/metrics"]
        assert gate.in_flight == 0
        gate.draining = False
        await answer(app, scope())
        assert gate.started_requests == 2

    asyncio.run(drain_requests())


@pytest.mark.parametrize(
    ("method", "path", "new"),
    [
        ("POST", "/v1/responses", True),
        ("GET", "/v1/responses", False),
        ("GET", "/v1/responses/resp_1", False),
        ("HEAD", "/v1/responses/resp_1", False),
        ("DELETE", "/v1/responses/resp_1", False),
        ("GET", "/v1/responses/resp_1/input_items", False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/v1/responses/compact", True),
        ("GET", "/v1/conversations/conv_1/items", False),
        ("DELETE", "/v1/conversations/conv_1", False),
        ("POST", "/v1/conversations", True),
        ("GET", "/root/v1/responses/resp_1", False),
        ("GET", "/rooted/v1/responses/resp_1", True),
        ("POST", "/v1/chat/completions", True),
        ("GET", "/health", True),
        ("GET", "/metrics", False),
        ("GET", "/v1/models", True),
        ("POST", "/v1/completions/cancel", True),
    ],
)
def test_a_drain_refuses_new_work_alone(gate: Gate, method: str, path: str, new: bool) -> None:
    async def send_while_draining() -> None:
        app = App()
        app.root_path = "/root/"
        app.go.set()
        gate.draining = True
        sent = await answer(app, {**scope(path), "method": method})
        assert ([item["status"] for item in sent[:1]], not app.seen) == ([503] * new, new)

    asyncio.run(send_while_draining())


def test_lifespan_passes(gate: Gate) -> None:
    async def send_lifespan() -> None:
        app = App()
        app.go.set()
        gate.draining = True
        await answer(app, {"type": "lifespan", "path": ""})
        assert app.seen
        assert gate.started_requests == 0

    asyncio.run(send_lifespan())


def test_knows_who_has_not_reached_the_engine(gate: Gate) -> None:
    class Handing(App):
        async def __call__(self, *_: Any) -> None:
            # As AsyncLLM.add_request does, from wherever the request's context reaches.
            await asyncio.create_task(hand_over())

    async def hand_over() -> None:
        gate.mark_reached_engine()

    async def hold_requests_before_engine() -> None:
        waiting, handing = App(), App()
        handing.inner = Handing()
        began = time.monotonic()
        tasks = [
            asyncio.ensure_future(answer(app, {**scope(), "method": method}))
            for app, method in ((waiting, "POST"), (waiting, "GET"), (handing, "POST"))
        ]
        await asyncio.sleep(0.01)
        assert (gate.in_flight, len(gate.rendering_requests)) == (3, 1)
        # It may bring more at any time.
        tasks.append(asyncio.ensure_future(answer(handing, scope(kind="websocket"))))
        await asyncio.sleep(0.01)
        assert (gate.in_flight, len(gate.rendering_requests)) == (4, 2)
        # What it has waited for nobody knows: the oldest of the others counts.
        now = time.monotonic()
        assert 0.01 < gate.measure_rendering_s(now) <= now - began
        waiting.go.set()
        handing.go.set()
        await asyncio.gather(*tasks)
        assert not gate.rendering_requests
        assert gate.measure_rendering_s(time.monotonic()) == 0.0

    asyncio.run(hold_requests_before_engine())


def test_overlapping_refusals_each_undo_only_their_own(gate: Gate) -> None:
    """Two resets at once, and a drain in between: each undoes its own alone."""
    with ExitStack() as first:
        first.enter_context(gate.refuse_requests())
        second = ExitStack()
        second.enter_context(gate.refuse_requests())
        assert gate.is_closed
        first.close()
        assert gate.is_closed
        second.close()
        assert not gate.is_closed
    with gate.refuse_requests():
        gate.draining = True
    assert gate.is_closed


def test_request_cut_off_after_its_answer_is_no_longer_in_flight(gate: Gate) -> None:
    """As a request with background work, which the server has answered: it takes nothing else."""

    class Done(App):
        async def __call__(self, _: Any, __: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            await self.go.wait()

    async def cut_off_answered_request() -> None:
        app, complete = App(), False
        app.inner = Done()

        async def send(message: Any) -> None:
            nonlocal complete
            if complete:
                raise RuntimeError("response already completed")
            complete = message["type"] == "http.response.body"

        asked = asyncio.ensure_future(app(scope(), None, send))
        await asyncio.sleep(0.01)
        assert gate.in_flight == 1
        assert await asyncio.to_thread(gate.cut_off_requests, 60.0)
        await asked
        assert gate.in_flight == 0

    asyncio.run(cut_off_answered_request())


@pytest.mark.parametrize("says", [None, b"data: the last words"])
@pytest.mark.parametrize("swallows", [False, True])
def test_cut_off_requests_get_a_503_and_streams_an_error(
    gate: Gate, swallows: bool, says: bytes | None
) -> None:
    """Or what the application wants a stream to end with.

    Also where it takes the cancellation for an answer, as vLLM does.
    """

    class Streaming(App):
        async def __call__(self, _: Any, __: Any, send: Any) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            begun = {"type": "http.response.start", "status": 200, "headers": headers}
            if self.inner is None:
                await send(begun)
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
            if says:
                gate.set_last_event(lambda: says)
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                if not swallows:
                    raise
                await send({**begun, "status": 500})

    async def cut_off_running_requests() -> None:
        outer, plain, streaming = App(), Streaming(), Streaming()
        plain.inner = App()
        outer.inner = plain
        asked = asyncio.ensure_future(answer(outer, scope()))
        await asyncio.sleep(0.01)
        outer.inner = streaming
        followed = asyncio.ensure_future(answer(outer, scope()))
        await asyncio.sleep(0.01)
        outer.go.set()
        assert await asyncio.to_thread(gate.cut_off_requests, 60.0)
        start, _ = await asked
        assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"5")
        began, _, last = await followed
        assert (began["status"], last["more_body"]) == (200, False)
        if says:
            assert last["body"] == says
        else:
            assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == 503
        assert gate.in_flight == 0

    asyncio.run(cut_off_running_requests())
