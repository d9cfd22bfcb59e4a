"""A WebSocket's connection: its limits, its order, hostile clients.

The server is a real uvicorn. What makes responses is not vLLM, whose import takes longer than all
these tests, and which can't be told when to send an event; tests/live/test_websocket.py has it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vllmops.agent.hooks.request_gate import cut_off_request, gate
from vllmops_responses.server import wire_format
from vllmops_responses.server.conversations import socket_request
from vllmops_responses.server.http import websocket
from vllmops_responses.server.wire_format import ApiError, EncodedEvent
from vllmops_responses.store.backend import Response
from vllmops_responses.store.settings import WebSocketLimits

Client = Callable[..., Any]
KINDS = ("response.created", "response.completed")
BACKGROUND = "resp_background"


class Handler:
    """Makes responses as a test wants them."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.made: list[dict[str, Any]] = []
        self.closed = 0
        self.sent = 0
        self.stored_responses = self

    async def create(
        self, given: dict[str, Any], raw_request: Request
    ) -> AsyncIterator[EncodedEvent]:
        self.made.append(given)
        before = given.get("previous_response_id")
        if before and socket_request.find_remembered_history(before) is None:
            raise wire_format.make_not_found_error(before, "previous_response_id")
        if given["input"] == "refused":
            raise ApiError(400, "no", "input")
        if given["input"] == "broken":
            raise OSError("a defect of the server's own")
        assert json.loads(await raw_request.body()) == given
        return self.stream(given)

    async def stream(self, given: dict[str, Any]) -> AsyncIterator[EncodedEvent]:
        body: dict[str, Any] = {"id": f"resp_{len(self.made)}", "owner": "", "output": []}
        try:
            yield frame("response.created", 0, response=body)
            while given["input"] == "flood":
                self.sent += 1
                await asyncio.sleep(0)  # as an engine's stream, whose tokens take time
                yield frame("response.output_text.delta", self.sent, delta="x" * 10_000)
            if given["input"] == "large":  # more than the kernels buffer, as the last event
                body["output"] = "x" * 20_000_000
            if given["input"] == "wait":
                await self.goes_on.wait()
            if given["input"] == "fail":
                yield frame("response.failed", 1, response={**body, "status": "failed"})
                return
            kept = Response(id=body["id"], owner="", model="", status="completed", body=b"{}")
            socket_request.remember_history([kept])
            yield frame("response.completed", 1, response={**body, "status": "completed"})
        finally:
            self.closed += 1

    async def cancel(self, owner: str, response_id: str) -> bytes:
        if response_id != BACKGROUND:
            raise wire_format.make_not_found_error(response_id)
        self.goes_on.set()
        return b"{}"

    async def resume_stream(
        self, owner: str, response_id: str, after: int | None
    ) -> AsyncIterator[EncodedEvent]:
        if response_id != BACKGROUND:
            raise wire_format.make_not_found_error(response_id)
        return self.background(after)

    async def background(self, after: int | None) -> AsyncIterator[EncodedEvent]:
        body = {"id": BACKGROUND, "status": "in_progress"}
        if after is None:
            yield frame("response.created", 0, response=body)
        yield frame("response.output_text.delta", 1, delta="x")
        await self.goes_on.wait()
        yield frame("response.cancelled", 2, response={**body, "status": "cancelled"})

    def create_error_response(self, error: Exception) -> Any:
        return SimpleNamespace(error=SimpleNamespace(code=500, message=str(error), param=None))


async def wait_until(state: Callable[[], bool]) -> None:
    while not state():  # noqa: ASYNC110 - what others own has no event
        await asyncio.sleep(0.005)


def frame(kind: str, number: int, **fields: Any) -> EncodedEvent:
    body = {"type": kind, "sequence_number": number, **fields}
    return EncodedEvent(kind, msgspec.json.encode(body))


@asynccontextmanager
async def server(
    handler: Handler, limits: WebSocketLimits, ping_s: float | None
) -> AsyncIterator[Client]:
    """A server; gives what connects a client."""
    app = FastAPI()
    app.state.args = SimpleNamespace()
    app.state.openai_serving_responses = handler

    @app.websocket("/v1/responses")
    async def serve(given: WebSocket) -> None:
        if why := websocket.find_handshake_error(given, ["one", "two"], limits):
            await websocket.deny_handshake(given, *why)
            return
        await websocket.WebSocketConnection(given, handler, "me", handler.create, limits).serve()

    # Where asyncio knows the protocol, it turns Nagle's algorithm off.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/responses"
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws_ping_interval=ping_s)
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve([listener]))
        await wait_until(lambda: running.started)

        def client(key: str = "Bearer one", **more: Any) -> Any:
            return connect(url, additional_headers={"Authorization": key}, **more)

        try:
            yield client
        finally:
            running.should_exit = True
            await task


def play(
    act: Callable[[Client, Handler], Coroutine[Any, Any, None]],
    limits: WebSocketLimits | None = None,
    ping_s: float | None = 0.2,
) -> None:
    async def run_session() -> None:
        handler = Handler()
        async with (
            asyncio.timeout(60),
            server(handler, limits or WebSocketLimits(), ping_s) as client,
        ):
            await act(client, handler)
        assert not websocket.opened
        assert not websocket.waiting.bytes
        assert not socket_request.UnstoredResponses.bytes_of_all

    asyncio.run(run_session())


async def send_create_event(client: ClientConnection, text: str, **fields: Any) -> None:
    await client.send(json.dumps({"type": "response.create", "input": text, **fields}))


async def hear(client: ClientConnection) -> Any:
    return json.loads(await client.recv())


async def wait_for_close_code(client: ClientConnection) -> int:
    """The code with which the server closes a connection."""
    try:
        while True:
            await client.recv()
    except ConnectionClosed as error:
        return error.rcvd.code if error.rcvd else 0


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is closed soon where it is idle, but not before its first run has begun."""
    begin = websocket.WebSocketConnection.start_response

    def start_with_idle_limit(self: websocket.WebSocketConnection, *given: Any) -> None:
        begin(self, *given)
        self.limits = WebSocketLimits(idle_s=0.3)

    monkeypatch.setattr(websocket.WebSocketConnection, "start_response", start_with_idle_limit)


@pytest.mark.usefixtures("brief")
def test_idle_time_begins_where_the_last_run_ends() -> None:
    async def act(client: Client, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        async with client() as one:
            await send_create_event(one, "wait")
            await asyncio.sleep(0.5)
            ended = loop.time()
            handler.goes_on.set()
            assert [(await hear(one))["type"] for _ in KINDS] == [*KINDS]
            assert await wait_for_close_code(one) == websocket.GOING_AWAY
            assert loop.time() - ended > 0.25

    play(act)


def test_a_message_begins_the_idle_time_again() -> None:
    async def act(client: Client, handler: Handler) -> None:
        loop = asyncio.get_running_loop()
        async with client() as one:
            await asyncio.sleep(0.5)
            (connection,) = websocket.opened
            connection.limits = WebSocketLimits(idle_s=0.3)  # from its next message on
            sent = loop.time()
            await one.send("{}")
            assert (await hear(one))["code"] == "400"
            assert await wait_for_close_code(one) == websocket.GOING_AWAY
            assert loop.time() - sent > 0.25

    play(act)


def test_bytes_that_wait_have_a_bound() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await send_create_event(one, "wait")
            assert (await hear(one))["type"] == KINDS[0]
            for number in range(3):
                await send_create_event(one, "x" * 600, user=number)
            refused = await hear(one)
            assert (refused["status"], refused["code"]) == (429, "too_many_requests")
            assert (await hear(one))["status"] == 429
            await send_create_event(one, "y" * 600, stream_id="other")  # it has no need to wait
            assert [(await hear(one))["stream_id"] for _ in KINDS] == ["other"] * 2
            # Longer than a ping may take: a connection that is full is alive, and hears more.
            await asyncio.sleep(0.5)
            await one.send('{"type": "response.cancel"}')
            told = [await hear(one) for _ in range(2)]
            assert {(one["type"], one.get("code")) for one in told} == {
                ("error", "cancelled"),  # it waited
                ("response.cancelled", None),
            }
            await send_create_event(one, "z" * 600)
            assert [(await hear(one))["type"] for _ in KINDS] == [*KINDS]

    play(act, WebSocketLimits(message=1000))


def test_bytes_that_wait_on_all_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "WAITING_BYTES", 1500)

    async def act(client: Client, handler: Handler) -> None:
        async with client() as other:
            async with client() as one:
                for connection in (one, other):
                    await send_create_event(connection, "wait")
                    assert (await hear(connection))["type"] == KINDS[0]
                await send_create_event(one, "x" * 900)
                await wait_until(lambda: websocket.waiting.bytes > 900)
                await send_create_event(other, "x" * 900)
                refused = await hear(other)
                assert (refused["status"], refused["code"]) == (429, "too_many_requests")
            await wait_until(lambda: not websocket.waiting.bytes)
            await send_create_event(other, "x" * 900)
            await wait_until(lambda: websocket.waiting.bytes > 900)
            handler.goes_on.set()
            assert [(await hear(other))["type"] for _ in range(3)] == [KINDS[1], *KINDS]

    play(act)


def test_responses_remembered_by_all_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_request, "ALL_REMEMBERED_BYTES", 25)  # a response has ten

    async def act(client: Client, handler: Handler) -> None:
        async with client() as one, client() as other:
            for connection in (one, one, other):
                await send_create_event(connection, "a")
                assert [(await hear(connection))["type"] for _ in KINDS] == [*KINDS]
            # That with most has forgotten its oldest.
            for connection, known in ((other, "resp_3"), (one, "resp_2")):
                await send_create_event(connection, "b", previous_response_id=known)
                assert [(await hear(connection))["type"] for _ in KINDS] == [*KINDS]
            await send_create_event(one, "b", previous_response_id="resp_1")
            assert (await hear(one))["code"] == "previous_response_not_found"

    play(act)


def test_turns_with_one_id_are_all_counted() -> None:
    memory, history = socket_request.UnstoredResponses(), list[Response]()
    for _ in range(5):
        turn = Response(id="mine", owner="", model="m", status="completed", body=b"{}")
        memory.remember_history(history := [*history, turn])
    assert (
        memory.bytes
        == socket_request.UnstoredResponses.bytes_of_all
        == 5 * len(turn.body + turn.input + b"mine")
    )
    memory.clear()


def test_requests_have_a_bound() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            for number in range(3):
                await send_create_event(one, "wait", stream_id=str(number))
            heard = [await hear(one) for _ in range(3)]
            assert sorted(event["type"] for event in heard) == ["error", *KINDS[:1] * 2]

    play(act, WebSocketLimits(requests=2))


@pytest.mark.parametrize("message", ["x" * 101, "ä" * 51, b"x" * 101])
def test_a_message_that_is_too_large(message: str | bytes) -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await one.send(message)
            assert await wait_for_close_code(one) == websocket.TOO_BIG

    play(act, WebSocketLimits(message=100))


def test_connections_have_a_bound() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client(), client():
            with pytest.raises(InvalidStatus) as error:
                async with client():
                    pass
            assert error.value.response.status_code == 503
        await wait_until(lambda: not websocket.opened)
        async with client():
            pass

    play(act, WebSocketLimits(connections=2))


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://here", None),
        ("https://friend", None),
        ("http://elsewhere", 403),
        ("http://[", 403),
        ("null", 403),
    ],
)
def test_the_origin_of_a_page(origin: str, status: int | None) -> None:
    arguments = SimpleNamespace(allowed_origins=["https://friend"])
    state = SimpleNamespace(args=arguments, openai_serving_responses=Handler)
    headers = {"host": "here", "origin": origin}
    given: Any = SimpleNamespace(headers=headers, app=SimpleNamespace(state=state))
    why = websocket.find_handshake_error(given, [], WebSocketLimits())
    assert (why[0] if why else None) == status


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "Basic one", "Bearer \xfc"])
def test_a_wrong_key(key: str, caplog: pytest.LogCaptureFixture) -> None:
    async def act(client: Client, handler: Handler) -> None:
        with pytest.raises(InvalidStatus) as error:
            async with client(key=key):
                pass
        assert error.value.response.status_code == 401

    play(act)
    assert not caplog.records


@pytest.mark.usefixtures("brief")
def test_an_idle_client_that_takes_nothing() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client(max_queue=1, compression=None) as slow:
            await send_create_event(slow, "large")
            await wait_until(lambda: handler.closed == 1)
            async with asyncio.timeout(60):
                await wait_until(lambda: not websocket.opened)

    play(act, ping_s=None)  # a ping that is not answered would close it, too


def test_a_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "STALL_S", 0.3)

    async def act(client: Client, handler: Handler) -> None:
        async with client(max_queue=1, compression=None) as slow, client() as quick:
            await send_create_event(slow, "flood")
            await hear(slow)
            await asyncio.sleep(0.2)
            await send_create_event(quick, "hello")
            assert [(await hear(quick))["type"] for _ in KINDS] == [*KINDS]
            await wait_until(lambda: handler.closed == 2)
            assert handler.sent < 2000  # what the kernels buffer, and no more
            assert await wait_for_close_code(slow) == websocket.POLICY

    play(act)


DEEP = "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "[]",
        "null",
        b"\xff\xfe",
        b"{}",
        "[" * 100_000,
        '{"type": ' + DEEP + "}",
        '{"type": "' + "x" * 100_000 + '"}',
        '{"type": {}}',
        '{"type": "response.create", "input": "\\ud800"}',
        '{"type": "response.create", "input": ' + "[" * 100_000 + "}",
        '{"type": "response.create", "stream_id": 3}',
        '{"type": "response.create", "stream_id": ""}',
        '{"type": "response.create", "stream_id": []}',
        '{"type": "response.create", "stream_id": "' + "x" * 257 + '"}',
        '{"type": "response.create", "generate": "no"}',
        '{"type": "response.create", "generate": false, "background": true}',
        '{"type": "response.create", "generate": false, "conversation": "conv_1", "input": "a"}',
        '{"type": "response.create", "generate": false, "max_output_tokens": {}, "input": "a"}',
        '{"type": "response.create", "generate": false, "max_output_tokens": -1, "input": "a"}',
        '{"type": "response.create", "input": "refused"}',
        '{"type": "response.cancel"}',
        '{"type": "response.cancel", "response_id": 3}',
        '{"type": "response.cancel", "response_id": {}}',
        '{"type": "response.cancel", "response_id": ""}',
        '{"type": "response.cancel", "response_id": "resp_of_another"}',
        '{"type": "response.cancel", "stream_id": "absent"}',
        '{"type": "response.resume"}',
        '{"type": "response.resume", "response_id": ' + DEEP + "}",
        '{"type": "response.resume", "response_id": "resp_1", "starting_after": "x"}',
        '{"type": "response.resume", "response_id": "resp_1", "starting_after": true}',
        '{"type": "response.resume", "response_id": "resp_1", "starting_after": -1}',
        '{"type": "response.resume", "response_id": "resp_1", "starting_after": 1e400}',
        '{"type": "response.resume", "response_id": "resp_of_another"}',
    ],
)
def test_an_invalid_event_is_one_error(
    message: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await one.send(message)
            error = await hear(one)
            assert error["type"] == "error"
            assert 400 <= error["status"] < 500, error
            assert error["error"].keys() == {"type", "code", "message", "param"}
            assert len(error["message"]) < 1000
            await send_create_event(one, "hello")
            assert [(await hear(one))["type"] for _ in KINDS] == [*KINDS]

    play(act)
    assert not caplog.records


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_1", "input": "x"}, "steering_not_supported"),
        ({"previous_response_id": "resp_2", "input": "x"}, "response_not_found"),
        ({"previous_response_id": {}, "input": "x"}, "invalid_input"),
        ({"previous_response_id": "resp_1", "input": 3}, "invalid_input"),
        ({}, "invalid_input"),
    ],
)
def test_steering_is_refused(fields: dict[str, Any], code: str) -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await send_create_event(one, "wait")
            await hear(one)
            await one.send(json.dumps({"type": "response.steer", **fields}))
            failed = await hear(one)
            assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", code)

    play(act)


def test_a_defect_is_an_error_event_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await send_create_event(one, "broken")
            assert (await hear(one))["status"] == 500
            await send_create_event(one, "hello")
            assert [(await hear(one))["type"] for _ in KINDS] == [*KINDS]

    play(act)
    assert "a defect" in caplog.text


def test_many_streams_leave_nothing() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            for number in range(200):
                await send_create_event(one, "hello", stream_id=f"stream {number}")
                assert [(await hear(one))["type"] for _ in KINDS] == [*KINDS]
            (connection,) = websocket.opened
            assert not connection.runs
            assert len(connection.turns) <= 1

    play(act)


def test_runs_end_with_their_connection() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            for name in "ab":
                await send_create_event(one, "wait", stream_id=name)
                await hear(one)
            await send_create_event(one, "hello", stream_id="a")
        await wait_until(lambda: handler.closed == 2)
        assert len(handler.made) == 2

    play(act)


def test_a_response_that_is_cut_off_is_failed() -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            await send_create_event(one, "wait")
            begun = await hear(one)
            (arrival,) = gate.arrivals
            cut_off_request(arrival)
            last = await hear(one)
            assert (last["type"], last["sequence_number"]) == ("response.failed", 1)
            assert last["response"]["id"] == begun["response"]["id"]
            assert (last["response"]["status"], handler.closed) == ("failed", 1)

    play(act)


@pytest.mark.parametrize("text", ["refused", "broken", "fail"])
def test_response_that_a_failed_run_continued_is_forgotten(text: str) -> None:
    async def fetch_last_event(one: ClientConnection, text: str, **fields: Any) -> Any:
        """The last event."""
        await send_create_event(one, text, **fields)
        while (event := await hear(one))["type"] == "response.created":
            pass
        return event

    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            first = (await fetch_last_event(one, "hello"))["response"]["id"]
            for _ in range(2):  # what goes well may be continued again
                done = await fetch_last_event(one, "and then?", previous_response_id=first)
                assert done["type"] == "response.completed"
            failed = await fetch_last_event(one, text, previous_response_id=first)
            assert failed["type"] in {"error", "response.failed"}
            gone = await fetch_last_event(one, "hello", previous_response_id=first)
            assert gone["error"]["code"] == "previous_response_not_found"
            others = await fetch_last_event(
                one, "hello", previous_response_id=done["response"]["id"]
            )
            assert others["type"] == "response.completed"

    play(act)


@pytest.mark.parametrize("after", [None, 0])
@pytest.mark.parametrize("by", [{"stream_id": "a"}, {"response_id": BACKGROUND}])
def test_a_resumed_response_is_cancelled_itself(by: dict[str, str], after: int | None) -> None:
    async def act(client: Client, handler: Handler) -> None:
        async with client() as one:
            resume = {"type": "response.resume", "response_id": BACKGROUND, "stream_id": "a"}
            await one.send(json.dumps({**resume, "starting_after": after}))
            while (await hear(one))["type"] != "response.output_text.delta":
                pass
            await one.send(json.dumps({"type": "response.cancel", **by}))
            ended = await hear(one)
            assert handler.goes_on.is_set()
            assert (ended["type"], ended["sequence_number"]) == ("response.cancelled", 2)
            assert ended["response"]["id"] == BACKGROUND

    play(act)
