"""What a restart loses, and what it does not: requests, background responses, their readers."""

from __future__ import annotations

import os
import signal
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

from vllmops.agent.responses.rerun import AGAIN, MARK
from vllmops.diagnose.progress import PATIENCE_S

from ..support.waiting import until
from .clients import LENGTH, background, base, connect, ended, following, reach
from .conftest import Cli, Live, kill


@pytest.fixture(scope="module")
def server(cli: Cli) -> Iterator[Live]:
    try:
        yield cli.serve("again", "--demo", "text", "--", *LENGTH)
    finally:
        cli("stop", "again", "--force")


class Asked(threading.Thread):
    """A completion in the foreground, by a thread of its own."""

    def __init__(self, server: Live, **options: Any) -> None:
        super().__init__(daemon=True)
        self.body = {"model": "demo-text", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        self.body |= options
        self.url = f"{server.url}/v1/completions"
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self.url, json=self.body, timeout=120)

    def over(self) -> httpx.Response:
        self.join(30)
        assert self.answer
        return self.answer


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_what_runs_goes_on_after_a_restart(server: Live) -> None:
    client = connect(base(server))
    plain, streamed = Asked(server), Asked(server, stream=True)
    run, dropped = background(client), background(client)
    stream, followed = following(client)
    read: list[Any] = []

    def follow() -> None:
        with pytest.raises(openai.APIError):  # the server drains
            read.extend(iter(lambda: next(stream), None))

    reader = threading.Thread(target=follow)
    read.extend(islice(stream, 20))
    reader.start()
    client.responses.cancel(dropped.id)
    (engine,) = reach(server, "engine")
    until(lambda: engine.engine().running == 4)
    worker = server.pids()["worker"]
    os.kill(worker, signal.SIGSTOP)  # so that none ends by itself before the restart
    threading.Timer(3, resume, [worker]).start()

    assert server.cli("restart", server.name, "--force", "--rerun").code == 0
    answer = plain.over()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "draining" in streamed.over().text.rstrip().splitlines()[-1]
    reader.join(30)

    last = read[-1].sequence_number
    rest = list(client.responses.retrieve(followed, stream=True, starting_after=last))
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    (begun,) = (event.response for event in rest if event.type == "response.created")
    assert (begun.id, begun.metadata) == (followed, {MARK: AGAIN})
    for response_id in (run.id, followed):
        done = ended(client, response_id, 120)
        assert (done.status, done.metadata) == ("incomplete", {MARK: AGAIN})  # of max_output_tokens
        assert "vllmops" not in done.model_dump()
        assert done.usage.output_tokens == 3800
    assert ended(client, dropped.id).status == "cancelled"


def test_what_ran_when_a_server_died_runs_again_once(server: Live) -> None:
    client = connect(base(server))
    run = background(client, metadata={"mine": "1"}, instructions="short")
    stream, followed = following(client)
    last = next(stream).sequence_number
    kill(server.pids()["engine"])
    until(lambda: server.row["state"] == "failed")
    assert server.cli("restart", server.name, "--rerun").code == 0
    rest = client.responses.retrieve(followed, stream=True, starting_after=last)
    assert next(iter(rest)).sequence_number == last + 1
    # Each was run again once: the next restart leaves it as failed.
    assert server.cli("restart", server.name, "--force", "--rerun").code == 0
    for response_id, metadata in ((run.id, {"mine": "1", MARK: AGAIN}), (followed, {MARK: AGAIN})):
        done = ended(client, response_id)
        assert (done.status, done.metadata) == ("failed", metadata)


def test_without_the_option_nothing_runs_again_and_a_hang_leaves_evidence(server: Live) -> None:
    client = connect(base(server))
    run = background(client)
    engine = server.pids()["engine"]
    os.kill(engine, signal.SIGSTOP)
    time.sleep(PATIENCE_S)
    ran = server.cli("restart", server.name, "--force", "--json")
    assert (ran.code, Path(ran.data["evidence"]).exists()) == (0, True)
    assert ended(client, run.id, 60).status == "failed"
    # It ran in an earlier start, and this one does not hang.
    ran = server.cli("restart", server.name, "--force", "--rerun", "--json")
    assert (ran.code, ran.data["evidence"]) == (0, None)
    assert ended(client, run.id).status == "failed"
