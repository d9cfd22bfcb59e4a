"""What the metrics cost: the time of a scrape against stock's, and the agents' work meanwhile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from vllmops.demo import Kind
from vllmops.host.processes import ROLES
from vllmops.rpc import agent
from vllmops.store.settings import STORE

from .figure import Figure, Limit, interleaved, paired
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


def measure(setting: Setting) -> Iterator[Figure]:
    kind = Kind.TEXT if setting.short else Kind.VISION
    with contextlib.ExitStack() as stack:
        if setting.short:
            ours, stock = setting.text, setting.stock
        else:
            ours, stock = (
                stack.enter_context(setting.server(kind, agent=agent, environment=environment))
                for agent, environment in ((True, {STORE: "memory://"}), (False, STOCK_STORE))
            )
        model = {"model": f"demo-{kind.value}"}
        for server in (ours, stock):
            for path, body in LOADS.items():
                server.load([server.request(path, {**body, **model})] * REQUESTS, CONNECTIONS)
            server.load([server.request(SCRAPE)], 1)
        time.sleep(GATHERED_S)
        yield scrapes(setting, ours, stock)
        yield gathering(setting, ours)


def scrapes(setting: Setting, ours: Server, stock: Server) -> Figure:
    """Scrapes of two servers by turns; the agent's shows all that it has."""

    def seconds(server: Server) -> float:
        return min(server.load([server.request(SCRAPE)] * EACH, 1))

    rounds = 10 if setting.short else 60
    values = interleaved(rounds, {"ours": lambda: seconds(ours), "stock": lambda: seconds(stock)})
    return paired(
        "a scrape of /metrics with the agent's metrics",
        values["ours"],
        "a scrape of stock's",
        values["stock"],
        1.1,
        short=setting.short,
    )


def gathering(setting: Setting, server: Server) -> Figure:
    """The CPU time of all agents of a server that is scraped, beyond that of one that is not."""
    lasts_s = 5.0 if setting.short else 60.0

    def spent(scraped: bool) -> float:
        before, began = cpu_s(server), time.monotonic()
        while time.monotonic() - began < lasts_s:
            if scraped:
                server.load([server.request(SCRAPE)], 1)
            time.sleep(INTERVAL_S)
        return (cpu_s(server) - before) / (time.monotonic() - began)

    return Figure(
        "the agents' threads while somebody scrapes, beyond before",
        "cores",
        spent(True) - spent(False),
        "one",
        1.0,
        Limit(0.02) if setting.short else Limit(0.005),
        1,
    )


def cpu_s(server: Server) -> float:
    asked = (process for process in server.processes() if process.role in ROLES)
    return sum(agent.reach(process).patches().cpu_s for process in asked)
