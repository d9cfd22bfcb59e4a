"""Healthy load of every kind: ``python -m tests.live.soak --minutes 10``.

A server works, idles, sleeps and wakes, and nothing may be said to be wrong with it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from vllmops.demo.inputs import make_chat_request, make_data_url, make_png

from .conftest import Cli, Live, make_soak_options
from .hangs import Asked

MODEL = "demo-vision"
TIMEOUT_S = 60.0
WORK_S, IDLE_S, ASLEEP_S = 12.0, 4.0, 3.0


@dataclass
class Soak:
    """Clients of a server, one of each kind at a time.

    Args:
        url: of the server.
        done: requests that ended as they should, by kind.
        failed: what the others ended with.
    """

    url: str
    done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(10_000))

    def __post_init__(self) -> None:
        # The server closes a connection that idles for 5 s, perhaps just as it is used again.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=fresh)
        self.kinds: tuple[Callable[[int], None], ...] = (
            self.text, self.images, self.same_images, self.long_prompt, self.stream,
            self.aborted_request, self.aborted_stream, self.background, self.structured_output,
            self.carried_conversation,
        )  # fmt: skip

    def text(self, number: int) -> None:
        self.request_chat_completion(f"Tell me of {number}.")

    def images(self, number: int) -> None:
        self.post("/v1/chat/completions", make_chat_request([number, number + 1], max_tokens=5))

    def same_images(self, number: int) -> None:
        self.post("/v1/chat/completions", make_chat_request([number % 3, 7], max_tokens=5))

    def long_prompt(self, number: int) -> None:
        self.request_chat_completion(f"{number} " + "z" * 1800)

    def stream(self, number: int) -> None:
        assert "[DONE]" in list(self.lines(number))[-1]

    def aborted_request(self, number: int) -> None:
        asked = Asked(self.url, make_text_request(f"Stop {number}.", 1500))
        time.sleep(0.2)
        asked.abort()

    def aborted_stream(self, number: int) -> None:
        next(self.lines(number, 1500))

    def background(self, number: int) -> None:
        body = {"model": MODEL, "input": f"Think of {number}.", "max_output_tokens": 20}
        made = self.post("/v1/responses", {**body, "background": True, "store": True})
        until = time.monotonic() + TIMEOUT_S
        while made["status"] in {"queued", "in_progress"} and time.monotonic() < until:
            time.sleep(0.2)
            made = self.client.get(f"/v1/responses/{made['id']}").raise_for_status().json()
        assert made["status"] in {"completed", "incomplete"}, made["status"]

    def carried_conversation(self, number: int) -> None:
        image = {"type": "input_image", "image_url": make_data_url(make_png(number))}
        words = {"type": "input_text", "text": "What is it?"}
        asked = {"role": "user", "content": [image, words]}
        carry = {"store": False, "include": ["reasoning.encrypted_content"]}
        body = {"model": MODEL, "max_output_tokens": 5, **carry}
        *spoken, carrier = self.post("/v1/responses", {**body, "input": [asked]})["output"]
        tokens = set[int]()
        for before in ([carrier], [asked, *spoken]):
            given = [*before, {"role": "user", "content": "Is it?"}]
            made = self.post("/v1/responses", {**body, "input": given})
            tokens.add(made["usage"]["input_tokens"])
        assert len(tokens) == 1, tokens

    def structured_output(self, number: int) -> None:
        pattern = f"{number}-[a-f]{{8}}"  # one that is not compiled yet
        made = self.request_chat_completion("A number?", 50, structured_outputs={"regex": pattern})
        assert re.fullmatch(pattern, made["choices"][0]["message"]["content"])

    def request_chat_completion(self, text: str, tokens: int = 20, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", {**make_text_request(text, tokens), **fields})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.client.post(path, json=body).raise_for_status().json()

    def lines(self, number: int, tokens: int = 30) -> Iterator[str]:
        body = {**make_text_request(f"Go on with {number}.", tokens), "stream": True}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            yield from (line for line in answer.iter_lines() if line)

    @contextmanager
    def run_clients(self) -> Iterator[None]:
        """Requests of all kinds, until the end of the block and of what is still in flight."""
        over = threading.Event()

        def send_requests(kind: Callable[[int], None]) -> None:
            while not over.is_set():
                self.send_request(kind)
                over.wait(random.random())

        threads = [threading.Thread(target=send_requests, args=(kind,)) for kind in self.kinds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def send_request(self, kind: Callable[[int], None]) -> None:
        began = time.monotonic()
        try:
            kind(next(self.numbers))
            self.done[kind.__name__] += 1
        except (httpx.HTTPError, OSError, AssertionError, ValueError, LookupError) as error:
            self.lose(f"{kind.__name__}: {type(error).__name__}: {error}", began)

    def lose(self, what: str, began: float) -> None:
        """Note a request that did not end as it should; began at that monotonic time."""
        self.failed.append(what)

    @contextmanager
    def put_server_to_sleep(self) -> Iterator[None]:
        """Asleep until the end of the block, with a request that has to wait for that."""
        self.client.post("/sleep", params={"level": 1}).raise_for_status()
        waiting = threading.Thread(target=self.send_request, args=(self.text,))
        waiting.start()
        try:
            yield
        finally:
            self.client.post("/wake_up").raise_for_status()
            waiting.join()
            self.done["sleep"] += 1

    def run(self, minutes: float, look: Callable[[], None]) -> None:
        """Work, idle and sleep in turn.

        Args:
            minutes: for how long; a turn that has begun is brought to its end.
            look: is called in each of the three.
        """
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            with self.run_clients():
                observe_and_wait(look, WORK_S)
            observe_and_wait(look, IDLE_S)
            with self.put_server_to_sleep():
                observe_and_wait(look, ASLEEP_S)


def make_text_request(text: str, tokens: int) -> dict[str, Any]:
    return {**make_chat_request([], text, max_tokens=tokens), "ignore_eos": tokens > 1000}


def observe_and_wait(look: Callable[[], None], seconds: float) -> None:
    """Look, and let the rest of some time pass."""
    began = time.monotonic()
    look()
    time.sleep(max(began + seconds - time.monotonic(), 0.0))


def alarms(server: Live) -> list[str]:
    """What is said to be wrong with a server."""
    ran = server.cli("stacks", "dump", "--explain", "--json", "-t", server.name)
    found = [item for item in ran.data["findings"] if item["severity"] != "info"]
    return [f"{item['code']}: {item['evidence']}" for item in found]


def main() -> int:
    """Load a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="vllmops-") as home:
        cli = Cli(Path(home))
        server = cli.serve("soak", "--demo", "vision", *make_soak_options(cli))
        soak, shown, looks = Soak(server.url), list[str](), count()

        def report_alarms() -> None:
            shown.extend(alarms(server))
            sys.stderr.write(f"look {next(looks)}: {sum(soak.done.values())} requests, {shown}\n")

        try:
            soak.run(minutes, report_alarms)
        finally:
            cli("stop", "soak", "--force")
    sys.stdout.write(f"{dict(soak.done)}\nfailed: {soak.failed}\nalarms: {shown}\n")
    return 1 if shown or soak.failed else 0


if __name__ == "__main__":
    sys.exit(main())
