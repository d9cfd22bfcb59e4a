"""Stored responses over HTTP: what a store costs, against vLLM's own dicts and the gateway."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import sqlite3
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.databases import Servers, folder_for_servers, postgres_parts
from tests.support.ports import free_port

from vllmops.demo import Kind
from vllmops.store import settings

from .figure import Figure, Limit, paired
from .setting import HOST, PYTHON, START_TIMEOUT_S, Server, Setting, cpu_seconds, healthy
from .setting import LONG as ROOM

PATH = "/v1/responses"
ITEM = {"role": "user", "content": "The quick brown"}
BODY = {"model": "demo-text", "input": [ITEM], "max_output_tokens": 1}
# The gateway refuses a turn whose answer was empty, as a token by itself can be.
TURN = {**BODY, "max_output_tokens": 4, "temperature": 0}
CONNECTIONS, BURST = 8, 48
STOCK, GATEWAY = "stock, in memory", "agentic-api, SQLite"
# The least that each may reach of the stock server's requests per second.
SHARES = {"memory": 0.98, "sqlite": 0.93, "postgresql": 0.90, "redis": 0.90}
OF_GATEWAY = 1.3  # of the gateway's requests per second, with SQLite
TURNS, LONG = 20, 100

Times = dict[str, list[float]]


def measure(setting: Setting) -> Iterator[Figure]:
    with contextlib.ExitStack() as stack:
        servers = dict(started(setting, stack))
        for server in servers.values():
            server.load([server.request(PATH, BODY)] * (48 if setting.short else 480), CONNECTIONS)
        yield from passed(setting, servers)
        yield from created(setting, servers)
        yield from read(setting, servers)
        yield from chained(setting, servers)
        yield from continued(setting, servers)
        yield stored_bytes(servers["sqlite"], setting.home / "responses.db", long(setting))


def started(setting: Setting, stack: contextlib.ExitStack) -> Iterator[tuple[str, Server]]:
    """A stock server, the gateway in front of it, and a server for each backend."""
    yield STOCK, setting.stock
    yield GATEWAY, stack.enter_context(gateway(setting, setting.stock))
    yield "sqlite", setting.text
    if setting.short:
        return
    programs = Servers(postgres_parts(folder_for_servers()))
    stack.callback(programs.end)
    urls = {item: programs.add(item).url for item in ("postgresql", "redis")}
    for kind, url in {"memory": "memory://", **urls}.items():
        store = {settings.STORE: url}
        yield kind, stack.enter_context(setting.server(Kind.TEXT, *ROOM, environment=store))


@contextlib.contextmanager
def gateway(setting: Setting, behind: Server) -> Iterator[Server]:
    """vllm-project's gateway with a file of SQLite's, in front of a server."""
    port, program = free_port(), str(Path(PYTHON).with_name("agentic-server"))
    words = (
        *(program, "--gateway-host", HOST, "--gateway-port", str(port)),
        *("--llm-api-base", f"http://{HOST}:{behind.port}"),
        *("--db-url", f"sqlite://{setting.home}/gateway.db?mode=rwc"),
    )
    with (setting.home / "gateway.log").open("wb") as log:
        process = subprocess.Popen(words, env=setting.environment, stdout=log, stderr=log)
    began = time.perf_counter()
    try:
        while not healthy(port):
            if process.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                raise RuntimeError((setting.home / "gateway.log").read_text()[-3000:])
            time.sleep(0.05)
        yield Server(process.pid, port, time.perf_counter() - began)
    finally:
        process.kill()
        process.wait()


def passed(setting: Setting, servers: Mapping[str, Server]) -> Iterator[Figure]:
    """A request that is none of ours: how long it takes, and how long the API server computes."""
    two = {name: servers[name] for name in (STOCK, "sqlite")}
    bursts = {name: [item.request("/health")] * 4 * BURST for name, item in two.items()}
    spent: Times = defaultdict(list)
    times = taken(two, bursts, 10 if setting.short else 200, spent=spent)
    for what, values in (("GET /health", times), ("GET /health, CPU time", spent)):
        yield compared(setting, what, "sqlite", values, STOCK, 1 / 0.98)


def created(setting: Setting, servers: Mapping[str, Server]) -> Iterator[Figure]:
    """Requests that are stored, with one token of output."""
    bursts = {name: [item.request(PATH, BODY)] * BURST for name, item in servers.items()}
    times = taken(servers, bursts, 3 if setting.short else 200)
    for kind, share in SHARES.items():
        if kind in times:
            yield compared(setting, "a stored request, 1 token", kind, times, STOCK, 1 / share)
    yield compared(setting, "a stored request, 1 token", "sqlite", times, GATEWAY, 1 / OF_GATEWAY)


def read(setting: Setting, servers: Mapping[str, Server]) -> Iterator[Figure]:
    """GET of a response by its id."""
    bursts, each = {}, 4 if setting.short else 1
    for name, server in servers.items():
        kept = [answer["id"] for _, answer in chain(server, BURST // each, stored_apart=True)]
        bursts[name] = [server.request(f"{PATH}/{item}") for item in kept] * each
    times = taken(servers, bursts, 3 if setting.short else 200)
    for name in times:
        if name not in {STOCK, GATEWAY}:
            limit = 0.85 if name == "sqlite" else 1.0
            yield compared(setting, "GET of a response", name, times, STOCK, limit)
    # How much faster the gateway is, which does not ask vLLM: told, and no claim of ours.
    yield compared(setting, "GET of a response", "sqlite", times, GATEWAY, 10.0)


def chained(setting: Setting, servers: Mapping[str, Server]) -> Iterator[Figure]:
    """Turns by ``previous_response_id``, and by ``conversation``."""
    whole, talks = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    choice = random.Random(1)
    for _ in range(1 if setting.short else 30):
        for name in choice.sample(list(servers), len(servers)):
            whole[name].append(sum(seconds for seconds, _ in chain(servers[name], TURNS)))
            if name not in {STOCK, GATEWAY}:
                talks[name].append(sum(seconds for seconds, _ in talk(servers[name], TURNS)))
    for name in talks:
        yield compared(setting, f"a chain of {TURNS} turns", name, whole, STOCK, 1.1)
        what = f"a conversation of {TURNS} turns, {name}"
        yield paired(what, talks[name], "a chain", whole[name], 1.05, short=setting.short)
    yield compared(setting, f"a chain of {TURNS} turns", "sqlite", whole, GATEWAY, 1.0)


def continued(setting: Setting, servers: Mapping[str, Server]) -> Iterator[Figure]:
    """The turn after a long conversation, again and again."""
    bursts, turns = {}, long(setting)
    for name, server in servers.items():
        before = {"previous_response_id": chain(server, turns - 1)[-1][1]["id"]}
        bursts[name] = [server.request(PATH, {**TURN, **before})] * 4
    times = taken(servers, bursts, 6 if setting.short else 60, connections=1)
    for name in servers:
        if name not in {STOCK, GATEWAY}:
            yield compared(setting, f"turn {turns} of a conversation", name, times, STOCK, 1.1)


def long(setting: Setting) -> int:
    """How many turns a long conversation has."""
    return LONG // 4 if setting.short else LONG


def stored_bytes(server: Server, file: Path, turns: int) -> Figure:
    """What a long conversation takes in the store, against its items."""
    answers = [answer for _, answer in chain(server, turns)]
    items = sum(len(compact([ITEM])) + len(compact(item["output"])) for item in answers)
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        marks = ", ".join("?" * len(answers))
        (table,) = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE '%responses'"
        ).fetchone()
        (total,) = connection.execute(
            f"SELECT sum(length(body) + length(input)) FROM {table} WHERE id IN ({marks})",
            [item["id"] for item in answers],
        ).fetchone()
    name = f"bytes of a conversation of {turns} turns, sqlite"
    return Figure(name, "bytes", total, "its items", items, Limit(1.3), len(answers))


def taken(
    servers: Mapping[str, Server],
    bursts: Mapping[str, Sequence[bytes]],
    rounds: int,
    connections: int = CONNECTIONS,
    *,
    spent: Times | None = None,
) -> Times:
    """Seconds for each request, in blocks by turns.

    Args:
        servers: by name.
        bursts: the requests of a block.
        rounds: blocks of each server.
        connections: on which they are sent.
        spent: gets the seconds that the API server computes for each, where that is wanted.
    """
    times, choice = defaultdict[str, list[float]](list), random.Random(1)
    for _ in range(rounds):
        for name in choice.sample(list(servers), len(servers)):
            server, count = servers[name], len(bursts[name])
            before, began = cpu_seconds(server.pid), time.perf_counter()
            server.load(bursts[name], connections)
            times[name].append((time.perf_counter() - began) / count)
            if spent is not None:
                spent[name].append((cpu_seconds(server.pid) - before) / count)
    return times


def compared(
    setting: Setting, what: str, kind: str, times: Times, rival: str, limit: float
) -> Figure:
    name = f"{what}, {kind}"
    return paired(name, times[kind], rival, times[rival], limit, short=setting.short)


def chain(
    server: Server, turns: int, *, stored_apart: bool = False
) -> list[tuple[float, dict[str, Any]]]:
    """Responses of which each follows the one before, or that know nothing of each other.

    Returns:
        Of each, the seconds and the answer.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    connection = http.client.HTTPConnection(HOST, server.port)
    with contextlib.closing(connection):
        for _ in range(turns):
            before = {"previous_response_id": found[-1][1]["id"]} if found else {}
            found.append(posted(connection, PATH, {**TURN, **({} if stored_apart else before)}))
    return found


def talk(server: Server, turns: int) -> list[tuple[float, dict[str, Any]]]:
    """As `chain`, of the turns of a conversation."""
    connection = http.client.HTTPConnection(HOST, server.port)
    with contextlib.closing(connection):
        _, made = posted(connection, "/v1/conversations", {})
        body = {**TURN, "conversation": made["id"]}
        return [posted(connection, PATH, body) for _ in range(turns)]


def posted(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> tuple[float, dict[str, Any]]:
    """The seconds that an answer takes, and the answer."""
    content = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    if "id" not in answer:
        raise RuntimeError(f"refused: {answer}")
    return time.perf_counter() - began, answer


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
