"""A detached server that is started again, and stopped in the end: what that loses, and what not.

Requests, background responses and their readers; the options; a supervisor that has died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from vllmops.rules.progress import PATIENCE_S
from vllmops_responses.server.background.background_rerun import AGAIN, MARK

from ..support.extent import long
from ..support.waiting import until
from .clients import (
    ENDLESS,
    LENGTH,
    MODEL,
    background,
    base,
    connect,
    reach,
    start_background_stream,
    wait_until_response_ends,
)
from .conftest import Cli, Live, kill

TOKENS = 3900  # of what is to run until a restart, also on a busy machine
UNTIL = {"max_output_tokens": TOKENS}
ALLOWED = "somebody_elses,forked,patient"  # without ours


@pytest.fixture(scope="module")
def server(cli: Cli) -> Iterator[Live]:
    try:
        plug_ins = ("--env", f"VLLM_PLUGINS={ALLOWED}")
        yield cli.serve("again", "--demo", "text", *plug_ins, "--", *LENGTH)
    finally:
        cli("stop", "again", "--force")


class Asked(threading.Thread):
    """A completion in the foreground, by a thread of its own."""

    def __init__(self, server: Live, **options: Any) -> None:
        super().__init__(daemon=True)
        self.body = {"model": "demo-text", "prompt": "a", "max_tokens": TOKENS, "ignore_eos": True}
        self.body |= options
        self.url = f"{server.url}/v1/completions"
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self.url, json=self.body, timeout=120)

    def wait_for_answer(self) -> httpx.Response:
        self.join(30)
        assert self.answer
        return self.answer


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_restart_with_rerun_continues_background_responses(server: Live) -> None:
    before = server.row
    assert {p["agent"] for p in before["processes"] if p["role"] != "other"} == {"answers"}
    client, worker = connect(base(server)), server.pids()["worker"]
    plain, streamed = Asked(server), Asked(server, stream=True)
    answered: list[Any] = []
    answering = threading.Thread(
        target=lambda: answered.extend(
            client.responses.create(model=MODEL, input="a", stream=True, **UNTIL, **ENDLESS)
        )
    )
    answering.start()
    run, dropped = background(client, **UNTIL), background(client, **UNTIL)
    stream, followed = start_background_stream(client, **UNTIL)
    read: list[Any] = []

    def follow() -> None:
        with pytest.raises(openai.APIError):  # the server drains
            read.extend(iter(lambda: next(stream), None))

    reader = threading.Thread(target=follow)
    read.extend(islice(stream, 20))
    reader.start()
    client.responses.cancel(dropped.id)
    (engine,) = reach(server, "engine")
    until(
        lambda: (engine.fetch_engine_state().running or 0) >= 5
    )  # a cancelled one may still be there
    os.kill(worker, signal.SIGSTOP)  # so that none ends by itself before the restart

    def go_on() -> None:
        plain.join()
        resume(worker)

    threading.Thread(target=go_on).start()
    ran = server.cli("restart", server.name, "--force", "--rerun", "--json")
    assert ran.code == 0, ran.err
    assert ran.data["environment"]["VLLM_PLUGINS"] == f"{ALLOWED},vllmops"
    after = server.row
    assert after["port"] == before["port"]
    assert after["pid"] != before["pid"]
    answer = plain.wait_for_answer()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "draining" in streamed.wait_for_answer().text.rstrip().splitlines()[-1]
    reader.join(30)
    answering.join(30)
    assert answered[-1].type == "response.failed"
    numbers = [event.sequence_number for event in answered]
    assert numbers[-1] > numbers[-2] == len(numbers) - 2

    last = read[-1].sequence_number
    rest = list(client.responses.retrieve(followed, stream=True, starting_after=last))
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    (begun,) = (event.response for event in rest if event.type == "response.created")
    assert (begun.id, begun.metadata) == (followed, {MARK: AGAIN})
    for response_id in (run.id, followed):
        done = wait_until_response_ends(client, response_id, 120)
        assert (done.status, done.metadata) == ("incomplete", {MARK: AGAIN})  # of max_output_tokens
        assert "vllmops" not in done.model_dump()
        assert done.usage.output_tokens == TOKENS
    assert wait_until_response_ends(client, dropped.id).status == "cancelled"


@long
def test_restart_after_a_crash_reruns_background_responses(server: Live) -> None:
    client = connect(base(server))
    run = background(client, metadata={"mine": "1"}, instructions="short")
    stream, followed = start_background_stream(client)
    last = next(stream).sequence_number
    kill(server.pids()["engine"])
    until(lambda: server.row["state"] == "failed")
    assert server.cli("restart", server.name, "--rerun").code == 0
    rest = client.responses.retrieve(followed, stream=True, starting_after=last)
    assert next(iter(rest)).sequence_number == last + 1
    server.cli("requests", "abort", "--all", "--yes", "-t", server.name)
    assert wait_until_response_ends(client, run.id).metadata == {"mine": "1", MARK: AGAIN}


@long
def test_a_second_restart_fails_a_rerun_and_keeps_evidence_of_a_hang(server: Live) -> None:
    client = connect(base(server))
    run = background(client, metadata={"mine": "1"}, instructions="short")
    assert server.cli("restart", server.name, "--force", "--rerun").code == 0
    os.kill(server.pids()["engine"], signal.SIGSTOP)
    time.sleep(PATIENCE_S)
    ran = server.cli("restart", server.name, "--force", "--rerun", "--json")
    assert (ran.code, Path(ran.data["evidence"]).exists()) == (0, True)
    done = wait_until_response_ends(client, run.id)
    assert (done.status, done.metadata) == ("failed", {"mine": "1", MARK: AGAIN})


@long
def test_without_the_option_nothing_runs_again(server: Live) -> None:
    client = connect(base(server))
    run = background(client)
    assert server.cli("restart", server.name, "--force").code == 0
    assert wait_until_response_ends(client, run.id, 60).status == "failed"
    # It ran in an earlier start, and this one does not hang.
    ran = server.cli("restart", server.name, "--force", "--rerun", "--json")
    assert (ran.code, ran.data["evidence"]) == (0, None)
    assert wait_until_response_ends(client, run.id).status == "failed"


def test_a_detached_server_outlives_its_supervisor_and_is_drained(server: Live) -> None:
    footprint = server.footprint()
    first = server.supervisor()
    kill(first)
    seen = server.row
    assert seen["supervised"] is False
    assert seen["state"] == "ready"
    assert server.complete().status_code == 200
    # The command above took it under supervision again.
    assert server.row["supervised"] is True
    assert server.supervisor() != first
    assert sorted(footprint.pids) == sorted(p["pid"] for p in server.row["processes"])

    worker = server.pids()["worker"]
    kill(server.supervisor())
    url, answers = server.url, list[httpx.Response]()
    asked = {"model": "demo-text", "prompt": "The quick", "max_tokens": 50, "ignore_eos": True}
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=asked, timeout=120))
    )
    # A stopped worker keeps the request in flight for as long as the steps below take.
    os.kill(worker, signal.SIGSTOP)
    try:
        caller.start()
        until(lambda: "1 running" in server.cli("status", server.name).out)
        stopping = server.cli.begin("stop", server.name, stderr=subprocess.PIPE)
        refused = until(lambda: refusal(url))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert refused == httpx.codes.SERVICE_UNAVAILABLE
    caller.join(120)
    assert answers[0].json()["usage"]["completion_tokens"] == asked["max_tokens"]
    assert stopping.wait(60) == 0
    footprint.wait_gone(0)
    assert server.row["state"] == "stopped"
    assert server.row["failure"] is None


def refusal(url: str) -> int | None:
    """The status of a new request, None while it is still taken."""
    answer = httpx.get(f"{url}/v1/models", timeout=10)
    return None if answer.status_code == 200 else answer.status_code
