"""Gathers a server's state beside whoever scrapes it, while somebody scrapes.

A scrape shows what was gathered last and waits for nothing. Nobody scrapes, nothing is gathered.

Of several API servers one gathers for all, by a file that they share: if each showed what it had
gathered itself, a counter would go down from one scrape to the next, which Prometheus takes for a
restart.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..model.server_metrics import MetricsSnapshot
from ..support.background import ErrorReporter
from ..support.files import read_private_file, write_atomically

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOK_S = 5.0  # from one look at the server to the next, for each API server
IDLE_S = 120.0  # after the last scrape nothing is gathered
OLD = 6  # so many pauses later, what was gathered shows no present
SHARE = 0.002  # of a core that the thread takes at most; whom it asks take nearly as much again
MISSED = 1.5  # so many pauses after the last look another API server takes it over
MOST_BYTES = 16 << 20


class SharedSamples(msgspec.Struct, frozen=True):
    """What is in the shared file.

    Args:
        pid: of the process that gathered it.
        collected_at: when, by the monotonic clock, which is that of all processes of a machine.
        pause_s: seconds until it gathers again.
        samples: each as `metric_families.MetricSample`.
    """

    pid: int
    collected_at: float = msgspec.field(name="at")
    pause_s: float
    samples: Sequence[tuple[str, float, Mapping[str, str]]]


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
TOLD = msgspec.json.Decoder(SharedSamples)


class BackgroundCollector:
    """A collector of prometheus_client: shows what its thread gathered last; never raises.

    Args:
        gather: one look at the server, and how many API servers it has.
        log_error: takes what does not work, in words.
        wait: waits for the given seconds; where it returns True, the thread ends.
        locate_shared_file: the file that the API servers of one server share; None where there is
            one.
    """

    def __init__(
        self,
        gather: Callable[[], tuple[MetricsSnapshot, int]],
        log_error: Callable[[str], object],
        wait: Callable[[float], object] = time.sleep,
        locate_shared_file: Callable[[], Path | None] = lambda: None,
    ) -> None:
        self.gather = gather
        self.wait = wait
        self.locate_shared_file = locate_shared_file
        self.shown_metrics: list[Metric] = []
        self.collected_at = self.scraped_at = 0.0
        self.pause_s = LOOK_S
        self.pid = 0
        self.shared_fingerprint: object = None  # the shared file, as it was read
        self.writer_pid = 0  # the process that wrote it
        self.lock = threading.Lock()
        self.reporter = ErrorReporter("the server's state is not in /metrics", log_error)

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the server."""
        return []

    def collect(self) -> list[Metric]:
        """What was gathered last, nothing if that is old; begins to gather."""
        try:
            self.scraped_at = now = time.monotonic()
            if self.lock.acquire(blocking=False):
                try:
                    self.load_shared_samples()
                    if self.pid != os.getpid():  # a forked process has no thread
                        work = threading.Thread(
                            target=self.run_while_scraped, name="vllmops-metrics", daemon=True
                        )
                        work.start()
                        self.pid = os.getpid()
                finally:
                    self.lock.release()
            return self.shown_metrics if now - self.collected_at < OLD * self.pause_s else []
        except Exception as error:
            self.reporter.report(error)
            return []

    def run_while_scraped(self) -> None:
        """Gather until nobody scrapes any more."""
        while time.monotonic() - self.scraped_at < IDLE_S:
            try:
                with self.lock:
                    others = self.load_shared_samples()
                if not others:
                    self.collect_samples()
            except Exception as error:
                self.reporter.report(error)
            if self.wait(self.pause_s):
                break
        self.pid = 0

    def collect_samples(self) -> None:
        """Gather once, for this process and those that share its file."""
        # Not before vLLM has imported prometheus_client, which reads the environment then.
        from . import (  # noqa: PLC0415
            metric_families,
            metric_values,
        )

        began = time.thread_time()
        view, servers = self.gather()
        samples = list(metric_values.make_samples(view))
        shown = metric_families.build_metrics(samples)
        spent_s = time.thread_time() - began
        self.pause_s = max(LOOK_S * max(servers, 1), spent_s / SHARE)
        at = time.monotonic()
        try:
            if place := self.locate_shared_file():
                told = SharedSamples(os.getpid(), at, self.pause_s, samples)
                write_atomically(place, msgspec.json.encode(told), durable=False)
        finally:
            self.shown_metrics, self.collected_at = shown, at

    def load_shared_samples(self) -> bool:
        """Take what is in the shared file; whether another process has just gathered it."""
        if (place := self.locate_shared_file()) is None:
            return False
        now = time.monotonic()
        try:
            found = place.stat()
            if self.shared_fingerprint != (mark := (found.st_ino, found.st_mtime_ns)):
                from . import metric_families  # noqa: PLC0415 - as above

                told = TOLD.decode(read_private_file(place, None, MOST_BYTES))
                self.shared_fingerprint, self.writer_pid = mark, told.pid
                if self.collected_at < told.collected_at <= now:
                    self.shown_metrics = metric_families.build_metrics(
                        metric_families.MetricSample(*one) for one in told.samples
                    )
                    self.collected_at, self.pause_s = told.collected_at, told.pause_s
        except FileNotFoundError:
            return False
        except Exception as error:
            self.reporter.report(error)
            return False
        return self.writer_pid != os.getpid() and now - self.collected_at < MISSED * self.pause_s
