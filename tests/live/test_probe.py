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
from ..support.ports import free_port
from ..support.waiting import until
from .conftest import Cli, Live, PlugIn
from .hangs import HANGS, SPINS, Hang, Prone, livelock, prone, slow

RED_S = 30.0
SATURATED_S = 300.0 if EVERYTHING else 25.0
STEP_S = 30.0  # of a long prompt
LONG = 1150  # tokens of one; the KV cache takes 1,280


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


@contextmanager
def probed_by_watch(server: Prone) -> Iterator[Probed]:
    """A watch that listens, from when it is green."""
    port = str(free_port())
    words = ("watch", "-t", server.name, "--listen", port, "-o", str(server.place / "kept"))
    watch = server.cli.begin(*words)
    made = Probed(server, f"http://127.0.0.1:{port}")

    def up() -> bool:
        try:
            return made.green("readyz")
        except httpx.TransportError:
            return False

    try:
        until(up)
        yield made
    finally:
        watch.terminate()
        watch.wait(30)


@pytest.fixture(scope="module")
def probed(hung_pair: tuple[Prone, Live]) -> Iterator[Probed]:
    with probed_by_watch(hung_pair[0]) as made:
        yield made


@pytest.fixture(scope="module")
def doomed(cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """One of its own, for hangs that end it."""
    with prone(cli, plug_in, tmp_path_factory.mktemp("doomed")) as server:
        server.launched.wait_up()
        with probed_by_watch(server) as made:
            yield made


def beats(server: Prone) -> list[Any]:
    return [agent.beat(process) for process in server.processes.values()]


def bundles(server: Prone) -> set[Path]:
    return set((server.place / "kept").glob("*.tar.gz"))


@long
def test_one_step_that_takes_long_is_no_stall(probed: Probed) -> None:
    with slow(probed.server, STEP_S / LONG), probed.never_red():
        for _ in range(5):
            assert probed.server.ask(max_tokens=8, ignore_eos=True).answer(60) == 200
        began = time.monotonic()
        asked = probed.server.ask(text="z" * LONG, max_tokens=1)
        assert asked.answer(STEP_S + 60) == 200
        assert time.monotonic() - began >= STEP_S
        until(lambda: probed.green("readyz"))


def test_a_saturated_server_lives(probed: Probed) -> None:
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
def test_a_hang_is_dead_in_time_and_its_evidence_is_there(
    hung_pair: tuple[Prone, Live], hang: Hang, request: pytest.FixtureRequest
) -> None:
    probed = request.getfixturevalue("probed" if hang.lives_on else "doomed")
    server, before = probed.server, bundles(probed.server)
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
