"""Stored responses from servers that answer without end, too slowly, or with what nobody asked."""

import asyncio
import gzip
import itertools
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from vllmops.collect.http import vllm_client
from vllmops.collect.http.endpoint import Endpoint
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops_responses import client
from vllmops_responses.client import HttpResponseSource
from vllmops_responses.commands.responses import source_options
from vllmops_responses.commands.responses.source_options import (
    iterate_pages,
    retry_while_unavailable,
)
from vllmops_responses.store.backend import Response, ResponseQuery, StoreUnavailable

from ..support.waiting import until

Part = Iterator[bytes]
Hostile = Callable[[Callable[[], Part]], Endpoint]
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"type":"response.x","sequence_number":1}\n\n'
TIMEOUT_S = 60.0
SHORT_S = 0.4  # for what never comes to an end


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    """Starts a server that says to everybody what a function makes, part by part."""
    servers = []

    def start(answer: Callable[[], Part]) -> Endpoint:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def tell(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(65536)
                for part in answer():
                    connection.sendall(part)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=tell, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        return Endpoint(url, url)

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def query_source(
    place: Endpoint,
    question: Callable[[HttpResponseSource], Awaitable[Any]],
    timeout_s: float = TIMEOUT_S,
) -> Any:
    async def run_query() -> Any:
        async with HttpResponseSource(place, timeout_s=timeout_s) as server:
            return await question(server)

    return asyncio.run(run_query())


def refusal(
    place: Endpoint,
    question: Callable[[HttpResponseSource], Awaitable[Any]],
    timeout_s: float = TIMEOUT_S,
) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        query_source(place, question, timeout_s)
    return caught.value


def make_stored_response(status: str = "completed") -> Response:
    return Response(id="a", owner="", model="", status=status, created_at=0.0, body=b"{}")


def make_json_answer(content: Any) -> Part:
    text = json.dumps(content).encode()
    head = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(text)
    yield JSON + head + text


def endless(head: bytes, part: bytes, pause_s: float = 0.0) -> Callable[[], Part]:
    def answer() -> Part:
        yield head
        while True:
            yield part
            time.sleep(pause_s)

    return answer


QUESTIONS: dict[str, Callable[[HttpResponseSource], Awaitable[Any]]] = {
    "list": lambda server: server.list_responses(ResponseQuery()),
    "get": lambda server: server.get("a"),
    "items": lambda server: server.list_input_items(make_stored_response()),
    "events": lambda server: server.read_events(make_stored_response()),
    "cancel": lambda server: server.cancel("a"),
    "delete": lambda server: server.delete("a"),
}


@pytest.mark.parametrize("response_id", ["", ".", ".."])
def test_response_id_that_changes_the_path_is_unknown(hostile: Hostile, response_id: str) -> None:
    """The server has routes there, with other answers."""
    endpoint = hostile(lambda: iter([JSON, b"\r\n{}"]))

    async def expect_unknown_response() -> None:
        async with HttpResponseSource(endpoint, timeout_s=TIMEOUT_S) as server:
            with pytest.raises(VllmopsError) as caught:
                await server.get(response_id)
            assert caught.value.code == "responses.unknown"
            for change in (server.cancel, server.delete):
                assert (await change(response_id)).code == "responses.unknown"

    asyncio.run(expect_unknown_response())


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
def test_an_answer_without_end(
    hostile: Hostile, question: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "ANSWER_BYTES", 1 << 20)
    head = EVENTS if question is QUESTIONS["events"] else JSON + b"\r\n"
    error = refusal(hostile(endless(head, b"x" * 65536)), question)
    assert (error.code, error.exit_code) == ("responses.unreachable", ExitCode.NOT_FOUND)
    assert "more than 1 MiB" in error.message


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx: ", JSON + b"\r\n"])
def test_an_answer_that_trickles_in(
    hostile: Hostile, question: Any, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "GRACE_S", 0.05)
    error = refusal(hostile(endless(head, b"x", 0.05)), question, SHORT_S)
    assert (error.code, error.exit_code) == ("responses.timeout", ExitCode.TIMED_OUT)


def test_events_that_trickle_in(hostile: Hostile) -> None:
    place = hostile(endless(EVENTS, EVENT, 0.05))
    assert refusal(place, QUESTIONS["events"], SHORT_S).code == "responses.timeout"
    # Some have come by then, unless this machine was busy.
    until(
        lambda: query_source(
            place, lambda server: server.read_events(make_stored_response("in_progress")), 3.0
        )
    )


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, gzip", b"br"])
def test_a_compressed_answer_is_not_unpacked(hostile: Hostile, coding: bytes) -> None:
    head = JSON + b"Content-Encoding: " + coding + b"\r\n\r\n"
    content = gzip.compress(b" " * 1000)
    error = refusal(hostile(lambda: iter([head + content])), QUESTIONS["list"])
    assert "compressed" in error.message


@pytest.mark.parametrize("charset", ["rot13", "idna", "\udcff"])
def test_an_answer_in_another_charset(hostile: Hostile, charset: str) -> None:
    head = b"HTTP/1.1 500 x\r\nContent-Type: text/plain; charset="
    words = head + charset.encode(errors="surrogateescape") + b"\r\n\r\nwoe"
    assert "woe" in refusal(hostile(lambda: iter([words])), QUESTIONS["list"]).message


def make_response_page(number: int, **more: Any) -> dict[str, Any]:
    entry = {"id": f"resp_{number}", "status": "completed", "created_at": 1}
    return {"object": "list", "data": [entry], "has_more": True, "last_id": entry["id"], **more}


@pytest.mark.parametrize("new", [True, False])
def test_lists_without_end(hostile: Hostile, new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGES", 5)
    monkeypatch.setattr(source_options, "PAGES", 5)
    numbers = itertools.count()
    place = hostile(lambda: make_json_answer(make_response_page(next(numbers) if new else 1)))

    async def read_all_pages(server: HttpResponseSource) -> None:
        async for _ in iterate_pages(server, ResponseQuery()):
            pass

    for question in (QUESTIONS["items"], read_all_pages):
        error = refusal(place, question)
        assert error.code == "responses.refused"
        assert "endlessly" in error.message


@pytest.mark.parametrize("after", ["999999999", "9" * 400, "²", "-1", "nan"])
def test_a_server_that_wants_to_be_asked_later(
    hostile: Hostile, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_options, "LONGEST_PAUSE_S", 0.01)
    head = f"HTTP/1.1 503 x\r\nRetry-After: {after}\r\nContent-Length: 0\r\n"
    # Else the client might ask again on the connection that is just being closed.
    head += "Connection: close\r\n\r\n"
    place = hostile(lambda: iter([head.encode("latin-1")]))
    with pytest.raises(StoreUnavailable):
        query_source(
            place,
            lambda server: retry_while_unavailable(lambda: server.list_responses(ResponseQuery())),
        )


def test_figures_of_a_server_without_responses(hostile: Hostile, vllmops: Any) -> None:
    place = hostile(lambda: make_json_answer({"object": "list", "data": []}))
    answer = vllmops("responses", "stats", "--json", "-t", place.url)
    assert (answer.code, answer.data["count"]) == (ExitCode.OK, 0)


@pytest.mark.parametrize("key", ["sk-ü", "sk-\udcff", "sk-a\nX: y", "sk-a\r"])
def test_a_key_that_is_no_header_is_not_sent(
    hostile: Hostile, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    place = hostile(lambda: iter([b"HTTP/1.1 401 x\r\nContent-Length: 0\r\n\r\n"]))
    error = refusal(place, QUESTIONS["list"])
    assert error.code == "responses.not-authorised"
    assert "no HTTP header" in error.message
    assert "sk-" not in error.message
