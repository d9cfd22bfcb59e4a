"""What the metrics cost: the time of a scrape against stock's, and what requests pay for them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from vllmops.collect.agents import agent_client
from vllmops.demo import DemoKind
from vllmops.metrics.collector import SHARE
from vllmops.model.environment import STORE
from vllmops.model.roles import ROLES, Role

from .agent import PATH, open_hook_switch
from .figure import Figure, Limit, interleave_measurements, make_paired_figure, ratio
from .setting import STOCK_STORE, Server, Setting

SCRAPE = "/metrics"
LOADS = {
    "/v1/completions": {"prompt": "The quick brown", "max_tokens": 4, "ignore_eos": True},
    "/v1/responses": {"input": "The quick brown", "max_output_tokens": 4},  # the store has metrics
}
REQUESTS, CONNECTIONS = 32, 4
EACH = 8  # scrapes in one measurement
INTERVAL_S = 5.0
GATHERED_S = 12.0
TOKENS = 16
SHOWN, STOCK = "all metrics", "stock's"


def measure(setting: Setting) -> Iterator[Figure]:
    if setting.short:
        # First, for it would wait for the pause of what the others' scrapes have begun.
        yield requests(setting, setting.text)
        yield from compare_scrapes(setting, DemoKind.TEXT, setting.text, setting.stock)
        yield measure_agent_threads(setting, setting.text)
        return
    with pair(setting) as (ours, stock):
        yield from compare_scrapes(setting, DemoKind.VISION, ours, stock)
        yield measure_agent_threads(setting, ours)
    yield requests(setting, setting.text)
    with pair(setting, "--api-server-count", "2") as (ours, stock):
        yield from compare_scrapes(setting, DemoKind.VISION, ours, stock, ", two API servers")


@contextlib.contextmanager
def pair(setting: Setting, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """A server with the agent and one without; both store responses in memory."""
    with (
        setting.server(DemoKind.VISION, *arguments, environment={STORE: "memory://"}) as ours,
        setting.server(DemoKind.VISION, *arguments, agent=False, environment=STOCK_STORE) as stock,
    ):
        yield ours, stock


def compare_scrapes(
    setting: Setting, kind: DemoKind, ours: Server, stock: Server, shape: str = ""
) -> Iterator[Figure]:
    """Scrapes of two servers by turns, once both have all their metrics."""
    for server in (ours, stock):
        for path, body in LOADS.items():
            request = server.request(path, {**body, "model": f"demo-{kind.value}"})
            server.load([request] * REQUESTS, CONNECTIONS)
        server.load([server.request(SCRAPE)], 1)
    time.sleep(GATHERED_S)

    def seconds(server: Server) -> float:
        return min(server.load([server.request(SCRAPE)] * EACH, 1))

    rounds = 10 if setting.short else 60
    values = interleave_measurements(
        rounds, {"ours": lambda: seconds(ours), "stock": lambda: seconds(stock)}
    )
    yield make_paired_figure(
        f"a scrape of /metrics with the agent's metrics{shape}",
        values["ours"],
        "a scrape of stock's",
        values["stock"],
        1.1,
        short=setting.short,
    )


def measure_agent_threads(setting: Setting, server: Server) -> Figure:
    """The CPU time of all agents of a server that is scraped, beyond that of one that is not."""
    lasts_s = 5.0 if setting.short else 60.0

    def measure_cores(scraped: bool) -> float:
        before, began = cpu_s(server), time.monotonic()
        while time.monotonic() - began < lasts_s:
            if scraped:
                server.load([server.request(SCRAPE)], 1)
            time.sleep(INTERVAL_S)
        return (cpu_s(server) - before) / (time.monotonic() - began)

    return Figure(
        "the agents' threads while somebody scrapes, beyond before",
        "cores",
        measure_cores(True) - measure_cores(False),
        "one",
        1.0,
        # Five seconds beside other benchmarks tell no less.
        Limit(0.1) if setting.short else Limit(0.005),
        1,
    )


def requests(setting: Setting, server: Server) -> Figure:
    """What the agent's metrics take of the processors from requests while somebody scrapes.

    A server that is busy with requests answers as many fewer as it has less time for them. That is
    no wait: those are in the time per request of `agent`, and in the time of a scrape. A batch is
    short and has a scrape and a look of its own, so that what they take stands out from the noise;
    in fact there is one of each in `INTERVAL_S`, or rarer. On a busy machine the same work takes
    twice the CPU time, and each batch another.
    """
    rounds, batch_s = (4, 0.2) if setting.short else (120, 0.5)
    request = server.request(PATH, {**LOADS[PATH], "model": "demo-text", "max_tokens": TOKENS})
    began = server.cpu_s(*ROLES)
    server.load([request] * REQUESTS, CONNECTIONS)
    batch = [request] * math.ceil(REQUESTS * batch_s / (server.cpu_s(*ROLES) - began))
    api = defaultdict[str, list[float]](list)
    with open_hook_switch(setting, server) as switch:

        def measure_batch_cpu(name: str) -> float:
            switch(True, name == SHOWN)
            before = server.cpu_s(*ROLES), server.cpu_s(Role.API)
            server.load([server.request(SCRAPE)], 1)
            server.load(batch, CONNECTIONS)
            switch(True, name == SHOWN)  # waits for the end of what the scrape has begun
            api[name].append(server.cpu_s(Role.API) - before[1])
            return server.cpu_s(*ROLES) - before[0]

        values = interleave_measurements(
            rounds, {name: partial(measure_batch_cpu, name) for name in (SHOWN, STOCK)}
        )
    beyond, low, high = compute_added_seconds(values)
    # The thread is in the API server, which has nothing else to do for it.
    pause_s = max(INTERVAL_S, compute_added_seconds(api)[0] / SHARE)
    return Figure(
        "processor time for scrapes, beyond scrapes of stock's, requests running",
        "cores",
        beyond / pause_s,
        "one",
        1.0,
        Limit(0.05) if setting.short else Limit(0.005),
        rounds,
        interval=None if setting.short else (low / pause_s, high / pause_s),
    )


def compute_added_seconds(taken: Mapping[str, Sequence[float]]) -> tuple[float, ...]:
    """How many seconds more it is with the metrics, and the interval."""
    of = statistics.median(taken[STOCK])
    return tuple(of * (times - 1) for times in ratio(taken[SHOWN], taken[STOCK]))


def cpu_s(server: Server) -> float:
    asked = (process for process in server.processes() if process.role in ROLES)
    return sum(agent_client.open_agent(process).fetch_patches().cpu_s for process in asked)
