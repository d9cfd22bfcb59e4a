"""`requests list` of a server that has 5,000 requests, and what its engine's steps feel of it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import OK
from itertools import accumulate

import numpy as np
import psutil

from vllmops.collect.agents import agent_client
from vllmops.model.roles import Role
from vllmops.observe import step_recordings
from vllmops.observe.requests import listing
from vllmops.servers.discovery import Server

from ..support.waiting import until
from .figure import Figure, Limit, make_paired_figure
from .setting import HOST, Setting
from .setting import Server as Bench

REQUESTS = 5000
PROMPTS = 500  # of an HTTP request, which may have 1,024
PATH = "/v1/completions"
EVERY_S = 2.0  # as ``--watch`` does
STUCK_S = 30.0


def measure(setting: Setting) -> Iterator[Figure]:
    with queue_requests(setting.text) as server:
        lists = [measure_request_list(server) for _ in range(3 if setting.short else 30)]
        limit = Limit(0, 1.0 if setting.short else 0.3)
        few = [measure_engine_ping(server) for _ in lists]
        value, rival = sorted(lists)[len(lists) // 2], sorted(few)[len(few) // 2]
        name = f"requests list of {REQUESTS:,} requests"
        yield Figure(name, "s", value, "a question to its engine", rival, limit, len(lists))
        with pin_engine_to_own_core(server):
            for ask, beside_s, name in (
                (
                    measure_request_list,
                    0.4,
                    f"an engine's step, its requests listed every {EVERY_S:g} s",
                ),
                (
                    measure_requests_route,
                    0.1,
                    f"an engine's step, asked for its requests every {EVERY_S:g} s",
                ),
            ):
                rounds = 2 if setting.short else 300
                values, alone = steps_s(server, partial(ask, server), beside_s, rounds)
                yield make_paired_figure(
                    name, values, "not asked", alone, 1.01, short=setting.short
                )


@contextlib.contextmanager
def queue_requests(bench: Bench) -> Iterator[Server]:
    """A server with that many requests: the prompts of a few HTTP requests."""
    server = Server(name=None, processes=bench.processes())
    body = {"model": "demo-text", "prompt": [[1, 2, 3]] * PROMPTS, "max_tokens": 4000}
    wanted = bench.request(PATH, {**body, "ignore_eos": True})
    with contextlib.ExitStack() as stack:
        for _ in range(REQUESTS // PROMPTS):
            connection = stack.enter_context(socket.create_connection((HOST, bench.port)))
            connection.sendall(wanted)
        until(lambda: len(listing.list_requests(server, STUCK_S).rows) >= REQUESTS, 120)
        yield server
    until(lambda: not listing.list_requests(server, STUCK_S).rows, 120)


@contextlib.contextmanager
def pin_engine_to_own_core(server: Server) -> Iterator[None]:
    """The engine and its worker have a core of their own, as they do where servers serve.

    A list takes the time of other processes, too: of who asks, and of the API server. On a machine
    whose cores are all busy that delays an engine as any program would.
    """
    cores = os.sched_getaffinity(0)
    first = {min(cores)}
    rest = cores - first or cores
    before = {0: cores}  # this process
    for process in server.processes:
        own = process.role in {Role.ENGINE, Role.WORKER}
        for thread in psutil.Process(process.pid).threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                before[thread.id] = os.sched_getaffinity(thread.id)
                os.sched_setaffinity(thread.id, first if own else rest)
    os.sched_setaffinity(0, rest)
    try:
        yield
    finally:
        for thread_id, allowed in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread_id, allowed)


def measure_request_list(server: Server) -> float:
    """Seconds that a list takes of most of them: some end meanwhile."""
    began = time.perf_counter()
    assert len(listing.list_requests(server, STUCK_S).rows) >= REQUESTS // 2
    return time.perf_counter() - began


def measure_requests_route(server: Server) -> float:
    """Seconds that the engine takes to answer which requests it has."""
    (engine,) = server.select_processes(Role.ENGINE)
    began = time.perf_counter()
    status, _ = agent_client.open_agent(engine).send_request("GET", "/requests", None)
    assert status == OK
    return time.perf_counter() - began


def measure_engine_ping(server: Server) -> float:
    """Seconds that the engine takes to answer the shortest question."""
    (engine,) = server.select_processes(Role.ENGINE)
    began = time.perf_counter()
    agent_client.open_agent(engine).fetch_engine_state()
    return time.perf_counter() - began


def steps_s(
    server: Server, ask: Callable[[], float], beside_s: float, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds that a step takes with a question every `EVERY_S` seconds, and without, in pairs.

    A question can slow down only the steps beside it. So each round compares some time from its
    begin with as much where nothing is asked, and the rest counts as equal: that keeps out the
    noise of all other steps. The engine's own recording tells when its steps were.

    Args:
        server: whose engine works.
        ask: the question; gives the seconds it took.
        beside_s: the seconds to compare; a round whose question took longer does not count.
        rounds: pairs.
    """
    order, began = random.Random(1), list[tuple[float, float]]()
    half_s = 1.25 * beside_s
    for _ in range(4 * rounds):  # on a busy machine some come too late
        if len(began) == rounds:
            break
        first, second = (half_s * number for number in order.sample(range(2), 2))
        at = time.time()
        time.sleep(first)
        if ask() <= beside_s:
            began.append((at + first, at + second))
        time.sleep(max(at + 2 * half_s - time.time(), 0.0))
    time.sleep(1)
    (recording,) = step_recordings.collect_history(server).recordings
    times = [step.began_at for step in recording.steps]
    counts = list(accumulate((step.steps for step in recording.steps), initial=0))[:-1]

    def step_s(at: float) -> float:
        before, after = np.interp((at, at + beside_s), times, counts)
        return float(beside_s / (after - before))

    pairs = [(step_s(asked_at), step_s(left_at)) for asked_at, left_at in began]
    share = beside_s / EVERY_S
    alone = [left for _, left in pairs]
    return [share * beside + (1 - share) * left for beside, left in pairs], alone
