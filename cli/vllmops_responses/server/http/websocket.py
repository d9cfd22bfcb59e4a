"""The Responses API on a WebSocket: many requests on one connection, each answered by events.

Every request goes the way of POST /v1/responses, with the same store, owners and carriers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from vllmops.agent.hooks import vllm_objects
from vllmops.agent.hooks.request_gate import RESPONSES, count_websocket_request, gate
from vllmops.agent.log import log
from vllmops.support.errors import VllmopsError
from vllmops.support.numbers import format_count

from ...store.backend import StoreUnavailable
from ...store.settings import WebSocketLimits
from .. import wire_format
from ..conversations import socket_request
from ..conversations.socket_request import SocketRequest, UnstoredResponses
from ..stored_responses import StoredResponsesApi
from ..wire_format import ApiError, EncodedEvent

# A client that takes no event for this time is cut off, and its requests end.
STALL_S = 60.0
# After that, it has this time to take the code with which the connection closes.
CLOSE_S = 10.0
ANSWERED = frozenset({"response.completed", "response.incomplete"})
# Bytes of the requests that wait on all connections of a process.
WAITING_BYTES = 256 * 1024 * 1024
# Characters of a client's id.
LONGEST_ID = 256
# Of the handshake; they do not belong to each request.
HANDSHAKE = frozenset({b"connection", b"content-length", b"upgrade", b"x-request-id"})
LIBRARIES = ("websockets", "wsproto")
GOING_AWAY, POLICY, TOO_BIG, RESTARTING = 1001, 1008, 1009, 1012

# What sending and receiving raise where the client is gone.
GONE = (WebSocketDisconnect, OSError, RuntimeError)

# Makes the response that a request asks for, and gives its events.
Create = Callable[[dict[str, Any], Request], Awaitable[AsyncIterator[EncodedEvent]]]


class ClientEvent(msgspec.Struct):
    """The parts of a client's event that a connection reads; they may be of any type."""

    type: Any = None
    stream_id: Any = None
    response_id: Any = None
    starting_after: Any = None
    generate: Any = None
    background: Any = None
    conversation: Any = None
    max_output_tokens: Any = None


class ServerEvent(msgspec.Struct):
    """The parts of an event that a connection reads."""

    sequence_number: int = -1
    response: msgspec.Raw = msgspec.Raw(b"{}")


ASKED = msgspec.json.Decoder(ClientEvent)
NUMBERED = msgspec.json.Decoder(ServerEvent)


class WaitingRequests:
    """The requests of a process that wait for their turn, on all connections."""

    def __init__(self) -> None:
        self.bytes = 0

    def remove(self, run: SocketRequest) -> None:
        """Note that a request waits no more."""
        self.bytes -= run.size
        run.size = 0


waiting = WaitingRequests()


def report_missing_library() -> None:
    """Report it where uvicorn has no library for WebSockets, and so answers them as HTTP."""
    if not any(map(importlib.util.find_spec, LIBRARIES)):
        vllm_objects.report_problem(
            f"there is no WebSocket {RESPONSES}: the package websockets is not installed"
        )


def find_handshake_error(
    socket: WebSocket, keys: list[str], limits: WebSocketLimits
) -> tuple[int, str] | None:
    """Why a connection is refused, with the HTTP status; None if it is not.

    Args:
        socket: in its handshake.
        keys: the API keys; empty where none is required.
        limits: of the server.
    """
    scheme, _, given = socket.headers.get("authorization", "").partition(" ")
    known = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(known)):
        return 401, "Unauthorized"
    # A browser sends a page's WebSocket anywhere: CORS does not hold it back.
    origins = getattr(socket.app.state.args, "allowed_origins", ["*"])
    origin = socket.headers.get("origin")
    if origin and not {"*", origin} & set(origins) and not is_same_origin(socket, origin):
        return 403, "This origin is not allowed."
    if socket.app.state.openai_serving_responses is None:
        return 501, "The model does not support Responses API"
    if len(opened) >= limits.connections:
        return 503, f"{limits.connections} WebSockets are open on this server."
    return None


def is_same_origin(socket: WebSocket, origin: str) -> bool:
    """Whether a page's origin is the server itself."""
    try:
        return urlsplit(origin).netloc == socket.headers.get("host")
    except ValueError:
        return False


async def deny_handshake(socket: WebSocket, status: int, message: str) -> None:
    """Answer the handshake with an error; with 403 where the server can't choose the status."""
    with suppress(*GONE):
        if "websocket.http.response" in socket.scope.get("extensions", ()):
            await socket.send_denial_response(JSONResponse({"error": message}, status))
        else:
            await socket.close(POLICY, message)


class WebSocketConnection:
    """A WebSocket.

    Args:
        socket: not accepted yet.
        handler: the serving class's instance.
        owner: whose the connection is.
        create: makes a response; raises `ApiError` or `StoreUnavailable`.
        limits: of the server.
    """

    def __init__(
        self, socket: WebSocket, handler: Any, owner: str, create: Create, limits: WebSocketLimits
    ) -> None:
        self.socket = socket
        self.handler = handler
        self.stored_responses: StoredResponsesApi = handler.stored_responses
        self.owner = owner
        self.create = create
        self.limits = limits
        self.scope = make_request_scope(socket)
        self.memory = UnstoredResponses()
        self.runs: set[SocketRequest] = set()
        self.turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self.sending = asyncio.Lock()
        self.client_lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle_since = monotonic()

    async def serve(self) -> None:
        """Accept, and answer messages until either side closes; then what it runs ends.

        Responses in the background go on.
        """
        opened.add(self)
        try:
            await self.socket.accept()
            while (message := await self.receive_message()) is not None:
                await self.handle_message(message)
                del message  # it may be large, and the next one may be far away
        except GONE:
            return
        finally:
            tasks = [run.task for run in self.runs if run.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.memory.clear()
            if self.client_lost.done():
                await self.close(POLICY, f"no event was taken for {STALL_S:g} s")
            opened.discard(self)

    async def close(self, code: int, reason: str) -> None:
        """Close the connection, with or without the client: it may take nothing, or be gone."""
        with suppress(*GONE):
            async with asyncio.timeout(CLOSE_S):
                await self.socket.close(code, reason)

    async def receive_message(self) -> bytes | None:
        """The next message; None where the connection is over."""
        receiving = asyncio.ensure_future(self.socket.receive())
        try:
            while not receiving.done():
                if self.client_lost.done():
                    return None
                idle_s = 0.0 if self.runs else monotonic() - self.idle_since
                if idle_s >= self.limits.idle_s:
                    await self.close(GOING_AWAY, f"idle for {self.limits.idle_s:g} s")
                    return None
                left_s = self.limits.idle_s - idle_s
                either: set[asyncio.Future[Any]] = {receiving, self.client_lost}
                await asyncio.wait(either, timeout=left_s, return_when="FIRST_COMPLETED")
        finally:
            receiving.cancel()
        message = receiving.result()
        self.idle_since = monotonic()
        if message["type"] == "websocket.disconnect":
            return None
        data: bytes = (message.get("text") or "").encode() or message.get("bytes") or b""
        if len(data) > self.limits.message:
            await self.close(TOO_BIG, f"a message has {self.limits.message} bytes at most")
            return None
        return data

    async def handle_message(self, message: bytes) -> None:
        """Begin what an event of the client asks for; an invalid one is answered by an error."""
        stream_id = None
        try:
            event = parse_client_event(message)
            stream_id = validate_stream_id(event)
        except ApiError as error:
            await self.send_error(error, stream_id)
            return
        async with self.answer_errors(stream_id):
            match event.type:
                case "response.create":
                    self.start_response(event, message)
                case "response.resume":
                    self.resume_stream(event)
                case "response.cancel":
                    await self.cancel_response(event)
                case "response.steer":
                    await self.refuse_steer(parse_event_object(message))
                case kind:
                    raise ApiError(400, f"Unknown event: {repr(kind)[:LONGEST_ID]}.", "type")

    @asynccontextmanager
    async def answer_errors(self, stream_id: str | None) -> AsyncIterator[None]:
        """Tell the client of an error by an event; the connection stays open."""
        try:
            yield
        except ApiError as error:
            await self.send_error(error, stream_id)
        except StoreUnavailable as error:
            await self.send_error(ApiError(503, error.message), stream_id)
        except WebSocketDisconnect:
            raise
        except VllmopsError as error:
            log.error("vllmops: %s", error.message)
            await self.send_error(ApiError(500, error.message), stream_id)
        except Exception as error:
            why = self.handler.create_error_response(error).error
            if why.code >= 500:
                log.exception("vllmops: a request on a WebSocket failed: %r", error)
            await self.send_error(ApiError(why.code, why.message, why.param), stream_id)

    def start_response(self, event: ClientEvent, message: bytes) -> None:
        """Start a request.

        Raises:
            ApiError: it is invalid, too many run, or too many bytes wait.
        """
        if not isinstance(event.generate, bool | None):
            raise ApiError(400, "generate must be a boolean", "generate")
        generate, limit = event.generate is not False, event.max_output_tokens
        if not (generate or limit is None or (type(limit) is int and limit >= 1)):
            why = "max_output_tokens must be a number of tokens, 1 or more"
            raise ApiError(400, why, "max_output_tokens")
        if event.background and not generate:
            raise ApiError(400, "generate: false can't be used with background", "background")
        if event.conversation is not None and not generate:
            # It would add the input, and the request that it prepares would add that again.
            raise ApiError(400, "generate: false can't be used with conversation", "conversation")
        run = SocketRequest(
            event.stream_id,
            self.memory,
            generate=generate,
            limit=limit,
            size=len(message),
        )
        run.background = bool(event.background)
        self.start_task(run, self.stream_new_response(message, generate=generate))

    def resume_stream(self, event: ClientEvent) -> None:
        """Start to send the rest of a background stream.

        Raises:
            ApiError: the event is invalid, too many requests run, or too many bytes wait.
        """
        response_id, after = validate_id(event.response_id, "response_id"), event.starting_after
        if after is not None and (type(after) is not int or not 0 <= after < 2**53):
            raise ApiError(400, "starting_after must be a sequence number", "starting_after")
        run = SocketRequest(event.stream_id, self.memory, is_new=False)
        run.background, run.response = True, {"id": response_id}
        self.start_task(run, self.stream_resumed_response(response_id, after))

    def start_task(self, run: SocketRequest, frames: AsyncIterator[EncodedEvent]) -> None:
        """Have a task send the events of a run.

        Raises:
            ApiError: too many run, or too many bytes wait.
        """
        most = self.limits.requests
        if len(self.runs) >= most:
            message = f"{format_count(most, 'request')} at most can run or wait on a connection."
            raise ApiError(429, message, code="too_many_requests")
        if all(other.stream_id != run.stream_id for other in self.runs):
            run.size = 0
        elif sum(other.size for other in self.runs) + run.size > self.limits.message:
            # To read no more would hide a cancellation, the end of the connection, and the pongs.
            message = f"{self.limits.message} bytes of requests at most wait on a connection."
            raise ApiError(429, message, code="too_many_requests")
        elif waiting.bytes + run.size > WAITING_BYTES:
            message = "Too many bytes of requests wait on this server: send it again later."
            raise ApiError(429, message, code="too_many_requests")
        self.runs.add(run)
        waiting.bytes += run.size
        run.task = asyncio.create_task(self.process_request(run, frames))
        run.task.add_done_callback(lambda _: waiting.remove(run))  # it may not even have begun

    async def process_request(
        self, run: SocketRequest, frames: AsyncIterator[EncodedEvent]
    ) -> None:
        """Send the events of a run, after those of the runs before it on its stream."""
        socket_request.current.set(run)
        turn = self.turns.setdefault(run.stream_id, asyncio.Lock())
        try:
            async with turn:
                waiting.remove(run)
                with count_websocket_request(self.scope, rendering=run.is_new) as arrival:
                    try:
                        await self.relay_events(run, frames)
                    except asyncio.CancelledError:
                        task = asyncio.current_task()
                        if not (run.cancelled or arrival.cut) or task is None:
                            raise
                        task.uncancel()
                        if run.cancelled:
                            await self.send_cancellation(run)
                        else:
                            await self.send_cut(run)
        except asyncio.CancelledError:
            if not run.cancelled:  # it was still waiting for its turn, otherwise
                raise
            await self.send_cancellation(run)
        except WebSocketDisconnect:
            self.mark_lost()
        finally:
            self.runs.discard(run)
            self.idle_since = monotonic()
            if gate.leaving and not self.runs:
                await self.close(RESTARTING, "connect again: another process takes over")

    async def send_cut(self, run: SocketRequest) -> None:
        """Tell a client that a run was cut off, unless it goes on in the background."""
        message = "The server is draining."
        if run.response and not run.background:
            body = wire_format.encode_failed_response(run.response, message)
            event = wire_format.make_final_event("failed", run.number + 1, body)
            await self.send_event(run.stream_id, event)
        else:
            await self.send_error(ApiError(503, message), run.stream_id)

    async def send_cancellation(self, run: SocketRequest) -> None:
        """Tell a client that a run was cancelled, which may not have a response yet."""
        if run.response:
            await self.send_event(run.stream_id, make_cancelled_event(run.response, run.number + 1))
        else:
            message = "The request was cancelled before its response began."
            await self.send_error(ApiError(400, message, code="cancelled"), run.stream_id)

    async def relay_events(self, run: SocketRequest, frames: AsyncIterator[EncodedEvent]) -> None:
        """Send the events of a run, or the error that it ends with.

        As in OpenAI's API, what a run that fails continues is not remembered any more.
        """
        async with self.answer_errors(run.stream_id), aclosing(frames):  # type: ignore[type-var]
            async for frame in frames:
                if not run.generate and frame.type not in WITHOUT_OUTPUT:
                    continue
                seen = NUMBERED.decode(frame.data)
                run.number = seen.sequence_number
                if frame.type in BEGINNING and run.response is None:
                    run.response = msgspec.json.decode(seen.response)
                run.answered = frame.type in ANSWERED
                await self.send_event(run.stream_id, frame)
        if not run.answered:
            self.memory.forget_response(run.continues)

    async def stream_new_response(
        self, message: bytes, *, generate: bool
    ) -> AsyncIterator[EncodedEvent]:
        """The events of a new response.

        Args:
            message: the client's; it is not decoded before its turn, as that takes more memory.
            generate: whether output is wanted.

        Raises:
            ApiError: the request is invalid, or the server drains.
            StoreUnavailable: the store is down.
        """
        if gate.is_closed:
            raise ApiError(503, "The server is draining: connect again.", code="unavailable")
        given = {**parse_event_object(message), "stream": True}
        del message
        for name in ("type", "stream_id", "generate"):
            given.pop(name, None)
        if not generate:
            given["max_output_tokens"] = 1
        http = self.make_http_request(wire_format.ENCODE(given))
        with track_server_load(self.socket.app.state):
            async with aclosing(await self.create(given, http)) as frames:  # type: ignore[type-var]
                del given, http
                async for frame in frames:
                    yield frame

    async def stream_resumed_response(
        self, response_id: str, starting_after: int | None
    ) -> AsyncIterator[EncodedEvent]:
        """The events of a background response after a sequence number.

        Raises:
            ApiError: there is no such response, or no such number.
            StoreUnavailable: the store is down.
        """
        async with aclosing(
            await self.stored_responses.resume_stream(self.owner, response_id, starting_after)
        ) as frames:
            async for frame in frames:
                yield frame

    async def cancel_response(self, event: ClientEvent) -> None:
        """End a response: the named one, else what runs and waits on a stream.

        Raises:
            ApiError: there is none, or it is not the connection's owner's.
            StoreUnavailable: the store is down.
        """
        response_id = None
        if event.response_id is None:
            runs = [run for run in self.runs if run.stream_id == event.stream_id]
        else:
            response_id = validate_id(event.response_id, "response_id")
            runs = [run for run in self.runs if run.response_id == response_id]
        for run in runs:
            if run.background and run.response_id:
                await self.stored_responses.cancel(
                    self.owner, run.response_id
                )  # its last event follows
            elif run.task and not run.cancelled:
                run.cancelled = True
                run.task.cancel()
        if runs:
            return
        if response_id is None:
            raise ApiError(404, "No response runs on this stream.", "stream_id")
        body = await self.stored_responses.cancel(self.owner, response_id)
        await self.send_event(event.stream_id, wire_format.make_final_event("cancelled", 0, body))

    async def refuse_steer(self, event: dict[str, Any]) -> None:
        """Tell a client that the engine does not change the input of what runs."""
        response_id, given = event.get("previous_response_id"), event.get("input")
        run = next(
            (run for run in self.runs if response_id and run.response_id == response_id), None
        )
        if not (isinstance(response_id, str) and given and isinstance(given, str | list)):
            code, message = "invalid_input", "previous_response_id and input are required."
        elif run:
            code = "steering_not_supported"
            message = "vLLM can't steer a response: cancel it, or send the input as the next one."
        else:
            code, message = "response_not_found", "No such response runs on this connection."
        error = {"code": code, "message": message, "type": "invalid_request_error"}
        steer = {"previous_response_id": response_id or "", "input": given or ""}
        kind = "response.steer.failed"
        body = {"type": kind, "sequence_number": 0, "error": error, "steer": steer}
        await self.send_event(
            run.stream_id if run else None, EncodedEvent(kind, wire_format.ENCODE(body))
        )

    async def send_error(self, error: ApiError, stream_id: str | None) -> None:
        """Send an error event; the connection stays open."""
        code = error.code
        if code is None and error.status == 404 and error.param == "previous_response_id":
            code = "previous_response_not_found"
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        shown = {"code": code or str(error.status), "message": error.message, "param": error.param}
        # OpenAI's socket nests the error; the events of its streams, and its types, do not.
        nested = {"error": {"type": kind, **shown}}
        body = {"type": "error", "status": error.status, "sequence_number": 0, **shown, **nested}
        await self.send_event(stream_id, EncodedEvent("error", wire_format.ENCODE(body)))

    async def send_event(self, stream_id: str | None, frame: EncodedEvent) -> None:
        """Send an event, as soon as the client takes it.

        Raises:
            WebSocketDisconnect: the client is gone, or it has taken nothing for too long.
        """
        data = frame.data
        if stream_id is not None:
            data = b'%b,"stream_id":%b}' % (data[:-1], wire_format.ENCODE(stream_id))
        async with self.sending:
            if self.client_lost.done():
                raise WebSocketDisconnect(POLICY)
            try:
                async with asyncio.timeout(STALL_S):
                    await self.socket.send_text(data.decode())
            except (OSError, RuntimeError) as error:  # uvicorn has closed it
                if isinstance(error, TimeoutError):
                    log.warning("vllmops: a WebSocket client took no event for %g s", STALL_S)
                self.mark_lost()
                raise WebSocketDisconnect(POLICY) from error

    def mark_lost(self) -> None:
        """Note that the client takes nothing any more: the connection ends."""
        if not self.client_lost.done():
            self.client_lost.set_result(None)

    def make_http_request(self, body: bytes) -> Request:
        """A request of this connection, as if it had come by HTTP."""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        return Request({**self.scope, "state": dict(self.scope["state"])}, receive)


# The connections of this process.
opened: set[WebSocketConnection] = set()
# The events that say which response a stream is of.
BEGINNING = frozenset({"response.created", "response.queued", "response.in_progress"})
# The events of a request without output.
WITHOUT_OUTPUT = frozenset(
    {"error", "response.created", "response.in_progress", "response.completed", "response.failed"}
)


def make_request_scope(socket: WebSocket) -> dict[str, Any]:
    """The scope of a POST on a connection."""
    headers = [
        pair
        for pair in socket.scope["headers"]
        if pair[0] not in HANDSHAKE and not pair[0].startswith(b"sec-websocket")
    ]
    state = dict(socket.scope.get("state", {}))
    changed = {"type": "http", "method": "POST", "query_string": b"", "headers": headers}
    return {**socket.scope, **changed, "state": state}


@contextmanager
def track_server_load(state: Any) -> Iterator[None]:
    """Count a request in vLLM's server load, as its HTTP routes do."""
    tracked = getattr(state, "enable_server_load_tracking", False)
    if tracked:
        state.server_load_metrics = getattr(state, "server_load_metrics", 0) + 1
    try:
        yield
    finally:
        if tracked:
            state.server_load_metrics -= 1


def parse_client_event(message: bytes) -> ClientEvent:
    """An event of a client.

    Raises:
        ApiError: it is not a JSON object.
    """
    with translate_json_errors():
        return ASKED.decode(message)


def parse_event_object(message: bytes) -> dict[str, Any]:
    """All that a client's event has.

    Raises:
        ApiError: it is not a JSON object.
    """
    with translate_json_errors():
        return msgspec.json.decode(message, type=dict[str, Any])


@contextmanager
def translate_json_errors() -> Iterator[None]:
    """Refuse what is not a JSON object."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ApiError(
            400, f"The event is not a JSON object: {error}", code="invalid_json"
        ) from error


def validate_stream_id(event: ClientEvent) -> str | None:
    """The id of the stream that an event names.

    Raises:
        ApiError: it is not an id.
    """
    return None if event.stream_id is None else validate_id(event.stream_id, "stream_id")


def validate_id(identifier: Any, param: str) -> str:
    """An id that a client gives.

    Raises:
        ApiError: it is none.
    """
    if isinstance(identifier, str) and 0 < len(identifier) <= LONGEST_ID:
        return identifier
    raise ApiError(400, f"{param} must be a string of 1 to {LONGEST_ID} characters", param)


def make_cancelled_event(response: dict[str, Any], number: int) -> EncodedEvent:
    """The event that ends a response which its client cancelled."""
    return wire_format.make_final_event(
        "cancelled", number, wire_format.ENCODE({**response, "status": "cancelled"})
    )
