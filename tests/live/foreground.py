"""A server in the foreground: it ends with its ``serve``, whatever ends that."""

from __future__ import annotations

import os
import pty
import threading

from ..support.ports import free_port
from ..support.waiting import until
from .conftest import Cli, Live


class Foreground:
    """A ``vllmops serve`` in a terminal of its own, whose server is ready.

    Args:
        cli: with whose state directory.
        name: of the server.
        words: more of the command line, the model first.
    """

    def __init__(self, cli: Cli, name: str, *words: str) -> None:
        self.terminal, theirs = pty.openpty()
        self.process = cli.begin(
            *("serve", "--name", name, "--port", str(free_port()), *words),
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
        until(lambda: b"is ready at" in self.said or self.process.poll() is not None, 300)
        assert self.process.poll() is None, self.said.decode()

    def read(self) -> None:
        try:
            while chunk := os.read(self.terminal, 4096):
                self.said += chunk
        except OSError:
            pass  # closed

    def end_by(self, number: int) -> None:
        """End it by a signal: nothing of its server is left, and how it ended is known."""
        footprint = self.live.footprint()
        assert footprint.segments
        self.process.send_signal(number)
        self.process.wait(60)
        footprint.wait_gone()
        # Its supervisor writes that down after the last process has gone.
        until(lambda: self.live.row["state"] in {"stopped", "failed"}, 10)
