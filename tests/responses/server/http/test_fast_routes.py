"""Routes that bypass FastAPI's parameters: what they take, what goes FastAPI's way, who leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import pytest
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError

from vllmops_responses.server.http.fast_routes import (
    PATIENCE_S,
    DirectRoute,
    Handler,
    cancel_on_disconnect,
    describe_validation_errors,
    make_error_response,
)

HEADERS = {"content-type": "application/json"}


class Asked(BaseModel):
    text: str
    count: int = 1


async def require_json(raw_request: Request) -> None:
    if not raw_request.headers.get("content-type", "").startswith("application/json"):
        raise RequestValidationError(errors=["no JSON"])


def make_app_with_route(route: type[APIRoute]) -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=route)

    @router.post("/one/{name}", dependencies=[Depends(require_json)])
    async def echo_request(name: str, request: Asked, raw_request: Request) -> Response:
        """One."""
        body = json.loads(await raw_request.body())
        return JSONResponse([name, request.text, request.count, body])

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_request(_: Request, error: RequestValidationError) -> Response:
        return make_error_response(400, *describe_validation_errors(error.errors()))

    app.include_router(router)
    return app


async def send_request(app: FastAPI, **given: Any) -> tuple[int, str]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.request(**{"method": "POST", "url": "/one/x", **given})
        return answer.status_code, answer.text


@pytest.mark.parametrize(
    "given",
    [
        {"content": b'{"text": "a", "count": 2}', "headers": HEADERS},
        {"content": b'{"text": "a"}', "headers": {"content-type": "application/json; charset=x"}},
        {"content": b'{"text": "a", "other": 1}', "headers": HEADERS, "params": {"a": 1}},
        {"content": b'{"text": 5}', "headers": HEADERS},
        {"content": b'{"count": 5}', "headers": HEADERS},
        {"content": b'{"text": "a"', "headers": HEADERS},
        {"content": b"[1]", "headers": HEADERS},
        {"content": b'"\xff"', "headers": HEADERS},
        {"content": b"[" * 100_000, "headers": HEADERS},
        {"content": b"", "headers": HEADERS},
        {"content": b'{"text": "a"}', "headers": {"content-type": "text/plain"}},
        {"content": b'{"text": "a"}', "headers": {"content-type": "application/vnd.a+json"}},
        {"method": "GET"},
    ],
)
def test_answers_as_fastapi(given: dict[str, Any]) -> None:
    answers = [
        asyncio.run(send_request(make_app_with_route(route), **given))
        for route in (DirectRoute, APIRoute)
    ]
    if "parsing the body" in answers[0][1]:  # an error object like OpenAI's
        assert [status for status, _ in answers] == [400, 400]
    else:
        assert answers[0] == answers[1]


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Grammar(BaseModel):
    type: Literal["grammar"]
    rules: str


class Whole(BaseModel):
    input: str | list[Part | int]
    format: Part | Grammar | None = None
    tags: dict[str, str] = {}

    @model_validator(mode="after")
    def positive(self) -> Whole:
        if self.input == "no":
            raise ValueError("it says no")
        if self.input == "unknown":
            context = {"place": "input[3]", "what": "is no item"}
            raise PydanticCustomError("unknown", "{place} {what}", context)
        return self


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"input": "a", "tags": {"b": 5}}, ("tags.b", "Input should be a valid string")),
        ({"input": "a", "tags": {"str": 5}}, ("tags", "Input should be a valid string")),
        ({"input": [{"type": "text", "text": 5}]}, ("input[0].text", "a valid string")),
        ({"input": [1, {"type": "no"}]}, ("input[1].type", "should be 'text'")),
        ({"input": "a", "format": {"type": "grammar"}}, ("format.rules", "Field required")),
        ({"input": "a", "format": {"type": "no"}}, ("format.type", "should be 'text'")),
        ({}, ("input", "input: Field required")),
        ({"input": "no"}, (None, "it says no")),
        ({"input": "unknown"}, ("input[3]", "input[3] is no item")),
    ],
)
def test_validation_error_names_the_invalid_field(
    given: dict[str, Any], expected: tuple[str | None, str]
) -> None:
    for answer in (Whole, create_model("Body", body=(Whole, ...))):
        with pytest.raises(ValidationError) as raised:
            answer.model_validate(given if answer is Whole else {"body": given})
        message, param = describe_validation_errors(raised.value.errors())
        assert param == expected[0]
        assert expected[1] in message


class Client:
    """Sends a request, and leaves when it is told to."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.got: list[Any] = []
        self.asked = False

    async def receive(self) -> dict[str, Any]:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b'{"text": "a"}', "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def app_of(handler: Handler) -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=DirectRoute)

    async def call_handler(request: Asked, raw_request: Request) -> Response:
        return await handler(request, raw_request)

    router.post("/")(cancel_on_disconnect(wait_for_disconnect)(call_handler))
    app.include_router(router)
    return app


def test_a_client_that_leaves_ends_the_work() -> None:
    ended: list[str] = []

    async def slow(request: Asked, raw_request: Request) -> Response:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append(request.text)
            raise
        return Response()

    async def main() -> int:
        client = Client()
        task = asyncio.create_task(app_of(slow)(SCOPE, client.receive, client.send))
        await asyncio.sleep(PATIENCE_S / 2)
        client.leaves.set()
        await asyncio.wait_for(task, 60)
        return task.cancelling()

    assert asyncio.run(main()) == 0
    assert ended == ["a"]


def test_server_cancellation_is_not_taken_for_a_disconnect() -> None:
    async def slow(*_: object) -> Response:
        await asyncio.sleep(600)
        return Response()

    async def main(*, leaves: bool) -> None:
        client = Client()
        task = asyncio.create_task(app_of(slow)(SCOPE, client.receive, client.send))
        await asyncio.sleep(4 * PATIENCE_S)
        if leaves:
            client.leaves.set()
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)

    asyncio.run(main(leaves=False))
    asyncio.run(main(leaves=True))


def test_client_that_leaves_before_the_body_ends_gets_no_answer() -> None:
    client = Client()

    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def fail_if_called(*_: object) -> Response:
        raise AssertionError

    async def read_body(raw_request: Request) -> Response:
        raise AssertionError(await raw_request.body())

    for answer in (app_of(fail_if_called), DirectRoute("/", read_body, methods=["POST"]).handle):
        asyncio.run(answer(SCOPE, leave, client.send))
    assert client.got == []


@pytest.mark.parametrize("after_s", [0.0, 4 * PATIENCE_S])
def test_an_answer_ends_the_wait_for_the_client(after_s: float) -> None:
    async def quick(request: Asked, raw_request: Request) -> Response:
        await asyncio.sleep(after_s)
        return Response(request.text)

    async def main() -> Client:
        client = Client()
        await app_of(quick)(SCOPE, client.receive, client.send)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return client

    assert asyncio.run(main()).got[-1]["body"] == b"a"


@contextmanager
def uvicorn_of(app: FastAPI, **options: Any) -> Iterator[socket.socket]:
    """A connection to an app that uvicorn serves in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with socket.create_connection(listening.getsockname()) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def echo() -> FastAPI:
    app, router = FastAPI(), APIRouter(route_class=DirectRoute)

    @router.post("/")
    async def repeat_text(request: Asked, raw_request: Request) -> Response:
        if request.text == "stream":
            return StreamingResponse(iter([b"a", b"b"]))
        return Response(request.text * request.count)

    app.include_router(router)
    return app


def encode_request(text: str, count: int = 1, *headers: str) -> bytes:
    body = json.dumps({"text": text, "count": count})
    head = ["POST / HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", body]).encode()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_the_head_and_the_body_of_an_answer_leave_together(http: str, loop: str) -> None:
    with uvicorn_of(echo(), http=http, loop=loop) as client:
        for _ in range(3):
            client.sendall(encode_request("abc"))
            assert client.recv(10_000).endswith(b"\r\n\r\nabc")
        client.sendall(encode_request("stream"))
        streamed = b""
        while not streamed.endswith(b"0\r\n\r\n"):
            streamed += client.recv(10_000)
        client.sendall(encode_request("ab", 2_000_000))
        large = b""
        while not large.endswith(b"ab" * 2_000_000):
            large += client.recv(1 << 20)
        client.sendall(encode_request("abc") + encode_request("def", 1, "connection: close"))
        rest = b""
        while part := client.recv(10_000):
            rest += part
        heads = rest.replace(b"\r\n\r\nabc", b"|").replace(b"\r\n\r\ndef", b"|").split(b"|")
        assert [head[:15] for head in heads] == [b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b""]


def test_client_that_leaves_during_an_answer_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with uvicorn_of(echo()) as client:
        client.sendall(encode_request("ab", 20_000_000))
        assert client.recv(1000)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # with a reset
    assert caplog.records == []
