"""Counts the requests in flight, and refuses new requests while the server drains."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from types import ModuleType
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

RETRY_AFTER_S = 5
POLL_S = 0.01
BODY = b'{"error":{"message":"the server is draining","type":"unavailable","code":503}}'
STREAM = b"text/event-stream"
MARK = "vllmops.counted"
EXTENSION = "websocket.http.response"  # of ASGI: an answer to a WebSocket that is not accepted
# vLLM's routes that stop an engine until somebody calls another one.
PAUSES = frozenset({"/pause", "/sleep"})
# Probes and scrapes: a drain does not wait for them.
UNCOUNTED = frozenset({"/health", "/ping", "/metrics"})
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


class Arrival:
    """A request in flight.

    Args:
        arrived_at: when it arrived, monotonic, in seconds.
        rendering: whether it has not reached the engine yet.
        scope: of ASGI; None if unknown.
        task: that answers it; None if unknown.
        answer: the message with which its answer began; None before.
        cut: whether nothing else that the application says reaches the client.
        make_last_event: makes what its stream ends with where it is cut; None for vLLM's error.
    """

    __slots__ = (
        "answer",
        "arrived_at",
        "cut",
        "make_last_event",
        "rendering",
        "scope",
        "task",
    )

    def __init__(self, arrived_at: float, *, rendering: bool, scope: Scope | None = None) -> None:
        self.arrived_at = arrived_at
        self.rendering = rendering
        self.scope = scope
        self.task: asyncio.Task[Any] | None = None
        self.answer: Message | None = None
        self.cut = False
        self.make_last_event: Callable[[], bytes] | None = None

    @property
    def has_known_age(self) -> bool:
        """Whether its age is known."""
        return self.arrived_at < math.inf

    @property
    def route(self) -> str | None:
        """Its method and path; None if unknown."""
        scope = self.scope
        return f"{scope.get('method', 'WebSocket')} {scope['path']}" if scope else None

    @property
    def api_key(self) -> str:
        """The API key that it came with; empty without one."""
        headers = dict(self.scope["headers"] if self.scope else ())
        return str(headers.get(b"authorization", b"").partition(b" ")[2], "latin-1")


@dataclass
class Gate:
    """The requests in flight; only the event loop's thread changes them, so they need no lock.

    Args:
        arrivals: requests in flight.
        started_requests: requests so far.
        draining: whether new requests are refused until an operator resumes the server.
        rerun: whether the server is about to start again, and then runs its background responses.
        leaving: whether each answer asks its client for a new connection: another process takes it.
        holds: how many callers of `refuse_requests` refuse new requests for a while.
        ending: ends background responses, from another thread; None where there are none.
        installed: whether requests are counted.
        pause: the last HTTP request that stopped the engine; None without one.
    """

    arrivals: set[Arrival] = field(default_factory=set)
    started_requests: int = 0
    draining: bool = False
    rerun: bool = False
    leaving: bool = False
    holds: int = 0
    ending: Callable[[], Future[None]] | None = None
    installed: bool = False
    pause: Arrival | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused."""
        return self.draining or self.holds > 0

    @contextmanager
    def refuse_requests(self) -> Iterator[None]:
        """Refuse new requests for a while; several callers may do so at the same time."""
        with self.lock:
            self.holds += 1
        try:
            yield
        finally:
            with self.lock:
                self.holds -= 1

    def cut_off_requests(self, timeout_s: float) -> bool:
        """Answer every request in flight with 503, from another thread; whether that was done.

        Background responses end, too. A stream that has begun ends with an error event, or with the
        one that was set for it.

        Args:
            timeout_s: seconds to wait for the event loop.
        """
        until = monotonic() + timeout_s
        if self.ending is not None:
            with suppress(Exception):  # the loop is closed or blocked, or the store is down
                self.ending().result(timeout_s)
        for arrival in list(self.arrivals):
            if arrival.task is not None:
                with suppress(RuntimeError):  # the loop is closed
                    arrival.task.get_loop().call_soon_threadsafe(cut_off_request, arrival)
        while self.arrivals and monotonic() < until:
            time.sleep(POLL_S)
        return not self.arrivals

    @property
    def in_flight(self) -> int:
        """How many requests are in flight."""
        return len(self.arrivals)

    @property
    def rendering_requests(self) -> set[Arrival]:
        """Requests that have not reached the engine; always including WebSockets."""
        return {arrival for arrival in list(self.arrivals) if arrival.rendering}

    def mark_reached_engine(self) -> Arrival | None:
        """Note that the current HTTP request has reached the engine; returns it."""
        if arrival := _current.get():
            arrival.rendering = False
        return arrival

    def set_last_event(self, make: Callable[[], bytes]) -> None:
        """Note what the stream of the current HTTP request ends with where it is cut off."""
        if arrival := _current.get():
            arrival.make_last_event = make

    def measure_rendering_s(self, now: float) -> float:
        """Seconds since the oldest HTTP request arrived that has not reached the engine."""
        return max(
            0.0, now - min((arrival.arrived_at for arrival in self.rendering_requests), default=now)
        )


gate = Gate()
_current: ContextVar[Arrival | None] = ContextVar("vllmops.request", default=None)


def hook_fastapi(module: ModuleType) -> None:
    """Wrap ``FastAPI.__call__`` in place; `module` is ``fastapi.applications``."""
    if gate.installed:
        return
    call = module.FastAPI.__call__

    @functools.wraps(call)
    async def __call__(self: Any, scope: Scope, receive: Any, send: Send) -> None:  # noqa: N807
        # Only the outermost app of a request counts: a mounted one gets a copy of the scope.
        if MARK in scope or scope["type"] == "lifespan":
            await call(self, scope, receive, send)
            return
        path = scope["path"]
        if root := getattr(self, "root_path", None):
            path = strip_root_path(path, root)
        if gate.is_closed and is_new_work(scope, path):
            await answer_unavailable(scope, send)
            return
        # On a WebSocket of responses each request counts, by `count_websocket_request`; an idle one
        # holds no drain.
        if path in UNCOUNTED or (scope["type"] == "websocket" and path == RESPONSES):
            await call(self, scope, receive, send)
            return
        scope[MARK] = True
        if scope["type"] == "http":
            arrival = Arrival(monotonic(), rendering=scope["method"] == "POST", scope=scope)
            _current.set(arrival)
            if path in PAUSES:
                gate.pause = arrival
        else:
            # How long a message on a WebSocket has waited is unknown.
            arrival = Arrival(math.inf, rendering=True, scope=scope)

        async def send_unless_cut(message: Message) -> None:
            if not arrival.cut:
                if gate.leaving and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                arrival.answer = arrival.answer or message
                await send(message)

        arrival.task = asyncio.current_task()
        gate.started_requests += 1
        gate.arrivals.add(arrival)
        try:
            await call(self, scope, receive, send_unless_cut)
        except BaseException:
            if not arrival.cut:
                raise
        finally:
            try:
                if arrival.cut:
                    with suppress(Exception):  # its answer is complete: only work after it was cut
                        await answer_cut_off_request(arrival, send)
            finally:
                gate.arrivals.discard(arrival)

    module.FastAPI.__call__ = __call__
    gate.installed = True


@contextmanager
def count_websocket_request(scope: Scope, *, rendering: bool) -> Iterator[Arrival]:
    """Count a request that came as a message on a WebSocket, and is answered by this task.

    Args:
        scope: of the same request by HTTP.
        rendering: whether it is for the engine.
    """
    arrival = Arrival(monotonic(), rendering=rendering, scope=scope)
    arrival.task = asyncio.current_task()
    _current.set(arrival)
    gate.started_requests += 1
    gate.arrivals.add(arrival)
    try:
        yield arrival
    finally:
        gate.arrivals.discard(arrival)


def cut_off_request(arrival: Arrival) -> None:
    """Have a request end now; on its event loop."""
    if arrival.task is not None and not arrival.cut:
        arrival.cut = True
        arrival.task.cancel()


async def answer_cut_off_request(arrival: Arrival, send: Send) -> None:
    """Tell a client that its request was cut off."""
    if arrival.task is not None:
        arrival.task.uncancel()
    if arrival.answer is None:
        await answer_unavailable(arrival.scope or {"type": "http"}, send)
    elif STREAM in dict(arrival.answer.get("headers", ())).get(b"content-type", b""):
        make = arrival.make_last_event
        last = make() if make else b"data: %b\n\n" % BODY
        await send({"type": "http.response.body", "body": last, "more_body": False})


def strip_root_path(path: str, root: str) -> str:
    """A path without vLLM's ``--root-path``, which a proxy may have left in it."""
    prefix = root.rstrip("/")
    return path[len(prefix) :] if path.startswith(f"{prefix}/") else path


def is_new_work(scope: Scope, path: str) -> bool:
    """Whether a request is for new work; a health check counts, so that no work is sent here.

    Who reads, deletes or cancels a response waits for work that was taken before; who reads or
    deletes a conversation may.

    Args:
        scope: of ASGI.
        path: of the request.
    """
    if scope["type"] != "http" or not path.startswith((RESPONSES, CONVERSATIONS)):
        return bool(path != "/metrics")
    return scope["method"] not in {"GET", "HEAD", "DELETE"} and not path.endswith("/cancel")


async def answer_unavailable(scope: Scope, send: Send) -> None:
    """Answer 503: the client should try another server, or this one later."""
    prefix = ""
    if scope["type"] == "websocket":
        # Closed before it is accepted, it would get 403: as if it were forbidden.
        if EXTENSION not in (scope.get("extensions") or ()):
            reason = "the server is draining"
            await send({"type": "websocket.close", "code": 1013, "reason": reason})
            return
        prefix = "websocket."
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(BODY)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": f"{prefix}http.response.start", "status": 503, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": BODY})
