"""A run: clients and faults at random, as a seed says, on two replicas; what was done and read."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..support.ports import free_port
from ..support.waiting import until
from .checker import Op

ROOT = Path(__file__).parents[2]
ENDS = {f"response.{status}" for status in ("completed", "failed", "cancelled", "incomplete")}
# Operations before the database's other server takes over.
AMONG = 30
LOST = "The server that ran this response is gone."


class Replicas:
    """Two replicas on one store, forked by one program."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.histories.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.line()
        self.pids: dict[int, int] = {}

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def start(self, port: int, url: str, kind: str = "") -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{port} {url} {kind}\n")
        self.process.stdin.flush()
        self.pids[port] = int(self.line())

    def signal(self, port: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[port], number)

    def clear(self) -> None:
        for port in self.pids:
            self.signal(port, signal.SIGKILL)
        self.pids.clear()

    def end(self) -> None:
        self.clear()
        self.process.kill()
        self.process.communicate()


class Client:
    """Does what its dice say, and records it."""

    def __init__(self, dice: random.Random, ports: list[int], history: list[Op]) -> None:
        self.dice, self.ports, self.history = dice, ports, history

    def send_request(
        self, method: str, path: str, body: Any = None, *, owner: str = "ann", cut: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """The answer of one of the replicas; 0 where the outcome is unknown."""
        talk = http.client.HTTPConnection("127.0.0.1", self.dice.choice(self.ports), timeout=3)
        headers = {"Authorization": f"Bearer {owner}", "Content-Type": "application/json"}
        try:
            talk.request(method, path, body and json.dumps(body), headers)
            if cut:
                time.sleep(0.01 * self.dice.random())
                return 0, {}
            answer = talk.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            talk.close()

    def stream(self, target: str, mark: str) -> Op:
        """Make a response and read its events to the end; who is cut off goes on anywhere."""
        body = {"model": "m", "input": mark, "background": True, "stream": True}
        asked: Any = {**body, "request_id": target}
        method, path = "POST", "/v1/responses"
        events: list[tuple[int, str]] = []
        began, code, end = time.monotonic(), 0, dict[str, Any]()
        for _ in range(8):
            most = self.dice.choice([3, 10, 1000])
            code, read, end = self.events(method, path, asked, most)
            events += read
            if end or code not in {0, 200, 503} or not events:
                break
            after = events[-1][0]
            method, asked = "GET", None
            path = f"/v1/responses/{target}?stream=true&starting_after={after}"
        status = end.get("status", "")
        marks = tuple(map(text, end.get("output", ())))
        if (end.get("error") or {}).get("message") == LOST:
            status, marks = "lost", ()
        now = time.monotonic()
        seen = tuple(events)
        code = 200 if end else code if code not in {200, 503} else 0
        return Op("stream", target, "ann", began, now, code, marks, status, events=seen)

    def events(
        self, method: str, path: str, body: Any, most: int
    ) -> tuple[int, list[tuple[int, str]], dict[str, Any]]:
        """So many events at most of one connection, and the response in the last one if it came."""
        talk = http.client.HTTPConnection("127.0.0.1", self.dice.choice(self.ports), timeout=3)
        headers = {"Authorization": "Bearer ann", "Content-Type": "application/json"}
        found: list[tuple[int, str]] = []
        code = 0
        try:
            talk.request(method, path, body and json.dumps(body), headers)
            answer = talk.getresponse()
            code = answer.status
            while code == 200 and len(found) < most and (line := answer.readline()):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event["type"] in ENDS:
                    return code, found, event["response"]
                if event["type"] != "error":
                    found.append((event["sequence_number"], line[6:].decode().strip()))
        except (OSError, http.client.HTTPException, ValueError):
            code = 0
        finally:
            talk.close()
        return code, found, {}

    def do(self, kind: str, target: str, mark: str, before: str = "") -> int:
        if kind == "stream":
            streamed = self.stream(target, mark)
            self.history.append(streamed._replace(asked=mark))
            return streamed.code
        owner = "bob" if kind in {"read", "get"} and self.dice.random() < 0.1 else "ann"
        cut = kind not in {"read", "get"} and self.dice.random() < 0.1
        conversation, one = f"/v1/conversations/{target}", f"/v1/responses/{target}"
        item = {"type": "message", "role": "user"}
        added = [{**item, "content": mark}, {**item, "content": mark + "'"}]
        marks: tuple[str, ...] = (mark, f"re:{mark}")
        body: dict[str, Any] = {"model": "m", "input": mark}
        method, path, given = {
            "read": ("GET", conversation + "/items?order=asc&limit=100", None),
            "add": ("POST", conversation + "/items", {"items": added}),
            "turn": ("POST", "/v1/responses", {**body, "conversation": target}),
            "delete": ("DELETE", conversation, None),
            "respond": (
                "POST",
                "/v1/responses",
                {**body, "background": True, "request_id": target},
            ),
            "link": (
                "POST",
                "/v1/responses",
                {**body, "request_id": target, "previous_response_id": before or None},
            ),
            "get": ("GET", one, None),
            "cancel": ("POST", one + "/cancel", None),
            "remove": ("DELETE", one, None),
        }[kind]
        began = time.monotonic()
        code, answer = self.send_request(method, path, given, owner=owner, cut=cut)
        status = ""
        if kind == "add":
            marks = (mark, mark + "'")
        elif kind == "read":
            marks = tuple(map(text, answer.get("data", ())))
        elif kind in {"get", "cancel"}:
            marks = tuple(map(text, answer.get("output", ())))
        elif kind != "turn":
            marks = ()  # of a link, a later `get` tells
        if kind in {"turn", "link"} and code == 200:
            status = "saw:" + answer["output"][0]["content"][0]["text"].partition("|")[2]
        elif kind in {"respond", "get", "cancel"} and code == 200:
            status = answer["status"]
            if (answer.get("error") or {}).get("message") == LOST:
                status, marks = "lost", ()
        ended = time.monotonic()
        op = Op(kind, target, owner, began, ended, code, marks, status, asked=mark, before=before)
        self.history.append(op)
        return code


def text(item: dict[str, Any]) -> str:
    return str(item["content"][0]["text"]).partition("|")[0]


KINDS = ["read"] * 4 + ["add"] * 3 + ["turn"] * 5 + ["respond"] * 3 + ["get"] * 6
KINDS += ["cancel", "cancel", "remove", "delete"] + ["link"] * 4 + ["stream"] * 2


def run(
    replicas: Replicas,
    url: str,
    seed: int,
    kind: str = "",
    *,
    ops: int = 25,
    faults: bool = True,
    fail_over: Callable[[], object] | None = None,
) -> list[Op]:
    """The history of the run that a seed names.

    Args:
        replicas: which are started and ended.
        url: of the store.
        seed: of all dice.
        kind: the class of a backend of the tests' own; empty for that of the URL.
        ops: of each client.
        faults: whether replicas suffer any.
        fail_over: has another server of the database take over; called once.
    """
    dice = random.Random(seed)
    history: list[Op] = []
    ports = [free_port(), free_port()]
    try:
        for port in ports:
            replicas.start(port, url, kind)
        first = Client(random.Random(seed), ports, history)
        for port in ports:
            until(partial(is_replica_up, port))
        conversations = []
        for _ in range(3):
            began = time.monotonic()
            code, made = first.send_request("POST", "/v1/conversations", {})
            assert code == 200, made
            conversations.append(made["id"])
            now = time.monotonic()
            history.append(Op("create", made["id"], "ann", began, now, code))
        responses: list[str] = []
        links: list[str] = []

        def run_client(number: int) -> None:
            own = Client(random.Random(f"{seed}-{number}"), ports, history)
            for count in range(ops):
                what, before = own.dice.choice(KINDS), ""
                if what in {"read", "add", "turn", "delete"}:
                    # One alone is ever deleted.
                    target = own.dice.choice(conversations[2 * (what == "delete") :])
                elif what in {"respond", "stream", "link"} or not responses:
                    what = what if what in {"stream", "link"} else "respond"
                    target = f"resp_{seed}_{number}_{count}"
                    if what == "link":
                        before = own.dice.choice(["", *links[-2:], *responses[-1:]])
                        links.append(target)
                    responses.append(target)
                else:
                    target = own.dice.choice(responses[-3:])
                own.do(what, target, f"{number}.{count}", before)

        threads = [
            threading.Thread(target=run_client, args=(number,))
            for number in range(dice.randint(2, 4))
        ]
        for thread in threads:
            thread.start()
        while faults and any(thread.is_alive() for thread in threads):
            time.sleep(0.1 + 0.2 * dice.random())
            if fail_over and len(history) > AMONG:
                fail_over()
                fail_over = None
            fault(replicas, dice, ports, url, kind)
        for thread in threads:
            thread.join()
        settle(first, conversations, responses, seed)
    finally:
        replicas.clear()
    return history


def fault(replicas: Replicas, dice: random.Random, ports: list[int], url: str, kind: str) -> None:
    """Kill a replica and start another, stop one for a while, or step its clock and back."""
    port = dice.choice(ports)
    match dice.choice(["kill", "stop", "step"]):
        case "kill":
            replicas.signal(port, signal.SIGKILL)
            time.sleep(0.05)
            replicas.start(port, url, kind)
        case "stop":
            replicas.signal(port, signal.SIGSTOP)
            time.sleep(dice.choice([0.1, 1.2]))  # longer than the lease, or not
            replicas.signal(port, signal.SIGCONT)
        case "step":
            replicas.signal(port, signal.SIGUSR1)
            time.sleep(0.1)
            replicas.signal(port, signal.SIGUSR2)


def settle(client: Client, conversations: list[str], responses: list[str], seed: int) -> None:
    """Once the faults are over: conversations and chains go on, and everybody reads all."""
    for target in conversations:
        marks = itertools.count()
        until(partial(takes_turn, client, target, marks))
    chain, names = list[str](), (f"resp_{seed}_end_{number}" for number in itertools.count())
    until(partial(grows, client, chain, names))
    for port in client.ports:
        reader = Client(client.dice, [port], client.history)
        for kind, targets in (("read", conversations), ("get", responses)):
            for target in targets:
                until(partial(answers, reader, kind, target))


def is_replica_up(port: int) -> bool:
    return Client(random.Random(), [port], []).send_request("GET", "/")[0] != 0


def takes_turn(client: Client, target: str, marks: Iterator[int]) -> bool:
    return client.do("turn", target, f"end.{next(marks)}") in {200, 404}


def grows(client: Client, chain: list[str], names: Iterator[str]) -> bool:
    """Add a link to a chain, which begins with a run in the background; whether it has some."""
    name = next(names)
    kind, before = "respond", ""
    if chain:
        kind, before = "link", chain[-1]
        if client.do("get", before, "") == 404 and client.history[-1].owner == "ann":
            return True  # it is lost, as the history shows
    if client.do(kind, name, name, before) == 200:
        chain.append(name)
    return len(chain) > 3


def answers(client: Client, kind: str, target: str) -> bool:
    return client.do(kind, target, "") != 0
