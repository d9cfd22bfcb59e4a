"""The WebSocket of the Responses API, of a real vLLM with two API servers.

Each connection may reach either server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from ..support.waiting import until
from .clients import MODEL, STOPPED_S
from .conftest import Live

KEY = {"Authorization": "Bearer one"}
# Runs until somebody ends it.
LONG: dict[str, Any] = {"max_output_tokens": 4000, "ignore_eos": True}
ENDS = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}


@pytest.fixture
def url(text_pair: Live) -> str:
    return text_pair.url.replace("http", "ws", 1) + "/v1/responses"


@pytest.fixture
def socket(url: str) -> Iterator[Connection]:
    with connect(url, additional_headers=KEY) as opened:
        yield opened


def send_create_event(socket: Connection, text: str = "hello", **fields: Any) -> None:
    event = {"type": "response.create", "model": MODEL, "input": text, "max_output_tokens": 8}
    socket.send(json.dumps({**event, **fields}))


def hear(socket: Connection) -> Any:
    return json.loads(socket.recv(60))


def events(socket: Connection) -> list[Any]:
    """The events of a response, or an error."""
    heard = [hear(socket)]
    while heard[-1]["type"] not in {*ENDS, "error"}:
        heard.append(hear(socket))
    return heard


def create_response(socket: Connection, **fields: Any) -> Any:
    send_create_event(socket, **fields)
    last = events(socket)[-1]
    assert last["type"] in ENDS, last
    return last["response"]


def count_running_requests(text_pair: Live) -> float:
    text = httpx.get(f"{text_pair.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_official_client(text_pair: Live) -> None:
    client: Any = openai.OpenAI(base_url=f"{text_pair.url}/v1", api_key="one")
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input="hello", max_output_tokens=8)
        deltas = []
        for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type in ENDS:
                break
        # Of a model with random weights: it may say nothing.
        assert event.response.output_text == "".join(deltas)
        assert event.response.usage.output_tokens


def test_is_stored(text_pair: Live, socket: Connection) -> None:
    made = create_response(socket)
    got = httpx.get(f"{text_pair.url}/v1/responses/{made['id']}", headers=KEY)
    assert got.json() == made
    assert (
        create_response(socket, previous_response_id=made["id"])["previous_response_id"]
        == made["id"]
    )


@pytest.mark.parametrize("key", ["", "Bearer wrong", "one", "Bearer onetwo"])
def test_wrong_key(url: str, key: str) -> None:
    with (
        pytest.raises(InvalidStatus) as error,
        connect(url, additional_headers={"Authorization": key}),
    ):
        pass
    assert error.value.response.status_code in {401, 403}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "",
        "[" * 9999,
        b"\xff",
        '{"type": "nothing"}',
        '{"type": "response.create"}',
        '{"type": "response.create", "stream_id": 3}',
        '{"type": "response.create", "model": "demo-text", "input": "x", "temperature": "warm"}',
        '{"type": "response.create", "model": "demo-text", "input": "x", "generate": "no"}',
        '{"type": "response.create", "model": "absent", "input": "x"}',
        '{"type": "response.create", "input": "x", "previous_response_id": "resp_absent"}',
        '{"type": "response.cancel"}',
        '{"type": "response.cancel", "response_id": "resp_absent"}',
        '{"type": "response.resume", "response_id": "resp_absent"}',
        '{"type": "response.resume", "response_id": 3, "starting_after": "x"}',
    ],
)
def test_an_invalid_event_leaves_the_connection(socket: Connection, text: str) -> None:
    socket.send(text)
    error = hear(socket)
    assert error["type"] == "error"
    assert 400 <= error["status"] < 500, error
    assert create_response(socket)["status"] in {
        "completed",
        "incomplete",
    }  # a random model may say nothing


def test_several_at_once(socket: Connection) -> None:
    send_create_event(socket, stream_id="a", **{**LONG, "max_output_tokens": 200})
    send_create_event(socket, stream_id="b")
    heard: dict[str, list[Any]] = {"a": [], "b": []}
    ended: list[str] = []
    while len(ended) < 2:
        event = hear(socket)
        heard[event["stream_id"]].append(event["sequence_number"])
        if event["type"] in ENDS:
            ended.append(event["stream_id"])
    assert ended == ["b", "a"]
    assert all(numbers == list(range(len(numbers))) for numbers in heard.values())


def test_requests_of_one_stream_are_answered_in_order(socket: Connection) -> None:
    send_create_event(socket, instructions="first")
    send_create_event(socket, instructions="second")
    answers = [events(socket)[-1]["response"]["instructions"] for _ in range(2)]
    assert answers == ["first", "second"]


def test_cancel(text_pair: Live, socket: Connection) -> None:
    send_create_event(socket, stream_id="a", **LONG)
    made = hear(socket)["response"]
    socket.send(json.dumps({"type": "response.cancel", "stream_id": "a"}))
    heard = events(socket)
    assert heard[-1]["type"] == "response.cancelled"
    assert heard[-1]["response"]["id"] == made["id"]
    assert [event["sequence_number"] for event in heard] == list(range(1, len(heard) + 1))
    until(lambda: count_running_requests(text_pair) == 0, STOPPED_S)
    assert create_response(socket, stream_id="a")["output"]


def test_a_closed_socket_ends_what_runs(text_pair: Live, url: str) -> None:
    with connect(url, additional_headers=KEY) as socket:
        for name in "ab":
            send_create_event(socket, stream_id=name, **LONG)
        until(lambda: count_running_requests(text_pair) == 2, STOPPED_S)
    until(lambda: count_running_requests(text_pair) == 0, STOPPED_S)


def test_a_background_response_goes_on_elsewhere(url: str) -> None:
    with connect(url, additional_headers=KEY) as socket:
        send_create_event(socket, background=True, **{**LONG, "max_output_tokens": 300})
        first = [hear(socket) for _ in range(4)]
    made = first[0]["response"]["id"]
    for _ in range(3):
        with connect(url, additional_headers=KEY) as socket:
            after = first[-1]["sequence_number"]
            event = {"type": "response.resume", "response_id": made, "starting_after": after}
            socket.send(json.dumps(event))
            rest = events(socket)
            assert rest[-1]["response"]["id"] == made
            numbers = [event["sequence_number"] for event in rest]
            assert numbers == list(range(after + 1, after + 1 + len(rest)))


def test_another_key_sees_nothing(url: str, socket: Connection) -> None:
    made = create_response(socket)
    with connect(url, additional_headers={"Authorization": "Bearer two"}) as other:
        send_create_event(other, previous_response_id=made["id"])
        assert hear(other)["code"] == "previous_response_not_found"


def test_a_connection_remembers_what_is_not_stored(
    text_pair: Live, url: str, socket: Connection
) -> None:
    made = create_response(socket, store=False, text="one two three four five")
    absent = httpx.get(f"{text_pair.url}/v1/responses/{made['id']}", headers=KEY)
    assert absent.status_code == 404
    later = create_response(socket, store=False, previous_response_id=made["id"])
    assert later["usage"]["input_tokens"] > made["usage"]["input_tokens"]
    third = create_response(socket, store=False, previous_response_id=later["id"])
    assert third["usage"]["input_tokens"] > later["usage"]["input_tokens"]
    send_create_event(socket, previous_response_id=made["id"], store=True)
    assert hear(socket)["param"] == "store"
    with connect(url, additional_headers=KEY) as other:
        send_create_event(other, store=False, previous_response_id=made["id"])
        assert hear(other)["code"] == "previous_response_not_found"


@pytest.mark.parametrize("store", [True, False])
def test_a_warm_up_has_no_output(socket: Connection, store: bool) -> None:
    send_create_event(socket, "one two three four", generate=False, store=store)
    heard = events(socket)
    made = heard[-1]["response"]
    assert [event["type"] for event in heard][-1] == "response.completed"
    assert not any("output" in event["type"] for event in heard)
    assert (made["output"], made["usage"]["output_tokens"]) == ([], 0)
    later = create_response(socket, store=store, previous_response_id=made["id"])
    assert later["output"]
    assert later["usage"]["input_tokens"] > made["usage"]["input_tokens"]


def test_steering_is_refused(socket: Connection) -> None:
    send_create_event(socket, stream_id="a", **LONG)
    made = hear(socket)["response"]["id"]
    for target, code in ((made, "steering_not_supported"), ("resp_absent", "response_not_found")):
        event = {"type": "response.steer", "previous_response_id": target, "input": "stop"}
        socket.send(json.dumps(event))
        failed = next(e for e in iter(lambda: hear(socket), None) if "steer" in e["type"])
        assert failed["error"]["code"] == code
        assert failed["steer"]["input"] == "stop"


def test_a_message_that_is_too_large(url: str) -> None:
    with connect(url, additional_headers=KEY) as socket:
        with suppress(ConnectionClosed):
            socket.send("x" * (17 * 1024 * 1024))
        with pytest.raises(ConnectionClosed) as error:
            socket.recv(60)
        assert error.value.rcvd
        assert error.value.rcvd.code == 1009


def test_a_drain_refuses_new_requests_and_waits_for_no_idle_socket(
    text_pair: Live, socket: Connection
) -> None:
    assert create_response(socket)
    drained = text_pair.cli("drain", text_pair.name, "--wait", "--timeout", "20")
    try:
        assert drained.code == 0, drained.err
        send_create_event(socket)
        assert hear(socket)["status"] == 503
    finally:
        text_pair.cli("resume", text_pair.name)
    assert create_response(socket)
