"""Probes of a real server: red in time where it hangs, and never where it works or is to rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllmops.rpc import agent

from ..support.extent import EVERYTHING, long
from ..support.waiting import until
from .conftest import Cli, PlugIn, free_port, launch
from .hangs import ARGUMENTS, ENVIRONMENT, HANGS, PLACE, PLUG_IN, SPINS, Hang, Prone, livelock

RED_S = 30.0
SATURATED_S = 300.0 if EVERYTHING else 40.0
STEP_S = 30.0  # of a long prompt
LONG = 1150  # tokens of one; the KV cache takes 1,280
# A large model on a small machine: each token takes its time, in a prompt as in a response.
SLOW = """
import os
import time
from functools import wraps
from multiprocessing import current_process

def register():
    if "Worker" not in current_process().name:
        return
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    path = os.path.join(os.environ["VLLM_TEST_HANGS"], "slow")
    run = GPUModelRunner._model_forward
    numbers = torch.ones(400, 400)

    @wraps(run)
    def forward(self, *args, **fields):
        if os.path.exists(path):
            with open(path) as file:
                tokens = fields["positions"].shape[-1]
                end = time.monotonic() + tokens * float(file.read())
            while time.monotonic() < end:
                torch.mm(numbers, numbers)
        return run(self, *args, **fields)

    GPUModelRunner._model_forward = forward
"""


class Probed:
    """What a watch that listens says of a server, asked twice a second.

    Args:
        server: the server.
        url: of the watch.
    """

    def __init__(self, server: Prone, url: str) -> None:
        self.server = server
        self.url = url

    def ask(self, kind: str) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}/{kind}", timeout=5)
        return answer.status_code, answer.text

    def green(self, kind: str = "livez") -> bool:
        return self.ask(kind)[0] == 200

    @contextmanager
    def never_red(self) -> Iterator[None]:
        """Nothing is said to be dead in this block."""
        over, words = threading.Event(), list[tuple[int, str]]()

        def look() -> None:
            while not over.wait(0.5):
                words.append(self.ask("livez"))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
        assert len(words) > 3
        assert {code for code, _ in words} == {200}, words


@pytest.fixture(scope="module")
def probed(cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    place = tmp_path_factory.mktemp("probed")
    folders = (plug_in("hangs", PLUG_IN), plug_in("slow", SLOW))
    paths = ":".join([*map(str, folders), cli.environment["PYTHONPATH"]])
    launched = launch(
        cli, place / "log", {**ENVIRONMENT, PLACE: str(place), "PYTHONPATH": paths}, *ARGUMENTS
    )
    pid, port = str(launched.process.pid), str(free_port())
    watch = None
    try:
        launched.wait_up()
        (place / "slow").write_text(str(STEP_S / LONG))
        words = ("watch", "-t", pid, "--listen", port, "-o", str(place / "kept"))
        watch = cli.begin(*words)
        made = Probed(Prone(cli, pid, launched, place), f"http://127.0.0.1:{port}")

        def up() -> bool:
            try:
                return made.green("readyz")
            except httpx.TransportError:
                return False

        until(up)
        yield made
    finally:
        if watch:
            watch.terminate()
            watch.wait(30)
        launched.stop()


def beats(server: Prone) -> list[Any]:
    return [agent.beat(process) for process in server.processes.values()]


def hasten(server: Prone) -> None:
    (server.place / "slow").unlink(missing_ok=True)


def bundles(server: Prone) -> set[Path]:
    return set((server.place / "kept").glob("*.tar.gz"))


@long
def test_one_step_that_takes_long_is_no_stall(probed: Probed) -> None:
    """The server is as slow from the start; the other tests make it fast."""
    with probed.never_red():
        for _ in range(5):
            assert probed.server.ask(max_tokens=8, ignore_eos=True).answer(60) == 200
        began = time.monotonic()
        asked = probed.server.ask(text="z" * LONG, max_tokens=1)
        assert asked.answer(STEP_S + 60) == 200
        assert time.monotonic() - began >= STEP_S
        until(lambda: probed.green("readyz"))


def test_a_saturated_server_lives(probed: Probed) -> None:
    hasten(probed.server)
    over, answered = threading.Event(), []

    def load() -> None:
        while not over.is_set():
            answered.append(probed.server.ask(max_tokens=200, ignore_eos=True).answer(120))

    with probed.never_red():
        threads = [threading.Thread(target=load) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(SATURATED_S)
        over.set()
        for thread in threads:
            thread.join()
    assert set(answered) == {200}
    assert bundles(probed.server) == set()


@long
def test_a_paused_server_lives_and_is_not_ready(probed: Probed) -> None:
    url = probed.server.url

    def post(route: str, **query: Any) -> None:
        assert httpx.post(f"{url}/{route}", params=query, timeout=30).status_code == 200

    with probed.never_red():
        post("pause", mode="keep")
        asked = probed.server.ask()
        until(lambda: "paused" in probed.ask("readyz")[1])
        time.sleep(20)
        assert not probed.green("readyz")
        post("resume")
        assert asked.answer(60) == 200
        until(lambda: probed.green("readyz"))


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(hang, marks=() if hang.made is livelock else long, id=hang.name)
        for hang in (*SPINS, *HANGS)
    ],
)
def test_a_hang_is_dead_in_time_and_its_evidence_is_there(probed: Probed, hang: Hang) -> None:
    """The last one ends the server."""
    server, before = probed.server, bundles(probed.server)
    hasten(server)
    until(lambda: probed.green("readyz"), 60)
    for _ in range(30 if hang in SPINS else 0):  # what is usual is known
        assert server.ask().answer(60) == 200
    with hang.made(server) as _asked:  # one that nobody holds is aborted
        began = time.monotonic()
        until(lambda: not probed.green("readyz"), 60, lambda: beats(server))
        unready_s = time.monotonic() - began
        until(lambda: not probed.green(), 150, lambda: probed.ask("livez?verbose"))
        red_s = time.monotonic() - began
        assert len(bundles(server) - before) == 1
        print(f"{hang.name}: not ready after {unready_s:.1f} s, not live after {red_s:.1f} s")
        print(probed.ask("livez")[1])
        assert red_s <= RED_S
    if hang.lives_on:
        until(lambda: probed.green() and probed.green("readyz"), 60)
