"""``cache inspect`` on large caches: how long it takes, and what requests feel of it."""

from __future__ import annotations

import json
import random
import signal
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from vllmops.demo.inputs import make_chat_request

from .figure import Figure, Limit, interleave_measurements
from .setting import IMAGES, VLLMOPS, Server, Setting

PATH = "/v1/chat/completions"
CONNECTIONS = 2
TOKENS = 400
BLOCK = 8  # requests
LOOKS_S = 3.0  # until the first look, some hundred milliseconds


def measure(setting: Setting) -> Iterator[Figure]:
    entries, rounds = (IMAGES, 2) if setting.short else (20_000, 30)
    block_of, tokens = (4, 50) if setting.short else (BLOCK, TOKENS)
    server = setting.vision
    look = (VLLMOPS, "cache", "inspect", "-t", str(server.pid))
    inspect = (*look, "--json")
    server.load([server.request(PATH, make_chat_request([0]))], 1)
    empty = [setting.seconds(*inspect) for _ in range(3 if setting.short else 5)]
    fill(server, entries)
    check(setting, inspect, entries)
    full = [setting.seconds(*inspect) for _ in range(3 if setting.short else 20)]
    yield Figure(
        f"cache inspect, {entries:,} entries in each LRU cache",
        "s",
        statistics.median(full),
        "with one entry",
        statistics.median(empty),
        Limit(0, 5.0 if setting.short else 1.0),
        len(full),
    )

    # Images that are cached, so that the caches keep their size; and answers of some length, as
    # people ask for: a look each second falls into each of them.
    choice = random.Random(1)
    answer: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    images = [[choice.randrange(entries)] for _ in range(block_of)]
    bodies = [server.request(PATH, make_chat_request(item, **answer)) for item in images]
    taken: dict[str, list[float]] = {"without": [], "with": []}
    if not setting.short:
        taken["again"] = []
    with setting.meanwhile(*look, "--watch", "--interval", "1", warm_up_s=LOOKS_S) as watch:
        # Told to go on for each block that is measured with it.
        watch.send_signal(signal.SIGSTOP)

        def block(name: str) -> float:
            """A few requests: short blocks by turns, so that a machine's moods fall on all."""
            if name == "with":
                watch.send_signal(signal.SIGCONT)
            taken[name] += server.load(bodies, CONNECTIONS)
            watch.send_signal(signal.SIGSTOP)
            return 0.0

        server.load(bodies, CONNECTIONS)
        interleave_measurements(rounds, {name: partial(block, name) for name in taken})
    of = {name: statistics.quantiles(item, n=20)[-1] for name, item in taken.items()}
    yield Figure(
        "request p95, cache inspect --watch --interval 1",
        "s",
        of["with"],
        "without",
        of["without"],
        Limit(5, 0.5) if setting.short else Limit(1.05),
        len(taken["with"]),
        control=of.get("again"),
    )


def fill(server: Server, entries: int) -> None:
    """Send distinct images until the caches have so many."""
    for first in range(0, entries, IMAGES):
        seeds = list(range(first, min(first + IMAGES, entries)))
        server.load([server.request(PATH, make_chat_request(seeds))], 1)


def check(setting: Setting, inspect: tuple[str, ...], entries: int) -> None:
    """Raise unless both sides hold as many as is claimed."""
    caches = json.loads(setting.run(*inspect).stdout)["data"]["caches"]
    held = {item["side"]: item["entries"] for item in caches if item["kind"] == "mm-lru"}
    if held != {"P0": entries, "P1": entries}:
        raise RuntimeError(f"{entries} entries were sent, and the caches hold {held}")
