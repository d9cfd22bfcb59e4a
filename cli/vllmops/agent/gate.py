"""Counts the requests in flight, and refuses new ones while the server drains."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

RETRY_AFTER_S = 5
MARK = "vllmops.counted"
# Probes and scrapes are not work: a drain need not wait for them.
UNCOUNTED = frozenset({"/health", "/ping", "/metrics"})


@dataclass(eq=False)
class Arrival:
    """An HTTP request that came at a moment, by the monotonic clock."""

    at: float = field(default_factory=time.monotonic)


@dataclass
class Gate:
    """The counters; changed on the event loop's thread alone, so they need no lock.

    Args:
        in_flight: HTTP requests being answered.
        started: HTTP requests so far.
        draining: whether new ones are refused.
        installed: whether anything is counted.
        rendering: those in flight that have not reached the engine, an `Arrival` each; a
            WebSocket's token, which is none, may bring more at any time and is always among them.
    """

    in_flight: int = 0
    started: int = 0
    draining: bool = False
    installed: bool = False
    rendering: set[object] = field(default_factory=set)

    def handed_over(self) -> None:
        """The HTTP request that this runs for has reached the engine."""
        self.rendering.discard(_current.get())

    def longest(self, now: float) -> float:
        """For how many seconds an HTTP request is on its way to the engine at most."""
        came = [each.at for each in list(self.rendering) if isinstance(each, Arrival)]
        return now - min(came, default=now)


gate = Gate()
_current: ContextVar[object] = ContextVar("vllmops.request", default=None)


def install(module: ModuleType) -> None:
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
        if gate.draining and path != "/metrics":
            await refuse(scope, send)
            return
        scope[MARK] = True
        counted = path not in UNCOUNTED
        http = scope["type"] == "http"
        token = Arrival() if http else object()
        if not http or scope.get("method") == "POST":
            gate.rendering.add(token)
        _current.set(token if http else None)
        gate.started += counted
        gate.in_flight += counted
        try:
            await call(self, scope, receive, send)
        finally:
            gate.in_flight -= counted
            gate.rendering.discard(token)

    module.FastAPI.__call__ = __call__
    gate.installed = True


async def refuse(scope: Scope, send: Send) -> None:
    """Answer 503: this server is going away, ask another, or this one later."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": "the server is draining"})
        return
    body = b'{"error":{"message":"the server is draining","type":"unavailable","code":503}}'
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
