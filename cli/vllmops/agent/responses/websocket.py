"""The Responses API on a WebSocket: many requests on one connection, each answered by events.

Every request goes the way of POST /v1/responses, with the same store, owners and carriers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from ...errors import VllmopsError
from ...store.backend import Response
from ...store.store import StoreUnavailable
from .. import objects
from ..adapters import responses as adapter
from ..adapters.responses import ErrorResponse
from ..gate import RESPONSES, counted, gate
from ..log import log
from . import fields, wire
from .wire import Frame, Refused

# Requests of one connection at a time, running or waiting for their stream.
MOST = 64
# Without a message and without a running request, a connection is closed after this time.
IDLE_S = 900.0
# A client that takes no event for this time is cut off, and its requests end.
STALL_S = 60.0
# The conversations that a connection remembers without the store, and their size in bytes.
REMEMBERED = 16
REMEMBERED_BYTES = 16 * 1024 * 1024
STREAM_ID = 256
# Of the handshake; they do not belong to each request.
HANDSHAKE = frozenset({b"connection", b"content-length", b"upgrade", b"x-request-id"})
LIBRARIES = ("websockets", "wsproto")
POLICY, GOING_AWAY, RESTARTING = 1008, 1001, 1012


class Numbered(msgspec.Struct):
    """The parts of an event that a connection reads."""

    sequence_number: int = -1
    response: msgspec.Raw = msgspec.Raw(b"{}")


NUMBERED = msgspec.json.Decoder(Numbered)


class Memory:
    """The latest responses of a connection that are not in the store, each with its history."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Response]] = {}

    def keep(self, history: list[Response]) -> None:
        """Remember a response and the turns before it, unless they are too large.

        Args:
            history: oldest first, packed as the store packs them; the last one is the response.
        """
        self.histories[history[-1].id] = history
        while len(self.histories) > REMEMBERED or self.size > REMEMBERED_BYTES:
            del self.histories[next(iter(self.histories))]

    @property
    def size(self) -> int:
        """Bytes; a turn in several histories counts once."""
        turns = {turn.id: turn for history in self.histories.values() for turn in history}
        return sum(len(turn.body) + len(turn.input) for turn in turns.values())


class Run:
    """A request on a connection.

    Args:
        stream_id: the client's name for the stream of its events; None without one.
        memory: of the connection.
        new: whether it makes a response.
        generate: whether the model's output is wanted.
        limit: the tokens of output that it asks for at most; None if it does not say.
    """

    def __init__(
        self,
        stream_id: str | None,
        memory: Memory,
        *,
        new: bool = True,
        generate: bool = True,
        limit: int | None = None,
    ) -> None:
        self.stream_id = stream_id
        self.memory = memory
        self.new = new
        self.generate = generate
        self.limit = limit
        self.task: asyncio.Task[None] | None = None
        self.background = False
        self.cancelled = False
        # The number of the last event, and the response as the first one had it.
        self.number = -1
        self.response: dict[str, Any] | None = None

    @property
    def id(self) -> str | None:
        """The response's id; None before it has one."""
        return self.response["id"] if self.response else None


# The run whose request is being answered; None for a request by HTTP.
_run: ContextVar[Run | None] = ContextVar("vllmops.agent.responses.run", default=None)


def on_socket() -> bool:
    """Whether the current request came by a WebSocket, which remembers its answer."""
    return _run.get() is not None


def remembered(response_id: str) -> list[Response] | None:
    """The history that ends with a response, as the request's connection remembers it."""
    run = _run.get()
    return run.memory.histories.get(response_id) if run else None


def remember(history: list[Response]) -> None:
    """Have the request's connection remember a response that is not stored."""
    if run := _run.get():
        run.memory.keep(history)


def prepared(response: Any) -> None:
    """Take the output out of a response whose request wants none; vLLM generates one token."""
    run = _run.get()
    if run is None or run.generate:
        return
    fields.silence(response)
    if run.limit is not None:
        response.max_output_tokens = run.limit


def check_library() -> None:
    """Report it where uvicorn has no library for WebSockets, and so answers them as HTTP."""
    if not any(map(importlib.util.find_spec, LIBRARIES)):
        objects.report(
            f"there is no WebSocket {RESPONSES}: the package websockets is not installed"
        )


async def admit(socket: WebSocket) -> bool:
    """Accept a connection with a valid API key and origin; refuse it otherwise."""
    arguments = socket.app.state.args
    keys = [key for key in (arguments.api_key or [adapter.api_key()]) if key]
    scheme, _, given = socket.headers.get("authorization", "").partition(" ")
    known = [secrets.compare_digest(given.encode(), key.encode()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(known)):
        await deny(socket, 401, "Unauthorized")
        return False
    # A browser sends a page's WebSocket anywhere: CORS does not hold it back.
    origins = getattr(arguments, "allowed_origins", ["*"])
    origin = socket.headers.get("origin")
    foreign = origin and urlsplit(origin).netloc != socket.headers.get("host")
    if foreign and not {"*", origin} & set(origins):
        await deny(socket, 403, "This origin is not allowed.")
        return False
    if socket.app.state.openai_serving_responses is None:
        await deny(socket, 501, "The model does not support Responses API")
        return False
    await socket.accept()
    return True


async def deny(socket: WebSocket, status: int, message: str) -> None:
    """Answer the handshake with an error; with 403 where the server can't choose the status."""
    if "websocket.http.response" in socket.scope.get("extensions", ()):
        await socket.send_denial_response(JSONResponse({"error": message}, status))
    else:
        await socket.close(POLICY, message)


class Connection:
    """An open WebSocket.

    Args:
        socket: accepted.
        handler: the serving class's instance.
        owner: whose the connection is.
    """

    def __init__(self, socket: WebSocket, handler: Any, owner: str) -> None:
        self.socket = socket
        self.handler = handler
        self.owner = owner
        self.scope = request_scope(socket)
        self.memory = Memory()
        self.runs: set[Run] = set()
        self.turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self.sending = asyncio.Lock()
        self.stalled = asyncio.Event()

    async def serve(self) -> None:
        """Answer messages until either side closes; then what runs in the foreground ends."""
        stalled = asyncio.ensure_future(self.stalled.wait())
        try:
            while True:
                receiving = asyncio.ensure_future(self.socket.receive())
                try:
                    await asyncio.wait(
                        {receiving, stalled}, timeout=IDLE_S, return_when="FIRST_COMPLETED"
                    )
                finally:
                    if not receiving.done():
                        receiving.cancel()
                if self.stalled.is_set():
                    return
                if receiving.cancelled() or not receiving.done():
                    if self.runs:
                        continue
                    await self.socket.close(GOING_AWAY, f"idle for {IDLE_S:.0f} s")
                    return
                message = receiving.result()
                if message["type"] == "websocket.disconnect":
                    return
                await self.take(message.get("text") or message.get("bytes") or b"")
        except (WebSocketDisconnect, OSError, RuntimeError):
            return  # the client is gone, and uvicorn refuses to send
        finally:
            stalled.cancel()
            tasks = [run.task for run in self.runs if run.task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def take(self, message: str | bytes) -> None:
        """Begin what an event of the client asks for; an invalid one is answered by an error."""
        stream_id = None
        try:
            event = read(message)
            stream_id = named(event)
            match event.get("type"):
                case "response.create":
                    self.begin(event, stream_id)
                case "response.resume":
                    self.start(Run(stream_id, self.memory, new=False), self.resumed(event))
                case "response.cancel":
                    await self.cancel(event, stream_id)
                case "response.steer":
                    await self.refuse_steer(event)
                case kind:
                    raise Refused(400, f"Unknown event: {kind!r}.", "type")
        except Refused as error:
            await self.refuse(error, stream_id)
        except StoreUnavailable as error:
            await self.refuse(Refused(503, error.message), stream_id)
        except VllmopsError as error:
            log.error("vllmops: %s", error.message)
            await self.refuse(Refused(500, error.message), stream_id)

    def begin(self, event: dict[str, Any], stream_id: str | None) -> None:
        """Start a request.

        Raises:
            Refused: it is invalid, or too many run.
        """
        generate = event.pop("generate", True)
        if not isinstance(generate, bool | None):
            raise Refused(400, "generate must be a boolean", "generate")
        given = {**event, "stream": True}
        del given["type"]
        given.pop("stream_id", None)
        limit = given.get("max_output_tokens")
        if generate is False:
            if given.get("background"):
                raise Refused(400, "generate: false can't be used with background", "background")
            given["max_output_tokens"] = 1
        run = Run(stream_id, self.memory, generate=generate is not False, limit=limit)
        run.background = bool(given.get("background"))
        self.start(run, self.created(given))

    def start(self, run: Run, frames: AsyncIterator[Frame]) -> None:
        """Have a task send the events of a run.

        Raises:
            Refused: too many run.
        """
        if len(self.runs) >= MOST:
            raise Refused(429, f"{MOST} requests run on this connection.", code="too_many_requests")
        self.runs.add(run)
        run.task = asyncio.create_task(self.carry_out(run, frames))

    async def carry_out(self, run: Run, frames: AsyncIterator[Frame]) -> None:
        """Send the events of a run, after those of the runs before it on its stream."""
        _run.set(run)
        turn = self.turns.setdefault(run.stream_id, asyncio.Lock())
        try:
            async with turn:
                with counted(self.scope, rendering=run.new) as arrival:
                    try:
                        await self.relay(run, frames)
                    except asyncio.CancelledError:
                        task = asyncio.current_task()
                        if not (run.cancelled or arrival.cut) or task is None:
                            raise
                        task.uncancel()
                        if run.cancelled:
                            await self.send(run.stream_id, cancelled(run))
                        else:
                            await self.refuse(
                                Refused(503, "The server is draining."), run.stream_id
                            )
        except asyncio.CancelledError:
            if not run.cancelled:  # it was still waiting for its turn, otherwise
                raise
            await self.send(run.stream_id, cancelled(run))
        except (WebSocketDisconnect, OSError, RuntimeError):
            self.stalled.set()  # the client is gone
        finally:
            self.runs.discard(run)
            if gate.leaving and not self.runs:
                with suppress(Exception):
                    await self.socket.close(RESTARTING, "connect again: another process takes over")

    async def relay(self, run: Run, frames: AsyncIterator[Frame]) -> None:
        """Send the events of a run, or the error that it ends with."""
        try:
            async with aclosing(frames):  # type: ignore[type-var]
                async for frame in frames:
                    if not run.generate and frame.type not in WITHOUT_OUTPUT:
                        continue
                    seen = NUMBERED.decode(frame.data)
                    run.number = seen.sequence_number
                    if frame.type in BEGINNING and run.response is None:
                        run.response = msgspec.json.decode(seen.response)
                    await self.send(run.stream_id, frame)
        except Refused as error:
            await self.refuse(error, run.stream_id)
        except StoreUnavailable as error:
            await self.refuse(Refused(503, error.message), run.stream_id)
        except (WebSocketDisconnect, OSError):
            raise
        except Exception as error:
            why = self.handler.create_error_response(error).error
            if why.code >= 500:
                log.exception("vllmops: a request on a WebSocket failed: %r", error)
            await self.refuse(Refused(why.code, why.message, why.param), run.stream_id)

    async def created(self, given: dict[str, Any]) -> AsyncIterator[Frame]:
        """The events of a new response.

        Raises:
            Refused: the request is invalid, or the server drains.
            StoreUnavailable: the store is down.
        """
        if gate.closed:
            raise Refused(503, "The server is draining: connect again.", code="unavailable")
        try:
            request = adapter.ResponsesRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            param = ".".join(map(str, first["loc"][:1])) or None
            raise Refused(400, f"{param or 'The request'}: {first['msg']}", param) from error
        http = self.as_request(wire.ENCODE(given))
        with loaded(self.socket.app.state):
            answer = await self.handler.create(request, http)
            if isinstance(answer, ErrorResponse):
                why = answer.error
                raise Refused(why.code, why.message, why.param)
            async with aclosing(answer):
                async for frame in answer:
                    yield frame

    async def resumed(self, event: dict[str, Any]) -> AsyncIterator[Frame]:
        """The events of a background response after a sequence number.

        Raises:
            Refused: there is no such response, or no such number.
            StoreUnavailable: the store is down.
        """
        response_id, after = event.get("response_id"), event.get("starting_after")
        if not isinstance(response_id, str):
            raise Refused(400, "response_id must be a string", "response_id")
        if after is not None and (type(after) is not int or not 0 <= after < 2**53):
            raise Refused(400, "starting_after must be a sequence number", "starting_after")
        async with aclosing(await self.handler.resume(self.owner, response_id, after)) as frames:
            async for frame in frames:
                yield frame

    async def cancel(self, event: dict[str, Any], stream_id: str | None) -> None:
        """End a response: the named one, else all of a stream.

        Raises:
            Refused: there is none.
            StoreUnavailable: the store is down.
        """
        response_id = event.get("response_id")
        if response_id is None:
            runs = [run for run in self.runs if run.stream_id == stream_id]
        else:
            runs = [run for run in self.runs if run.id == response_id]
        for run in runs:
            if run.background and run.id:
                await self.handler.cancel(self.owner, run.id)  # its last event follows
            elif run.task and not run.cancelled:
                run.cancelled = True
                run.task.cancel()
        if runs:
            return
        if not isinstance(response_id, str):
            raise Refused(404, "No response runs on this stream.", "stream_id")
        body = await self.handler.cancel(self.owner, response_id)
        await self.send(stream_id, wire.terminal("cancelled", 0, body))

    async def refuse_steer(self, event: dict[str, Any]) -> None:
        """Tell a client that the engine does not change the input of what runs."""
        response_id = event.get("previous_response_id")
        run = next((run for run in self.runs if response_id and run.id == response_id), None)
        error = {
            "code": "steering_not_supported" if run else "response_not_found",
            "message": "vLLM can't steer a response: cancel it, or send the input as the next one."
            if run
            else "No such response runs on this connection.",
            "type": "invalid_request_error",
        }
        steer = {"previous_response_id": response_id, "input": event.get("input")}
        kind = "response.steer.failed"
        body = {"type": kind, "sequence_number": 0, "error": error, "steer": steer}
        await self.send(run.stream_id if run else None, Frame(kind, wire.ENCODE(body)))

    async def refuse(self, error: Refused, stream_id: str | None) -> None:
        """Send an error event; the connection stays open."""
        code = error.code
        if code is None and error.status == 404 and error.param == "previous_response_id":
            code = "previous_response_not_found"
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        shown = {"code": code or str(error.status), "message": error.message, "param": error.param}
        # OpenAI's socket nests the error; the events of its streams, and its types, do not.
        nested = {"error": {"type": kind, **shown}}
        body = {"type": "error", "status": error.status, "sequence_number": 0, **shown, **nested}
        await self.send(stream_id, Frame("error", wire.ENCODE(body)))

    async def send(self, stream_id: str | None, frame: Frame) -> None:
        """Send an event, as soon as the client takes it.

        Raises:
            WebSocketDisconnect: the client is gone, or it has taken nothing for too long.
        """
        data = frame.data
        if stream_id is not None:
            data = b'%b,"stream_id":%b}' % (data[:-1], wire.ENCODE(stream_id))
        async with self.sending:
            if self.stalled.is_set():
                raise WebSocketDisconnect(POLICY)
            try:
                async with asyncio.timeout(STALL_S):
                    await self.socket.send_text(data.decode())
            except (OSError, RuntimeError) as error:  # uvicorn has closed it
                if not isinstance(error, TimeoutError):
                    raise WebSocketDisconnect(POLICY) from error
                log.warning("vllmops: a WebSocket client took no event for %.0f s", STALL_S)
                self.stalled.set()
                raise WebSocketDisconnect(POLICY) from error

    def as_request(self, body: bytes) -> Request:
        """A request of this connection, as if it had come by HTTP."""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        return Request({**self.scope, "state": dict(self.scope["state"])}, receive)


# The events that say which response a stream is of.
BEGINNING = frozenset({"response.created", "response.queued", "response.in_progress"})
# The events of a request without output.
WITHOUT_OUTPUT = frozenset(
    {"error", "response.created", "response.in_progress", "response.completed", "response.failed"}
)


def request_scope(socket: WebSocket) -> dict[str, Any]:
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
def loaded(state: Any) -> Iterator[None]:
    """Count a request in vLLM's server load, as its HTTP routes do."""
    tracked = getattr(state, "enable_server_load_tracking", False)
    if tracked:
        state.server_load_metrics = getattr(state, "server_load_metrics", 0) + 1
    try:
        yield
    finally:
        if tracked:
            state.server_load_metrics -= 1


def read(message: str | bytes) -> dict[str, Any]:
    """An event of a client.

    Raises:
        Refused: it is not a JSON object.
    """
    try:
        return msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(
            400, f"The event is not a JSON object: {error}", code="invalid_json"
        ) from error


def named(event: dict[str, Any]) -> str | None:
    """The id of the stream that an event names.

    Raises:
        Refused: it is not an id.
    """
    stream_id = event.get("stream_id")
    if stream_id is None or (isinstance(stream_id, str) and 0 < len(stream_id) <= STREAM_ID):
        return stream_id
    message = f"stream_id must be a string of 1 to {STREAM_ID} characters"
    raise Refused(400, message, "stream_id")


def cancelled(run: Run) -> Frame:
    """The event that ends a run which its client cancelled."""
    response = {**(run.response or {"object": "response", "output": []}), "status": "cancelled"}
    return wire.terminal("cancelled", run.number + 1, wire.ENCODE(response))
