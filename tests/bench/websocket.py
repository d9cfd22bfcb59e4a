"""The Responses API on WebSockets: the memory of many, and the first event against HTTP."""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import psutil
from websockets.asyncio.client import ClientConnection, connect

from .figure import Figure, Limit
from .responses import PATH, TURN
from .setting import HOST, Server, Setting

EACH = 200_000  # bytes of the API server for an open connection
LATER_S = 0.005  # the first event, than by HTTP
ASK = json.dumps({**TURN, "type": "response.create"})
LAST = frozenset({"response.completed", "response.incomplete"})


def measure(setting: Setting) -> Iterator[Figure]:
    yield from asyncio.run(measure_websockets(setting.text, short=setting.short))


async def measure_websockets(server: Server, *, short: bool) -> list[Figure]:
    count, rounds = (100, 10) if short else (1000, 200)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with AsyncExitStack() as stack:
        first = await open_websocket(server, stack)
        reader, writer = await asyncio.open_connection(HOST, server.port)
        for _ in range(5):
            await measure_websocket_event(first)
            await measure_http_event(server, reader, writer)
        none = memory(server)
        for _ in range(count):
            await send_refused_request(await open_websocket(server, stack))
        many = memory(server)
        by_socket, by_http = [], []
        for _ in range(rounds):
            by_socket.append(await measure_websocket_event(first))
            by_http.append(await measure_http_event(server, reader, writer))
        writer.close()
    name, rival = f"memory of the API server, {count} WebSockets", "none open"
    event, stream = "first event on a WebSocket", "a stream by HTTP"
    limit = Limit(3 if short else 1, LATER_S)
    of, instead = statistics.median(by_socket), statistics.median(by_http)
    return [
        Figure(name, "bytes", many, rival, none, Limit(1, count * EACH), 1),
        Figure(event, "s", of, stream, instead, limit, rounds),
    ]


def memory(server: Server) -> int:
    rss: int = psutil.Process(server.pid).memory_info().rss
    return rss


async def open_websocket(server: Server, stack: AsyncExitStack) -> ClientConnection:
    url = f"ws://{HOST}:{server.port}{PATH}"
    return await stack.enter_async_context(connect(url, open_timeout=60, close_timeout=60))


async def send_refused_request(socket: ClientConnection) -> None:
    """Have the server read and write on a connection."""
    await socket.send("{}")
    await socket.recv()


async def measure_websocket_event(socket: ClientConnection) -> float:
    """Seconds to the first event of a request."""
    began = time.perf_counter()
    await socket.send(ASK)
    event = json.loads(await socket.recv())
    taken = time.perf_counter() - began
    while event["type"] not in LAST:
        if event["type"] == "error":
            raise RuntimeError(f"refused: {event}")
        event = json.loads(await socket.recv())
    return taken


async def measure_http_event(
    server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> float:
    """Seconds to the first event of the same request by HTTP."""
    request = server.request(PATH, {**TURN, "stream": True})
    began = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\n\n")
    taken = time.perf_counter() - began
    if b" 200 " not in head[:20]:
        raise RuntimeError(f"refused: {head[:1000]!r}")
    await reader.readuntil(b"\r\n0\r\n\r\n")
    return taken
