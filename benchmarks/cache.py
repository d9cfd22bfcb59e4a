"""``cache inspect`` on large caches: how long it takes, and what requests feel of it."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator

from vllmops.demo.inputs import chat

from .figure import Figure, Limit, interleaved, medians
from .setting import IMAGES, VLLMOPS, Server, Setting

PATH = "/v1/chat/completions"
REPEAT = 'while :; do ("$@" > /dev/null || echo "exit code $?" >&2) & sleep 1; done'
CONNECTIONS = 2


def measure(setting: Setting) -> Iterator[Figure]:
    entries, rounds, requests = (2_000, 2, 200) if setting.short else (20_000, 6, 1_200)
    server = setting.vision
    inspect = (VLLMOPS, "cache", "inspect", "-t", str(server.pid), "--json")
    server.load([server.request(PATH, chat([0]))], 1)
    empty = [setting.seconds(*inspect) for _ in range(5)]
    fill(server, entries)
    check(setting, inspect, entries)
    full = [setting.seconds(*inspect) for _ in range(5 if setting.short else 20)]
    yield Figure(
        f"cache inspect, {entries:,} entries in each LRU cache",
        "s",
        statistics.median(full),
        "with one entry",
        statistics.median(empty),
        Limit(0, 5.0 if setting.short else 1.0),
        len(full),
    )

    # Those that are cached: the caches keep their size.
    choice = random.Random(1)
    bodies = [server.request(PATH, chat([choice.randrange(entries)])) for _ in range(requests)]

    def p95() -> float:
        return statistics.quantiles(server.load(bodies, CONNECTIONS), n=20)[-1]

    def inspected() -> float:
        with every_second(setting, inspect):
            return p95()

    p95()
    targets: dict[str, Callable[[], float]] = {"without": p95, "with": inspected}
    if not setting.short:
        targets["again"] = p95
    of = medians(interleaved(rounds, targets))
    yield Figure(
        "request p95, cache inspect every second",
        "s",
        of["with"],
        "without",
        of["without"],
        Limit(5, 0.5) if setting.short else Limit(1.05),
        rounds * requests,
        control=of.get("again"),
    )


def fill(server: Server, entries: int) -> None:
    """Send distinct images until the caches have so many."""
    for first in range(0, entries, IMAGES):
        seeds = list(range(first, min(first + IMAGES, entries)))
        server.load([server.request(PATH, chat(seeds))], 1)


def check(setting: Setting, inspect: tuple[str, ...], entries: int) -> None:
    """Raise unless both sides hold as many as is claimed."""
    caches = json.loads(setting.run(*inspect).stdout)["data"]["caches"]
    held = {each["side"]: each["entries"] for each in caches if each["kind"] == "mm-lru"}
    if held != {"P0": entries, "P1": entries}:
        raise RuntimeError(f"{entries} entries were sent, and the caches hold {held}")


@contextlib.contextmanager
def every_second(setting: Setting, words: tuple[str, ...]) -> Iterator[None]:
    """Run a command every second meanwhile, a new process each time.

    A shell does it: a thread of ours would take turns with the client that measures.
    """
    complaints = setting.home / "every-second"
    with complaints.open("wb") as file:
        shell = subprocess.Popen(
            ("sh", "-c", REPEAT, "sh", *words),
            env=setting.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
        try:
            yield
        finally:
            shell.terminate()
            shell.wait()
    if told := complaints.read_text():
        raise RuntimeError(f"{' '.join(words)}: {told}")
