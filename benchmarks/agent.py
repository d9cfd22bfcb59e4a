"""What the agent costs a server: memory, start time, requests; and what attaching it takes."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import psutil

from vllmops.demo import Kind
from vllmops.instances.processes import Role

from .figure import Figure, Limit, interleaved
from .setting import VLLMOPS, Server, Setting

PATH = "/v1/completions"
BODY = {"model": "demo-text", "prompt": "The quick brown", "max_tokens": 1}
CONNECTIONS = 8
BURST = 48  # requests; short, so that the servers take turns many times
WARM_UP = 5  # bursts: the first requests are slow
IDLE_S = 3.0
MB = 1e6
AGENT, STOCK, AGAIN = "with the agent", "stock (VLLMOPS_DISABLE=1)", "stock again"

Values = defaultdict[tuple[str, str], list[float]]


def measure(setting: Setting) -> Iterator[Figure]:
    values: Values = defaultdict(list)
    names = [AGENT, STOCK] if setting.short else [STOCK, AGENT, AGAIN]
    for number in range(1 if setting.short else len(names)):
        # Each comes first once: what is started first finds the machine as nobody else does.
        first = number % len(names)
        compare(setting, names[first:] + names[:first], values)
    wide = setting.short
    yield figure(values, "start", "start time", "s", Limit(2, 20) if wide else Limit(1, 1))
    for role in (Role.API, Role.ENGINE, Role.WORKER):
        limit = Limit(1, 100) if wide else Limit(1, 20)
        yield figure(values, role, f"memory of its own (USS), {role}", "MB", limit)
    before, changes = statistics.median(values[STOCK, "request"]), values[STOCK, "change"]
    control = values.get((AGENT, "change"))
    yield Figure(
        "time per request, 1 token, once the agent is attached",
        "s",
        before * statistics.median(changes),
        "before, same server",
        before,
        Limit(5) if wide else Limit(1.01),
        BURST * len(values[STOCK, "request"]),
        control=before * statistics.median(control) if control else None,
    )
    for what, name, seconds in (
        ("attach", "attach to a server of three processes", 15.0),
        ("stopped", "attach: the longest that a thread was stopped", 3.0),
    ):
        taken, rival = values[STOCK, what], values[STOCK, "dump"]
        of, other = statistics.median(taken), statistics.median(rival)
        yield Figure(name, "s", of, "stacks dump", other, Limit(0, seconds), len(taken))


def figure(values: Values, what: str, name: str, unit: str, limit: Limit) -> Figure:
    of = {each: statistics.median(values[each, what]) for each, other in values if other == what}
    # Two stock servers differ too: the rival is all of them, the control one half of them.
    stock = values[STOCK, what] + values.get((AGAIN, what), [])
    return Figure(
        f"{name}, with the agent",
        unit,
        of[AGENT],
        STOCK,
        statistics.median(stock),
        limit,
        len(values[AGENT, what]),
        control=of.get(AGAIN),
    )


def compare(setting: Setting, names: Sequence[str], values: Values) -> None:
    """Start a server for each name, and measure them all while they are up together.

    Two servers that are started alike differ by more than the agent costs. So what it costs is how
    much slower the same server becomes once it is attached, where a bystander tells what the
    machine did meanwhile.
    """
    rounds = 10 if setting.short else 100
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in names:
            servers[name] = stack.enter_context(setting.server(Kind.TEXT, agent=name == AGENT))
            values[name, "start"].append(servers[name].start_s)
        before = interleaved(rounds, bursts(servers))
        time.sleep(IDLE_S)
        for name, server in servers.items():
            for process in server.processes():
                used = psutil.Process(process.pid).memory_full_info().uss
                values[name, process.role].append(used / MB)
        attach(setting, servers[STOCK], values)
        after = interleaved(rounds, bursts(servers))
    values[STOCK, "request"] += before[STOCK]
    bystander = AGENT if setting.short else AGAIN
    for name in {*names} - {bystander}:
        values[name, "change"].append(
            relative(after[name], after[bystander]) / relative(before[name], before[bystander])
        )


def relative(values: Sequence[float], others: Sequence[float]) -> float:
    """How many times as large one is as the other, as a rule; measured by turns."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def attach(setting: Setting, server: Server, values: Values) -> None:
    """Load the agent into a server that runs without it."""
    target = ("-t", str(server.pid), "--json")
    values[STOCK, "dump"].append(setting.seconds(VLLMOPS, "stacks", "dump", *target))
    began = time.perf_counter()
    done = setting.run(VLLMOPS, "attach", "--yes", *target)
    values[STOCK, "attach"].append(time.perf_counter() - began)
    rows = json.loads(done.stdout)["data"]["processes"]
    values[STOCK, "stopped"].append(max(row["stopped_s"] for row in rows))


def bursts(servers: dict[str, Server]) -> dict[str, Callable[[], float]]:
    """For each server, something that sends a few requests and returns the seconds for each."""
    for server in servers.values():
        for _ in range(WARM_UP):
            burst(server)
    return {name: partial(burst, server) for name, server in servers.items()}


def burst(server: Server) -> float:
    requests = [server.request(PATH, BODY)] * BURST
    began = time.perf_counter()
    server.load(requests, CONNECTIONS)
    return (time.perf_counter() - began) / BURST
