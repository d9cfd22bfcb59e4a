"""What ``watch`` costs while all is well: of a core, and what requests feel of it."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial

from tests.support.ports import free_port
from tests.support.waiting import until

from .figure import Figure, Limit, interleave_measurements, ratio
from .memory import cores
from .setting import HOST, VLLMOPS, Setting

FOUND_S = 60.0  # until it has found the server and asked it once, at most
PATH = "/v1/completions"
BODY = {"model": "demo-vision", "prompt": "The quick brown", "max_tokens": 1}
CONNECTIONS, BURST = 8, 48
WATCHED, ALONE, AGAIN = BLOCKS = ("watched", "alone", "alone again")
# Ten times as often as by default, for a block of requests is short: a tenth of it is felt then.
OFTEN_S = 0.2
OFTEN_LIMIT = 1.05  # so 1.005 by default, which is less than two runs differ by


def measure(setting: Setting) -> Iterator[Figure]:
    window_s = 5.0 if setting.short else 120.0
    with start_watch(setting) as (pid, port):
        spent = cores([pid], window_s)
        probe = measure_readiness_probe(setting, port)
    yield Figure(
        "watch, a server of three processes that is well",
        "cores",
        spent,
        "one",
        1.0,
        Limit(0.1) if setting.short else Limit(0.005),
        1,
    )
    yield probe
    with start_watch(setting, "--interval", str(OFTEN_S)) as (pid, _):
        yield felt(setting, pid)


@contextlib.contextmanager
def start_watch(setting: Setting, *words: str) -> Iterator[tuple[int, int]]:
    """The pid of a watch, and the port it listens on, once it has found the server well."""
    port = free_port()
    watch = (VLLMOPS, "watch", "-t", str(setting.vision.pid), "--listen", str(port))
    with setting.meanwhile(*watch, *words) as command:
        until(lambda: command.poll() is not None or green(port), FOUND_S)
        yield command.pid, port


def green(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/readyz", timeout=FOUND_S):
            return True
    except OSError:  # nobody listens, or it does not know the server yet
        return False


def measure_readiness_probe(setting: Setting, port: int) -> Figure:
    """How long a probe takes over HTTP while the server has more requests than it can work on."""
    server, over = setting.vision, threading.Event()
    burst = [server.request(PATH, {**BODY, "max_tokens": 50, "ignore_eos": True})] * BURST

    def load() -> None:
        while not over.is_set():
            server.load(burst, 4 * CONNECTIONS)

    def seconds(to: int, path: str) -> float:
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{to}{path}", timeout=60) as answer:
            answer.read()
        return time.perf_counter() - began

    loading = threading.Thread(target=load)
    loading.start()
    try:
        time.sleep(2)
        values = interleave_measurements(
            30 if setting.short else 2000,
            {
                "probe": partial(seconds, port, "/readyz"),
                "health": partial(seconds, server.port, "/health"),
            },
        )
    finally:
        over.set()
        loading.join()
    worst = {name: statistics.quantiles(item, n=100)[98] for name, item in values.items()}
    return Figure(
        "GET /readyz of a watch, 99th percentile, server saturated",
        "s",
        worst["probe"],
        "GET /health of the server",
        worst["health"],
        Limit(0, 0.1 if setting.short else 0.02),
        len(values["probe"]),
    )


def felt(setting: Setting, pid: int) -> Figure:
    """What requests feel of a watch, which is stopped and let go on by turns."""
    server, choice = setting.vision, random.Random(1)
    burst = [server.request(PATH, BODY)] * BURST
    values: dict[str, list[float]] = {name: [] for name in BLOCKS}
    for number in range(8 if setting.short else 300):
        for name in choice.sample(BLOCKS, len(BLOCKS)):
            os.kill(pid, signal.SIGCONT if name == WATCHED else signal.SIGSTOP)
            began = time.perf_counter()
            server.load(burst, CONNECTIONS)
            if number >= 5:  # the first ones are slow
                values[name].append((time.perf_counter() - began) / BURST)
    pairs = zip(values[ALONE], values[AGAIN], strict=True)
    alone = [math.sqrt(one * other) for one, other in pairs]
    rival = statistics.median(alone)
    times, *ends = (rival * item for item in ratio(values[WATCHED], alone))
    return Figure(
        f"time per request, 1 token, watched every {OFTEN_S:g} s",
        "s",
        times,
        "not watched",
        rival,
        Limit(2) if setting.short else Limit(OFTEN_LIMIT),
        BURST * len(alone),
        control=rival * ratio(values[AGAIN], values[ALONE])[0],
        interval=None if setting.short else (ends[0], ends[1]),  # of three there is none
    )
