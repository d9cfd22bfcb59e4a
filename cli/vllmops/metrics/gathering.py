"""Gathers a server's state beside whoever scrapes it, while somebody scrapes.

A scrape shows what was gathered last and waits for nothing. Nobody scrapes, nothing is gathered.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..background import ErrorReporter
from ..protocol.view import View

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOK_S = 5.0  # from one look at the server to the next, for each API server
IDLE_S = 120.0  # after the last scrape nothing is gathered
OLD = 6  # so many pauses later, what was gathered shows no present
SHARE = 0.002  # of a core that the thread takes at most; whom it asks take nearly as much again


class Gathering:
    """A collector of prometheus_client: shows what its thread gathered last; never raises.

    Args:
        gather: one look at the server, and how many API servers it has.
        say: takes what does not work, in words.
        wait: waits for the given seconds; where it returns True, the thread ends.
    """

    def __init__(
        self,
        gather: Callable[[], tuple[View, int]],
        say: Callable[[str], object],
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.gather = gather
        self.wait = wait
        self.shown: list[Metric] = []
        self.gathered = self.scraped = 0.0
        self.pause_s = LOOK_S
        self.pid = 0
        self.lock = threading.Lock()
        self.reporter = ErrorReporter("the server's state is not in /metrics", say)

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the server."""
        return []

    def collect(self) -> list[Metric]:
        """What was gathered last, nothing if that is old; begins to gather."""
        try:
            self.scraped = now = time.monotonic()
            if self.pid != os.getpid() and self.lock.acquire(blocking=False):
                try:
                    self.pid = os.getpid()  # a forked process has no thread
                    threading.Thread(target=self.run, name="vllmops-metrics", daemon=True).start()
                finally:
                    self.lock.release()
            return self.shown if now - self.gathered < OLD * self.pause_s else []
        except Exception as error:
            self.reporter.report(error)
            return []

    def run(self) -> None:
        """Gather until nobody scrapes any more."""
        # Not before vLLM has imported prometheus_client, which reads the environment then.
        from . import families, state  # noqa: PLC0415

        while time.monotonic() - self.scraped < IDLE_S:
            began = time.thread_time()
            try:
                view, servers = self.gather()
                self.shown = families.metrics(state.samples(view))
                spent_s = time.thread_time() - began
                self.pause_s = max(LOOK_S * max(servers, 1), spent_s / SHARE)
                self.gathered = time.monotonic()
            except Exception as error:
                self.reporter.report(error)
            if self.wait(self.pause_s):
                break
        self.pid = 0
