"""`requests list` of a server that has 5,000 requests, and what its engine's steps feel of it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from vllmops.host.roles import Role
from vllmops.instances.servers import Server
from vllmops.requests import listing
from vllmops.rpc import agent

from ..support.waiting import until
from .figure import Figure, Limit, paired
from .setting import HOST, Setting
from .setting import Server as Bench

REQUESTS = 5000
PROMPTS = 500  # of an HTTP request, which may have 1,024
PATH = "/v1/completions"
WATCH_S = 2.0  # between two lists of ``--watch``
STUCK_S = 30.0


def measure(setting: Setting) -> Iterator[Figure]:
    with waiting(setting.text) as server:
        lists = [listed(server) for _ in range(3 if setting.short else 30)]
        limit = Limit(0, 1.0 if setting.short else 0.3)
        few = [pinged(server) for _ in lists]
        value, rival = sorted(lists)[len(lists) // 2], sorted(few)[len(few) // 2]
        name = f"requests list of {REQUESTS:,} requests"
        yield Figure(name, "s", value, "a question to its engine", rival, limit, len(lists))
        rounds = 2 if setting.short else 40
        pairs = [
            (step_s(server, watched=True), step_s(server, watched=False)) for _ in range(rounds)
        ]
    watched, alone = zip(*pairs, strict=True)
    name = "an engine's step, its requests listed every 2 s"
    yield paired(name, watched, "not listed", alone, 1.01, short=setting.short)


@contextlib.contextmanager
def waiting(bench: Bench) -> Iterator[Server]:
    """A server with that many requests: the prompts of a few HTTP requests."""
    server = Server(name=None, processes=bench.processes())
    body = {"model": "demo-text", "prompt": [[1, 2, 3]] * PROMPTS, "max_tokens": 2000}
    asked = bench.request(PATH, {**body, "ignore_eos": True})
    with contextlib.ExitStack() as stack:
        for _ in range(REQUESTS // PROMPTS):
            connection = stack.enter_context(socket.create_connection((HOST, bench.port)))
            connection.sendall(asked)
        until(lambda: len(listing.take(server, STUCK_S).rows) >= REQUESTS, 120)
        yield server
    until(lambda: not listing.take(server, STUCK_S).rows, 120)


def listed(server: Server) -> float:
    """Seconds that a list takes."""
    began = time.perf_counter()
    assert len(listing.take(server, STUCK_S).rows) >= REQUESTS - 100
    return time.perf_counter() - began


def pinged(server: Server) -> float:
    """Seconds that the engine takes to answer the shortest question."""
    began = time.perf_counter()
    steps(server)
    return time.perf_counter() - began


def steps(server: Server) -> int:
    """The engine's steps so far."""
    (engine,) = server.of(Role.ENGINE)
    return agent.reach(engine).engine().current_step or 0


def step_s(server: Server, *, watched: bool) -> float:
    """Seconds that a step takes, over the time between two lists."""
    began, before = time.perf_counter(), steps(server)
    if watched:
        listing.take(server, STUCK_S)
    time.sleep(max(0.0, began + WATCH_S - time.perf_counter()))
    return (time.perf_counter() - began) / (steps(server) - before)
