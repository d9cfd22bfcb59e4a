"""A server that works, waits or starts is never found to hang."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest

from ..support.extent import EVERYTHING, long

if TYPE_CHECKING:
    from .conftest import Cli, Live, Ran

LASTS_S = 60.0 if EVERYTHING else 0.0  # of each state; it is examined once at least
QUICK = () if EVERYTHING else ("--samples", "2", "--interval", "0.5")
LONG = 1900  # tokens of a prompt; the model takes 2,048
TOKENISED = 400_000  # characters


def text(server: Live, **fields: object) -> None:
    message = {"role": "user", "content": fields.pop("content", "hi")}
    body = {"model": "demo-vision", "messages": [message], "ignore_eos": True, **fields}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


@contextmanager
def send_from_threads(send: Callable[[int], None], threads: int) -> Iterator[None]:
    """Send requests from several threads until the end of the block; all are answered."""
    over, numbers, failed = threading.Event(), itertools.count(), list[BaseException]()

    def send_requests() -> None:
        try:
            while not over.is_set():
                send(next(numbers))
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=send_requests) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()
    assert not failed, failed


@contextmanager
def idle(server: Live) -> Iterator[None]:
    yield


def saturate_server(server: Live) -> AbstractContextManager[None]:
    """More requests than the server takes at once, so that some wait."""
    return send_from_threads(lambda _: text(server, max_tokens=60), 20)


def long_prefill(server: Live) -> AbstractContextManager[None]:
    """Prompts as long as the model takes, each another one."""
    return send_from_threads(
        lambda n: text(server, content=f"{n:05} " + "z" * LONG, max_tokens=1), 4
    )


def overload_tokenizer(server: Live) -> AbstractContextManager[None]:
    """The tokenizer has more than it can do."""
    body = {"model": "demo-vision", "prompt": "The quick brown fox. " * (TOKENISED // 21)}

    def send(_: int) -> None:
        httpx.post(f"{server.url}/tokenize", json=body, timeout=120).raise_for_status()

    return send_from_threads(send, 3)


def post(server: Live, path: str, **words: int) -> None:
    httpx.post(f"{server.url}{path}", params=words, timeout=120).raise_for_status()


@contextmanager
def pause_server(server: Live) -> Iterator[None]:
    """By whoever trains the model: requests wait until it is resumed."""
    post(server, "/pause")
    try:
        yield
    finally:
        post(server, "/resume")


@contextmanager
def asleep(server: Live) -> Iterator[None]:
    """With a request that waits until the server wakes up."""
    post(server, "/sleep", level=1)
    waiting = threading.Thread(target=text, args=(server,), kwargs={"max_tokens": 1})
    waiting.start()
    try:
        yield
    finally:
        post(server, "/wake_up")
        waiting.join()


def no_hang(ran: Ran) -> None:
    assert ran.data["verdict"] != "hang", ran.data["findings"]
    assert not [f for f in ran.data["findings"] if f["hang"] and f["confidence"] != "possible"]


@pytest.mark.parametrize(
    "state",
    [
        idle,
        saturate_server,
        asleep,
        *(
            pytest.param(state, marks=long)
            for state in (long_prefill, overload_tokenizer, pause_server)
        ),
    ],
    ids=lambda state: state.__name__,
)
def test_a_server_that_works_or_rests_does_not_hang(
    vision_server: Live, state: Callable[[Live], AbstractContextManager[None]]
) -> None:
    target = ("-t", vision_server.name, "--json")
    with state(vision_server):
        end = time.monotonic() + LASTS_S
        while True:
            no_hang(vision_server.cli("stacks", "dump", "--explain", *QUICK, *target))
            ran = vision_server.cli("doctor", *target)
            codes = {f["code"] for f in ran.data["findings"] if f["severity"] == "error"}
            assert not {code for code in codes if code.startswith(("stack.", "progress."))}, ran.out
            if time.monotonic() > end:
                break
    text(vision_server, max_tokens=1)


@long
@pytest.mark.parametrize("eager", ["--enforce-eager", "--no-enforce-eager"])
def test_a_server_that_loads_or_compiles_does_not_hang(cli: Cli, eager: str) -> None:
    name = eager.removeprefix("--")
    start = cli.begin("serve", "--detach", "--name", name, "--demo", "text", "--", eager)
    seen = 0
    try:
        while start.poll() is None:
            ran = cli("stacks", "dump", "--explain", "-t", name, "--interval", "0.5", "--json")
            if ran.code in {0, 1} and ran.data:  # it has processes
                no_hang(ran)
                seen += 1
        assert start.returncode == 0
        assert seen > 3
    finally:
        cli("stop", name, "--force")
        start.wait()
