"""`requests list` of a server that has 5,000 requests, and what its engine's steps feel of it."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from vllmops.doctor import history
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
EVERY_S = 1.0  # twice as often as ``--watch`` does
BESIDE_S, HALF_S = 0.4, 0.5
STUCK_S = 30.0


def measure(setting: Setting) -> Iterator[Figure]:
    with waiting(setting.text) as server:
        lists = [listed(server) for _ in range(3 if setting.short else 30)]
        limit = Limit(0, 1.0 if setting.short else 0.3)
        few = [pinged(server) for _ in lists]
        value, rival = sorted(lists)[len(lists) // 2], sorted(few)[len(few) // 2]
        name = f"requests list of {REQUESTS:,} requests"
        yield Figure(name, "s", value, "a question to its engine", rival, limit, len(lists))
        watched, alone = steps_s(server, 2 if setting.short else 300)
    name = f"an engine's step, its requests listed every {EVERY_S:g} s"
    yield paired(name, watched, "not listed", alone, 1.01, short=setting.short)


@contextlib.contextmanager
def waiting(bench: Bench) -> Iterator[Server]:
    """A server with that many requests: the prompts of a few HTTP requests."""
    server = Server(name=None, processes=bench.processes())
    body = {"model": "demo-text", "prompt": [[1, 2, 3]] * PROMPTS, "max_tokens": 4000}
    asked = bench.request(PATH, {**body, "ignore_eos": True})
    with contextlib.ExitStack() as stack:
        for _ in range(REQUESTS // PROMPTS):
            connection = stack.enter_context(socket.create_connection((HOST, bench.port)))
            connection.sendall(asked)
        until(lambda: len(listing.take(server, STUCK_S).rows) >= REQUESTS, 120)
        yield server
    until(lambda: not listing.take(server, STUCK_S).rows, 120)


def listed(server: Server, least: int = REQUESTS - 100) -> float:
    """Seconds that a list takes of no fewer requests."""
    began = time.perf_counter()
    assert len(listing.take(server, STUCK_S).rows) >= least
    return time.perf_counter() - began


def pinged(server: Server) -> float:
    """Seconds that the engine takes to answer the shortest question."""
    (engine,) = server.of(Role.ENGINE)
    began = time.perf_counter()
    agent.reach(engine).engine()
    return time.perf_counter() - began


def steps_s(server: Server, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds that a step takes with a list every `EVERY_S` seconds, and without, in pairs.

    A list can slow down only the steps beside it. So each round compares the `BESIDE_S` seconds
    from the begin of a list with as many where nothing is asked, and the rest of the time counts
    as equal: that keeps out the noise of the steps far from any list. The engine's own recording
    tells when its steps were.
    """
    order, began = random.Random(1), list[tuple[float, float]]()
    for _ in range(rounds):
        halves = [HALF_S * number for number in order.sample(range(2), 2)]
        at = time.time()
        began.append((at + halves[0], at + halves[1]))
        time.sleep(halves[0])
        took_s = listed(server, REQUESTS // 2)  # some end meanwhile
        if took_s > BESIDE_S:  # it would be longer than what it is compared with
            began.pop()
        time.sleep(max(at + 2 * HALF_S - time.time(), 0.0))
    time.sleep(1)
    (recording,) = history.of(server).recordings
    times = [step.began_at for step in recording.steps]
    counts = list(accumulate((step.steps for step in recording.steps), initial=0))[:-1]

    def step_s(at: float) -> float:
        first, last = np.interp((at, at + BESIDE_S), times, counts)
        return float(BESIDE_S / (last - first))

    beside = [(step_s(asked), step_s(left)) for asked, left in began]
    share = BESIDE_S / EVERY_S
    alone = [left for _, left in beside]
    return [share * asked + (1 - share) * left for asked, left in beside], alone
