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

from vllmops.demo import DemoKind
from vllmops.model.environment import STORE

from .figure import Figure, Limit, make_paired_figure
from .setting import (
    HOST,
    PYTHON,
    START_TIMEOUT_S,
    STOCK_STORE,
    Server,
    Setting,
    cpu_seconds,
    healthy,
)
from .setting import LONG as ROOM

PATH = "/v1/responses"
ITEM = {"role": "user", "content": "The quick brown"}
BODY = {"model": "demo-text", "input": [ITEM], "max_output_tokens": 1}
# The gateway refuses a turn whose answer was empty, as a token by itself can be.
TURN = {**BODY, "max_output_tokens": 4, "temperature": 0}
CONNECTIONS, BURST = 8, 48
STOCK, GATEWAY = "stock, in memory", "agentic-api, SQLite"
HEALTH, STORED, GET = "GET /health", "a stored request, 1 token", "GET of a response"
# The most that each may take of the stock server's time: for a stored request, for a chain of
# turns, and for the turn after a long one. The last two take a round trip to a server twice.
CREATED = {"memory": 1.0, "sqlite": 1.0, "postgresql": 1.06, "redis": 1.08}
CHAINED = {"memory": 1.10, "sqlite": 1.10, "postgresql": 1.20, "redis": 1.20}
CONTINUED = {"memory": 1.08, "sqlite": 1.08, "postgresql": 1.15, "redis": 1.16}
OF_GATEWAY = 0.75  # of the gateway's time for a stored request, with SQLite
TURNS, LONG = 20, 100
CHAIN, TALK = f"a chain of {TURNS} turns", f"a conversation of {TURNS} turns"
# Two stock servers differ by up to 5 %, each as long as it lives: so every server is started again.
STARTS = 3

Times = dict[str, list[float]]
# What was measured, each with the times of each server, in rounds.
Found = dict[str, Times]


def measure(setting: Setting) -> Iterator[Figure]:
    found: Found = defaultdict(lambda: defaultdict(list))
    for _ in range(1 if setting.short else STARTS):
        with contextlib.ExitStack() as stack:
            servers = dict(start_servers(setting, stack))
            for server in servers.values():
                server.load(
                    [server.request(PATH, BODY)] * (48 if setting.short else 480), CONNECTIONS
                )
            for work in (
                measure_health_requests,
                measure_stored_requests,
                read,
                measure_turns,
                measure_late_turn,
            ):
                work(setting, servers, found)
            kept = stored_bytes(
                servers["sqlite"], setting.home / "responses.db", long_conversation_turns(setting)
            )
    yield from figures(setting, found)
    yield kept


def figures(setting: Setting, found: Found) -> Iterator[Figure]:
    """What was found, against the stock server and the gateway."""

    def against(what: str, kind: str, rival: str, limit: float) -> Figure:
        times, name = found[what], f"{what}, {kind}"
        return make_paired_figure(
            name, times[kind], rival, times[rival], limit, short=setting.short
        )

    kinds = [kind for kind in CREATED if kind in found[STORED]]
    for what in (HEALTH, f"{HEALTH}, CPU time"):
        yield against(what, "sqlite", STOCK, 1 / 0.98)
    for what, limits in ((STORED, CREATED), (CHAIN, CHAINED), (turn(setting), CONTINUED)):
        for kind in kinds:
            yield against(what, kind, STOCK, limits[kind])
    for kind in kinds:
        yield against(GET, kind, STOCK, 0.85 if kind == "sqlite" else 1.0)
        times = found[TALK][kind], "a chain", found[CHAIN][kind]
        yield make_paired_figure(f"{TALK}, {kind}", *times, 1.05, short=setting.short)
    yield against(STORED, "sqlite", GATEWAY, OF_GATEWAY)
    yield against(CHAIN, "sqlite", GATEWAY, 1.0)
    # How much faster the gateway is, which does not ask vLLM: told, and no claim of ours.
    yield against(GET, "sqlite", GATEWAY, 10.0)


def start_servers(setting: Setting, stack: contextlib.ExitStack) -> Iterator[tuple[str, Server]]:
    """A stock server, the gateway in front of it, and a server for each backend."""
    if setting.short:
        yield STOCK, setting.stock
        yield GATEWAY, stack.enter_context(gateway(setting, setting.stock))
        yield "sqlite", setting.text
        return
    programs = Servers(postgres_parts(folder_for_servers()))
    stack.callback(programs.end)
    ways: dict[str, tuple[bool, dict[str, str]]] = {STOCK: (False, STOCK_STORE)}
    urls = {"sqlite": f"sqlite:///{setting.home}/responses.db", "memory": "memory://"}
    urls |= {item: programs.add(item).url for item in ("postgresql", "redis")}
    ways |= {kind: (True, {STORE: url}) for kind, url in urls.items()}
    for kind, (agent, environment) in ways.items():
        server = setting.server(DemoKind.TEXT, *ROOM, agent=agent, environment=environment)
        yield kind, (begun := stack.enter_context(server))
        if kind == STOCK:
            yield GATEWAY, stack.enter_context(gateway(setting, begun))


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


def measure_health_requests(setting: Setting, servers: Mapping[str, Server], found: Found) -> None:
    """A request that is none of ours: how long it takes, and how long the API server computes."""
    two = {name: servers[name] for name in (STOCK, "sqlite")}
    bursts = {name: [item.request("/health")] * 4 * BURST for name, item in two.items()}
    rounds, spent = rounds_of(setting, 10, 200), found[f"{HEALTH}, CPU time"]
    measure_bursts(found[HEALTH], two, bursts, rounds, spent=spent)


def measure_stored_requests(setting: Setting, servers: Mapping[str, Server], found: Found) -> None:
    """Requests that are stored."""
    bursts = {name: [item.request(PATH, BODY)] * BURST for name, item in servers.items()}
    measure_bursts(found[STORED], servers, bursts, rounds_of(setting, 3, 200))


def read(setting: Setting, servers: Mapping[str, Server], found: Found) -> None:
    """Responses by their ids."""
    bursts, each = {}, 4 if setting.short else 1
    for name, server in servers.items():
        kept = [answer["id"] for _, answer in chain(server, BURST // each, stored_apart=True)]
        bursts[name] = [server.request(f"{PATH}/{item}") for item in kept] * each
    measure_bursts(found[GET], servers, bursts, rounds_of(setting, 3, 200))


def measure_turns(setting: Setting, servers: Mapping[str, Server], found: Found) -> None:
    """Turns by ``previous_response_id``, and by ``conversation``."""
    choice = random.Random(1)
    for _ in range(rounds_of(setting, 1, 60)):
        for name in choice.sample(list(servers), len(servers)):
            found[CHAIN][name].append(sum(seconds for seconds, _ in chain(servers[name], TURNS)))
            if name not in {STOCK, GATEWAY}:
                found[TALK][name].append(sum(seconds for seconds, _ in talk(servers[name], TURNS)))


def measure_late_turn(setting: Setting, servers: Mapping[str, Server], found: Found) -> None:
    """The turn after a long conversation, again and again."""
    bursts, turns = {}, long_conversation_turns(setting)
    for name, server in servers.items():
        before = {"previous_response_id": chain(server, turns - 1)[-1][1]["id"]}
        bursts[name] = [server.request(PATH, {**TURN, **before})] * 4
    measure_bursts(found[turn(setting)], servers, bursts, rounds_of(setting, 6, 60), connections=1)


def rounds_of(setting: Setting, short: int, whole: int) -> int:
    """How many rounds to measure with the servers that run."""
    return short if setting.short else whole // STARTS


def turn(setting: Setting) -> str:
    """The name of the turn after a long conversation."""
    return f"turn {long_conversation_turns(setting)} of a conversation"


def long_conversation_turns(setting: Setting) -> int:
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


def measure_bursts(
    times: Times,
    servers: Mapping[str, Server],
    bursts: Mapping[str, Sequence[bytes]],
    rounds: int,
    connections: int = CONNECTIONS,
    *,
    spent: Times | None = None,
) -> None:
    """Measure the seconds for each request, in blocks by turns.

    Args:
        times: gets them.
        servers: by name.
        bursts: the requests of a block.
        rounds: blocks of each server.
        connections: on which they are sent.
        spent: gets the seconds that the API server computes for each, where that is wanted.
    """
    choice = random.Random(1)
    for _ in range(rounds):
        for name in choice.sample(list(servers), len(servers)):
            server, count = servers[name], len(bursts[name])
            before, began = cpu_seconds(server.pid), time.perf_counter()
            server.load(bursts[name], connections)
            times[name].append((time.perf_counter() - began) / count)
            if spent is not None:
                spent[name].append((cpu_seconds(server.pid) - before) / count)


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
            found.append(
                measure_post(connection, PATH, {**TURN, **({} if stored_apart else before)})
            )
    return found


def talk(server: Server, turns: int) -> list[tuple[float, dict[str, Any]]]:
    """As `chain`, of the turns of a conversation."""
    connection = http.client.HTTPConnection(HOST, server.port)
    with contextlib.closing(connection):
        _, made = measure_post(connection, "/v1/conversations", {})
        body = {**TURN, "conversation": made["id"]}
        return [measure_post(connection, PATH, body) for _ in range(turns)]


def measure_post(
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
