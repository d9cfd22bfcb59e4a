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
    if setting.short:
        yield from compared(setting, Kind.TEXT, setting.text, setting.stock)
        yield gathering(setting, setting.text)
        return
    with pair(setting) as (ours, stock):
        yield from compared(setting, Kind.VISION, ours, stock)
        yield gathering(setting, ours)
    with pair(setting, "--api-server-count", "2") as (ours, stock):
        yield from compared(setting, Kind.VISION, ours, stock, ", two API servers")


@contextlib.contextmanager
def pair(setting: Setting, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """A server with the agent and one without; both store responses in memory."""
    with (
        setting.server(Kind.VISION, *arguments, environment={STORE: "memory://"}) as ours,
        setting.server(Kind.VISION, *arguments, agent=False, environment=STOCK_STORE) as stock,
    ):
        yield ours, stock


def compared(
    setting: Setting, kind: Kind, ours: Server, stock: Server, shape: str = ""
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
    values = interleaved(rounds, {"ours": lambda: seconds(ours), "stock": lambda: seconds(stock)})
    yield paired(
        f"a scrape of /metrics with the agent's metrics{shape}",
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
