"""Probes of a real server: red in time where it hangs, and never where it works or is to rest."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllmops.collect.agents import agent_files

from ..support.extent import EVERYTHING, long
from ..support.ports import free_port
from ..support.waiting import until
from .conftest import Cli, Live, launch
from .hangs import ARGUMENTS, DEFECTS, HANGS, SPINS, Hang, Prone, livelock, prone, slow

RED_S = 60.0  # a stall is sure after 30 s, and the busy machine needs some
SATURATED_S = 7200.0 if EVERYTHING else 300.0
STEP_S = 30.0  # of a long prompt
LONG = 1150  # tokens of one; the KV cache takes 1,280
LOWEST = ("setsid", "nice", "-n", "19")
# Where Linux shares processors out between sessions first, priority tells within one alone. A third
# of a share: with a tenth, beside twelve that compute, /health is silent for longer than patience.
LITTLE, USUAL = "5", "0"


@dataclass(frozen=True)
class Load:
    """Requests that clients send one after the other.

    Args:
        name: of the test.
        clients: how many there are.
        prompt: characters of a prompt, which are about as many tokens.
        tokens: of an answer.
        pause_s: seconds between an answer and the next request.
    """

    name: str
    clients: int
    prompt: int = 1
    tokens: int = 1
    pause_s: float = 0.0

    @contextmanager
    def send_requests(self, server: Prone) -> Iterator[list[object]]:
        """Send them until the end of the block; gives the answers' statuses, and what failed."""
        over, answers, numbers = threading.Event(), list[object](), itertools.count()

        def send() -> None:
            while not over.wait(self.pause_s):
                text = f"{next(numbers)} ".ljust(self.prompt, "z")  # no prefix of another
                try:
                    asked = server.send_chat_request(
                        text=text, max_tokens=self.tokens, ignore_eos=True
                    )
                    while asked.answer(1.0) is None and not over.is_set():
                        pass
                except (OSError, HTTPException) as error:
                    answers.append(error)
                    return
                if asked.status is None:
                    asked.abort()
                else:
                    answers.append(asked.status)

        threads = [threading.Thread(target=send) for _ in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            over.set()
            for thread in threads:
                thread.join()


SATURATED = Load("saturated", 32, prompt=20, tokens=20)  # half of them wait
LOADS = (
    Load("idle", 0),
    Load("short requests", 2, tokens=4, pause_s=0.2),
    SATURATED,
    Load("long prompts", 4, prompt=LONG),
)


class Probed:
    """What a watch that listens says of a server, asked twice a second.

    Args:
        server: the server.
        url: of the watch.
    """

    def __init__(self, server: Prone, url: str) -> None:
        self.server = server
        self.url = url

    def fetch_probe(self, kind: str) -> tuple[int, str]:
        answer = httpx.get(f"{self.url}/{kind}", timeout=30)
        return answer.status_code, answer.text

    def green(self, kind: str = "livez") -> bool:
        return self.fetch_probe(kind)[0] == 200

    @contextmanager
    def never_red(self) -> Iterator[None]:
        """Nothing is said to be dead in this block."""
        over, words = threading.Event(), list[tuple[int, str]]()

        def poll_liveness() -> None:
            while not over.wait(0.5):
                try:
                    words.append(self.fetch_probe("livez"))
                except httpx.TransportError as error:
                    words.append((0, repr(error)))

        looking = threading.Thread(target=poll_liveness)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
        assert len(words) > 3
        assert [answer for answer in words if answer[0] != 200] == []


@contextmanager
def probed_by_watch(server: Prone) -> Iterator[Probed]:
    """A watch that listens, from when it is green."""
    port = str(free_port())
    words = ("watch", "-t", server.name, "--listen", port, "-o", str(server.place / "kept"))
    # A session of its own, as `serve` gives it, has a share of the processors of its own.
    watch = server.cli.begin(*words, start_new_session=True)
    made = Probed(server, f"http://127.0.0.1:{port}")

    def is_watch_ready() -> bool:
        try:
            return made.green("readyz")
        except httpx.TransportError:
            return False

    try:
        until(is_watch_ready)
        yield made
    finally:
        watch.terminate()
        watch.wait(30)


@pytest.fixture(scope="module")
def server_probe(hung_pair: tuple[Prone, Live]) -> Iterator[Probed]:
    with probed_by_watch(hung_pair[0]) as made:
        yield made


@pytest.fixture
def doomed_server_probe(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """One of its own, for hangs that end it."""
    with prone(cli, tmp_path_factory.mktemp("doomed"), DEFECTS, *ARGUMENTS) as server:
        server.launched.wait_up()
        with probed_by_watch(server) as made:
            yield made


def beats(server: Prone) -> list[Any]:
    return [agent_files.read_heartbeat(process) for process in server.processes.values()]


def bundles(server: Prone) -> set[Path]:
    return set((server.place / "kept").glob("*.tar.gz"))


@long
def test_a_long_step_is_not_a_stall(server_probe: Probed) -> None:
    with slow(server_probe.server, STEP_S / LONG), server_probe.never_red():
        for _ in range(5):
            assert (
                server_probe.server.send_chat_request(max_tokens=8, ignore_eos=True).answer(60)
                == 200
            )
        began = time.monotonic()
        asked = server_probe.server.send_chat_request(text="z" * LONG, max_tokens=1)
        assert asked.answer(STEP_S + 60) == 200
        assert time.monotonic() - began >= STEP_S
        until(lambda: server_probe.green("readyz"))


@pytest.fixture
def starved_server_probe(cli: Cli, tmp_path: Path) -> Iterator[Probed]:
    """A server that gets what others leave of the processors; its watch gets its share."""
    launched = launch(cli, tmp_path / "log", {}, before=LOWEST)
    server = Prone(cli, str(launched.process.pid), launched, tmp_path)
    try:
        launched.wait_up()
        with probed_by_watch(server) as made:
            share(server, LITTLE)
            yield made
    finally:
        share(server, USUAL)
        launched.stop()


def share(server: Prone, nice: str) -> None:
    """Set what its session gets of the processors."""
    with suppress(OSError):  # a kernel without such groups, a server that has ended
        Path(f"/proc/{server.name}/autogroup").write_text(nice)


@pytest.mark.timeout(0 if EVERYTHING else 3 * SATURATED_S)
def test_a_saturated_server_lives(starved_server_probe: Probed) -> None:
    """`bootstrap.py test` runs this one beside the other live tests."""
    with (
        SATURATED.send_requests(starved_server_probe.server) as answers,
        starved_server_probe.never_red(),
    ):
        time.sleep(SATURATED_S)
    print(f"{len(answers)} requests in {SATURATED_S:g} s")
    assert set(answers) == {200}
    assert bundles(starved_server_probe.server) == set()


@long
def test_a_paused_server_lives_and_is_not_ready(server_probe: Probed) -> None:
    url = server_probe.server.url

    def post(route: str, **query: Any) -> None:
        assert httpx.post(f"{url}/{route}", params=query, timeout=30).status_code == 200

    with server_probe.never_red():
        post("pause", mode="keep")
        asked = server_probe.server.send_chat_request()
        until(lambda: "paused" in server_probe.fetch_probe("readyz")[1])
        time.sleep(20)
        assert not server_probe.green("readyz")
        post("resume")
        assert asked.answer(60) == 200
        until(lambda: server_probe.green("readyz"))


@pytest.mark.xdist_group("hung_pair")  # which most of them ask for
@pytest.mark.parametrize(
    ("hang", "load"),
    [
        pytest.param(
            hang,
            load,
            marks=() if hang.made is livelock and not load.clients else long,
            id=f"{hang.name}, {load.name}",
        )
        for hang in (*SPINS, *HANGS)
        for load in LOADS
    ],
)
def test_a_hang_is_dead_in_time_and_its_evidence_is_there(
    hang: Hang, load: Load, request: pytest.FixtureRequest
) -> None:
    probed: Probed = request.getfixturevalue(
        "server_probe" if hang.lives_on else "doomed_server_probe"
    )
    server, before = probed.server, bundles(probed.server)
    until(lambda: probed.green("readyz"), 60)
    for _ in range(30 if hang in SPINS else 0):  # what is usual is known
        assert server.send_chat_request().answer(60) == 200
    with load.send_requests(server) as answers:
        until(lambda: len(answers) >= 20 * load.clients, 180)
        with hang.made(server) as _asked:  # one that nobody holds is aborted
            began = time.monotonic()
            until(lambda: not probed.green("readyz"), 60, lambda: beats(server))
            unready_s = time.monotonic() - began
            until(lambda: not probed.green(), 150, lambda: probed.fetch_probe("livez?verbose"))
            red_s = time.monotonic() - began
            assert len(bundles(server) - before) == 1
            said = f"not ready after {unready_s:.1f} s, not live after {red_s:.1f} s"
            print(f"{hang.name}, {load.name}: {said}")
            print(probed.fetch_probe("livez")[1])
            assert red_s <= RED_S
    if hang.lives_on:
        until(lambda: probed.green() and probed.green("readyz"), 60)
