"""What the agent costs a server: memory, start time, requests; and what attaching it takes."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import random
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from vllmops.actions.attach.agent_loader import plan_attach, run_in_borrowed_thread
from vllmops.collect.machine.processes import VITAL
from vllmops.demo import DemoKind
from vllmops.model.roles import Role

from .figure import Figure, Limit, ratio
from .setting import VLLMOPS, Server, Setting

PATH = "/v1/completions"
BODY = {"model": "demo-text", "prompt": "The quick brown", "ignore_eos": True}
CONNECTIONS = 8
# What a request of so many tokens on so many connections may take, in times: of one token nearly
# all is vLLM's own overhead, and no request feels the agent more; 16 on a model of some 100 KB are
# still less work than any real request. Alone it waits for each step, so it feels who delays one.
LIMITS = {(1, CONNECTIONS): 1.03, (16, CONNECTIONS): 1.03, (16, 1): 1.03}
BURST = 6  # requests on each connection
WARM_UP = 480  # requests: the first are slow; a fifth in the short form
IDLE_S = 3.0
MB = 1e6
AGENT, STOCK, AGAIN = "with the agent", "stock (VLLMOPS_DISABLE=1)", "stock again"
HOOKED, BARE, BARE_AGAIN = BLOCKS = ("hooked", "bare", "bare again")
SWITCH = Path(__file__).with_name("switch.py")
HOOKS = {
    *("FastAPI.__call__", "AsyncLLM.add_request", "Request.__init__"),
    *("Scheduler.schedule", "Scheduler.update_from_output"),
}
INJECTION_S = 30.0

Case = tuple[int, int]
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
    for case, most in LIMITS.items():
        yield make_request_figure(setting, values, case, most)
    spent = values[AGENT, "threads"]
    yield Figure(
        "the agent's threads, meanwhile",
        "cores",
        statistics.fmean(spent),
        "one",
        1.0,
        Limit(0.1) if setting.short else Limit(0.01),
        len(spent),
    )
    for what, name, seconds in (
        ("attach", "attach to a server of three processes", 15.0),
        ("stopped", "attach: the longest that a thread was stopped", 3.0),
    ):
        taken, rival = values[STOCK, what], values[STOCK, "dump"]
        of, other = statistics.median(taken), statistics.median(rival)
        yield Figure(name, "s", of, "stacks dump", other, Limit(0, seconds), len(taken))


def make_request_figure(setting: Setting, values: Values, case: Case, limit: float) -> Figure:
    """What requests feel of the agent's hooks; and of its threads, as if all of them waited."""
    hooked, one, other = (values[name, f"request {case}"] for name in BLOCKS)
    bare = list(map(math.sqrt, map(operator.mul, one, other)))
    rival, threads = statistics.median(bare), statistics.fmean(values[AGENT, "threads"])
    times, low, high = (item + threads for item in ratio(hooked, bare))
    return Figure(
        "time per request, tokens: {}, connections: {}, with the agent".format(*case),
        "s",
        rival * times,
        "without its hooks and threads",
        rival,
        Limit(2) if setting.short else Limit(limit),
        BURST * case[1] * len(bare),
        control=rival * ratio(other, one)[0],
        interval=None if setting.short else (rival * low, rival * high),
    )


def figure(values: Values, what: str, name: str, unit: str, limit: Limit) -> Figure:
    of = {item: statistics.median(values[item, what]) for item, other in values if other == what}
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
    """Start a server for each name, and measure them all while they are up together."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in names:
            if setting.short:
                servers[name] = setting.text if name == AGENT else setting.stock
            else:
                own = setting.server(DemoKind.TEXT, agent=name == AGENT)
                servers[name] = stack.enter_context(own)
            values[name, "start"].append(servers[name].start_s)
        for server in servers.values():
            warm_up = WARM_UP // 5 if setting.short else WARM_UP
            server.load([server.request(PATH, body(1))] * warm_up, CONNECTIONS)
        time.sleep(IDLE_S)
        for name, server in servers.items():
            for process in server.processes():
                used = psutil.Process(process.pid).memory_full_info().uss
                values[name, process.role].append(used / MB)
        requests(setting, servers[AGENT], values)
        attach(setting, servers[STOCK], values)


def requests(setting: Setting, server: Server, values: Values) -> None:
    """Send requests, with the agent's hooks and without them by turns.

    Two servers that are started alike differ by more than the agent costs, and so does one server
    from one minute to the next. So the hooks of one are taken away and put back ten times a second.
    """
    rounds, choice = 4 if setting.short else 100, random.Random(1)
    bursts = {
        (tokens, connections): [server.request(PATH, body(tokens))] * (BURST * connections)
        for tokens, connections in LIMITS
    }
    with open_hook_switch(setting, server) as switch:

        def block(name: str, case: Case) -> float:
            switch(name == HOOKED)
            began = time.perf_counter()
            server.load(bursts[case], case[1])
            return (time.perf_counter() - began) / len(bursts[case])

        began, spent = time.perf_counter(), switch(True)
        for _ in range(rounds):
            for case in LIMITS:
                for name in choice.sample(BLOCKS, len(BLOCKS)):
                    values[name, f"request {case}"].append(block(name, case))
        spent = switch(True) - spent
        values[AGENT, "threads"].append(spent / (time.perf_counter() - began))


def body(tokens: int) -> dict[str, Any]:
    return {**BODY, "max_tokens": tokens}


@contextlib.contextmanager
def open_hook_switch(setting: Setting, server: Server) -> Iterator[Callable[..., float]]:
    """Yields what takes the agent's hooks away in all processes, or its metrics alone.

    It takes whether to have the hooks, and the metrics with them, and returns the seconds of CPU
    that the agent's threads took so far.
    """
    path = setting.home / "switch"
    names = {"__name__": "vllmops benchmark", "path": str(path)}
    code = f"__import__('_thread').start_new_thread(exec, ({SWITCH.read_text()!r}, {names!r}))"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        stack.callback(path.unlink)
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(INJECTION_S)
        ends, hooks = [], set()
        for process in (item for item in server.processes() if item.role in VITAL):
            run_in_borrowed_thread(plan_attach(process), code, time.monotonic() + INJECTION_S)
            end = stack.enter_context(listener.accept()[0]).makefile("rw")
            hooks |= {*stack.enter_context(end).readline().split()}
            ends.append(end)
        if missing := HOOKS - hooks:
            raise RuntimeError(f"not hooked: {missing}")

        def switch(on: bool, metrics: bool = True) -> float:
            for end in ends:
                end.write("0" if not on else "1" if metrics else "2")
                end.flush()
            return sum(float(end.readline()) for end in ends)

        yield switch


def attach(setting: Setting, server: Server, values: Values) -> None:
    """Load the agent into a server that runs without it."""
    target = ("-t", str(server.pid), "--json")
    values[STOCK, "dump"].append(setting.seconds(VLLMOPS, "stacks", "dump", *target))
    began = time.perf_counter()
    done = setting.run(VLLMOPS, "attach", "--yes", *target)
    values[STOCK, "attach"].append(time.perf_counter() - began)
    rows = json.loads(done.stdout)["data"]["processes"]
    values[STOCK, "stopped"].append(max(row["stopped_s"] for row in rows))
