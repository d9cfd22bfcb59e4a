"""Nothing of a server survives its end, whatever ends it; and a server survives its supervisor.

That nothing survives the death of processes is seen where servers of another kind end: `lose`.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading

import pytest

from ..support.waiting import until
from .conftest import Ahead, Cli, Live, kill


class Foreground:
    """A ``vllmops serve`` in a terminal of its own."""

    def __init__(self, cli: Cli, name: str) -> None:
        self.terminal, theirs = pty.openpty()
        self.process = cli.begin(
            *("serve", "--demo", "text", "--name", name),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: os.set_blocking(0, True),
        )
        os.close(theirs)
        self.said = b""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.live = Live(cli, name)

    def read(self) -> None:
        try:
            while chunk := os.read(self.terminal, 4096):
                self.said += chunk
        except OSError:
            pass  # closed

    def wait_ready(self) -> None:
        until(lambda: b"is ready at" in self.said or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.said.decode()


@pytest.fixture(scope="module")
def foregrounds(cli: Cli) -> Ahead[Foreground]:
    def start(item: pytest.Item) -> Foreground:
        serve = Foreground(cli, f"fg-{abs(hash(item.nodeid)) % 10**6}")
        serve.wait_ready()
        return serve

    return Ahead("serve", start)


@pytest.fixture
def serve(foregrounds: Ahead[Foreground], request: pytest.FixtureRequest) -> Foreground:
    return foregrounds.take(request)


@pytest.mark.parametrize("ending", ["closed terminal", "kill -9"])
def test_nothing_survives_a_foreground_serve(serve: Foreground, ending: str) -> None:
    footprint = serve.live.footprint()
    assert footprint.segments
    if ending == "closed terminal":
        # What the kernel sends when the terminal closes; the reader above keeps ours open.
        serve.process.send_signal(signal.SIGHUP)
        serve.process.wait(60)
    else:
        serve.process.kill()
        serve.process.wait(60)
    footprint.wait_gone()
    assert serve.live.row["state"] in {"stopped", "failed"}


def test_a_foreground_serve_outlives_its_supervisor_and_ends_by_ctrl_c(serve: Foreground) -> None:
    footprint = serve.live.footprint()
    first = serve.live.supervisor()
    kill(first)
    until(lambda: serve.live.row["supervised"] and serve.live.supervisor() != first)
    assert serve.live.complete().status_code == 200
    assert serve.process.poll() is None
    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(60) == 130
    footprint.wait_gone()


def test_a_server_that_dies_while_loading_leaves_nothing(cli: Cli) -> None:
    serving = cli.begin(
        *("serve", "--demo", "text", "--name", "early", "--env", "SPAWNED=1", "--json"),
        stdout=subprocess.PIPE,
    )
    live = Live(cli, "early")
    until(lambda: "early" in cli("ps", "--all").out)
    worker = until(lambda: live.pids().get("worker"), 120)
    footprint = live.footprint()
    kill(worker)
    out, _ = serving.communicate(timeout=60)
    assert serving.returncode == 1
    assert b"serve.failed" in out
    footprint.wait_gone(0)
