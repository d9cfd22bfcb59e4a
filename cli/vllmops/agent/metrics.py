"""The server's state in vLLM's ``/metrics``, gathered beside the event loop while somebody scrapes.

A scrape shows what was gathered last and waits for nothing. Nobody scrapes, nothing is gathered.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..background import ErrorReporter
from ..errors import VllmopsError
from ..host.roles import Role
from ..protocol.server import Observation
from ..protocol.view import View
from . import objects
from .adapters import metrics as adapter
from .imports import when_imported
from .log import log

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from ..protocol.remote import Member
    from ..rpc.view import Viewer

LOOK_S = 5.0  # from one look at the server to the next, for each API server
IDLE_S = 120.0  # after the last scrape nothing is gathered
OLD = 6  # so many pauses later, what was gathered shows no present
SHARE = 0.005  # of a core that the thread takes at most
TIMEOUT_S = 2.0


class Far:
    """The agent of a process, on this node or on another.

    Args:
        process: of this server.
    """

    def __init__(self, process: Member) -> None:
        self.at = f"{process.pid}{process.at and '@'}{process.at}"

    def ask(self, method: str, path: str, kind: type[Any]) -> Any:
        """What it answers; raises VllmopsError."""
        from ..rpc import agent  # noqa: PLC0415
        from . import remote  # noqa: PLC0415

        try:
            status, content = remote.passed_on(method, self.at + path, None, TIMEOUT_S)
        except remote.NO_ANSWER as error:
            raise VllmopsError("agent.broken", str(error)) from error
        if status != remote.OK:
            raise VllmopsError("agent.broken", f"it answered {status} to {path}")
        return agent.decode(f"the agent of pid {self.at}", content, kind)


class Gathering:
    """A collector of prometheus_client: shows what its thread gathered last; never raises.

    Args:
        gather: one look at the server, and how many API servers it has.
        wait: waits for the given seconds; where it returns True, the thread ends.
    """

    def __init__(
        self, gather: Callable[[], tuple[View, int]], wait: Callable[[float], object] = time.sleep
    ) -> None:
        self.gather = gather
        self.wait = wait
        self.shown: list[Metric] = []
        self.gathered = self.scraped = 0.0
        self.pause_s = LOOK_S
        self.pid = 0
        self.lock = threading.Lock()
        self.reporter = ErrorReporter("the server's state is not in /metrics", log.warning)

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
        from ..metrics import families, state  # noqa: PLC0415

        while time.monotonic() - self.scraped < IDLE_S:
            began = time.thread_time()
            try:
                view, servers = self.gather()
                self.shown = families.metrics(state.samples(view))
                self.gathered = time.monotonic()
                spent_s = time.thread_time() - began
                self.pause_s = max(LOOK_S * max(servers, 1), spent_s / SHARE)
            except Exception as error:
                self.reporter.report(error)
            if self.wait(self.pause_s):
                break
        self.pid = 0


def install() -> None:
    """Show the server's state in the ``/metrics`` of an API server."""
    collector = Gathering(server())
    for module, show in adapter.SHOWN.items():
        when_imported(module, objects.guarded(partial(show, collector)))


def server() -> Callable[[], tuple[View, int]]:
    """Looks at the server of this process, again and again."""
    viewer: list[Viewer] = []

    def look() -> tuple[View, int]:
        from ..metrics.state import differ  # noqa: PLC0415
        from ..rpc.view import Viewer  # noqa: PLC0415 - slow, and nobody may ever scrape
        from . import remote  # noqa: PLC0415

        if not viewer:
            viewer.append(Viewer(Far, differ))
        found = remote.members()
        seen = Observation(
            at_s=time.monotonic(),
            pulses=found.pulses,
            processes=found.processes,
            compilers=found.compilers,
        )
        count = sum(process.role == Role.API for process in found.processes)
        return viewer[0].view(seen), count

    return look
