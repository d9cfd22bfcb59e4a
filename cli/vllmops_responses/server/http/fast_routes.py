"""Routes that answer plain requests without FastAPI's parameters, which take longer than a look-up.

What is not plain goes FastAPI's way, and so does what is wrong: it tells that as vLLM's routes do.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from .. import tracing

Handler = Callable[..., Awaitable[Response]]
JSON = "application/json"
# How long a client that has gone is not noticed: the task that listens takes 1.5 % of a short
# request's time.
PATIENCE_S = 0.05
# Where FastAPI finds what it validates; what a parameter's name looks like, and a type's, too.
PLACES, NAME = frozenset({"body", "query", "path"}), re.compile("[a-z_][a-z0-9_]*")
SCALARS = frozenset(
    {"str", "int", "float", "bool", "bytes", "list", "dict", "tuple", "set", "none"}
)


class DirectRoute(APIRoute):
    """A route that bypasses FastAPI where a request has only a path, or only a JSON body.

    What such a route depends on is not asked, so that may only be that its body is JSON.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return make_error_response(400, *describe_validation_errors(error.errors()))
            except HTTPException as error:  # FastAPI's, of a body that is no text
                return make_error_response(error.status_code, str(error.detail))

        return handle_request

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # nobody reads an answer
            await tracing.answer_in_span(self.path, self.answer_request, scope, receive, send)

    async def answer_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        plain = not scope["query_string"] and scope["method"] in (self.methods or ())
        if (self.body_field or self.dependencies) and request.headers.get("content-type") != JSON:
            plain = False
        if not plain:
            await super().handle(scope, receive, send)
            return
        given: dict[str, Any] = {}
        if self.body_field is not None:
            body = await request.body()
            if (parsed := self.parse_body(body)) is None:
                await super().handle(scope, replay_body(body, receive), send)
                return
            given = parsed
        answer = await self.endpoint(raw_request=request, **given, **scope["path_params"])
        with (
            nullcontext()
            if isinstance(answer, StreamingResponse)
            else buffer_response_writes(receive)
        ):
            await answer(scope, receive, send)

    def parse_body(self, body: bytes) -> dict[str, Any] | None:
        """A body as the endpoint takes it; None where there is something wrong with it."""
        (parameter,) = self.dependant.body_params
        model = cast(type[BaseModel], parameter.field_info.annotation)
        try:
            return {parameter.name: model.model_validate(json.loads(body))}
        except Exception:
            return None


class BufferedTransport:
    """Stands in for a transport: what is written waits until all of it is there."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def close(self) -> None:
        self.flush()
        self.transport.close()

    def flush(self) -> None:
        if self.parts and not self.transport.is_closing():
            self.transport.write(b"".join(self.parts))
        self.parts.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


@contextmanager
def buffer_response_writes(receive: Receive) -> Iterator[None]:
    """Have the head and the body of an answer leave together.

    uvicorn writes one after the other: two packets, of which each wakes the client. With another
    server, or where a middleware of the user's stands between, it stays so.

    Args:
        receive: of the request; uvicorn's is a method of what has the connection.
    """
    cycle: Any = getattr(receive, "__self__", None)
    if not type(cycle).__module__.startswith("uvicorn.") or not hasattr(cycle, "transport"):
        yield
        return
    transport = cycle.transport
    held = cycle.transport = BufferedTransport(transport)
    try:
        yield
    finally:
        cycle.transport = transport
        held.flush()


def replay_body(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was received once more, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_message() -> Message:
        return messages.pop() if messages else await receive()

    return receive_message


def cancel_on_disconnect(
    listen: Callable[[Request], Awaitable[None]],
) -> Callable[[Handler], Handler]:
    """Have a handler cancelled once its client has gone.

    As vLLM's ``with_cancellation`` does, with one task less for each request, and two less for
    those that are answered before `PATIENCE_S` is over.

    Args:
        listen: ends once the client has gone.
    """

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def wrapper(*args: Any, raw_request: Request, **kwargs: Any) -> Response:
            task = asyncio.current_task()
            assert task
            listener: asyncio.Task[None] | None = None
            gone = False

            async def cancel_when_gone() -> None:
                nonlocal gone
                await listen(raw_request)
                gone = True
                task.cancel()

            def start_listener() -> None:
                nonlocal listener
                listener = asyncio.create_task(cancel_when_gone())

            timer = asyncio.get_running_loop().call_later(PATIENCE_S, start_listener)
            try:
                return await handler(*args, raw_request=raw_request, **kwargs)
            except asyncio.CancelledError:
                if not gone or task.cancelling() > 1:  # somebody else cancels it
                    raise
                return Response()  # nobody reads it
            finally:
                timer.cancel()
                if listener:
                    listener.cancel()
                if gone:
                    task.uncancel()

        return wrapper

    return decorate


def describe_validation_errors(errors: Sequence[Any]) -> tuple[str, str | None]:
    """What is wrong with a request, in words, and with which parameter.

    Args:
        errors: pydantic's, or vLLM's own texts. Of a value that may be of several types there is
            one for each, and the one that has got furthest tells most.
    """
    first = max(select_relevant_errors(errors), key=count_location_parts)
    if not isinstance(first, dict):
        return str(first), None
    more = first.get("ctx") or {}
    context = more.get("error")
    param = getattr(context, "parameter", None) or more.get("place")
    param = param or format_parameter_path(first["loc"])
    message = (
        first["msg"] if isinstance(context, Exception | None) else f"{first['msg']}: {context}"
    )
    named = param is None or message.startswith(param)
    return (message if named else f"{param}: {message}"), param


def select_relevant_errors(errors: Sequence[Any]) -> Sequence[Any]:
    """The errors of those types whose name the value has; all of them if it has nobody's name."""
    misnamed = [
        error for error in errors if count_location_parts(error) and is_type_mismatch(error)
    ]
    others = [error["loc"][:-1] for error in misnamed]
    found = [
        error
        for error in errors
        if count_location_parts(error)
        and not any(error["loc"][: len(other)] == other for other in others)
    ]
    named = max(map(count_location_parts, found), default=0) >= max(
        map(count_location_parts, misnamed), default=0
    )
    return found if found and named else errors


def is_type_mismatch(error: dict[str, Any]) -> bool:
    """Whether an error says that the value has the name of another type."""
    return (error["type"], *error["loc"][-1:]) == ("literal_error", "type")


def count_location_parts(error: Any) -> int:
    """How far into a value an error is; 0 for one of vLLM's own texts."""
    return len(error["loc"]) if isinstance(error, dict) else 0


def format_parameter_path(location: Sequence[str | int]) -> str | None:
    """The parameter that an error of pydantic's is about, and where in it; None if it is about all.

    Args:
        location: where pydantic has found it, which includes the types that it has tried.
    """
    path = ""
    for part in location[1:] if location[:1] and location[0] in PLACES else location:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        elif NAME.fullmatch(part) and part not in SCALARS:
            path += f".{part}" if path else part
    return path or None


def make_error_response(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> JSONResponse:
    """An error object like OpenAI's, as an answer."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    return JSONResponse({"error": error}, status)
