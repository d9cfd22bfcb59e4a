"""The server's state in vLLM's ``/metrics``, gathered beside the event loop while somebody scrapes.

A scrape shows what was gathered last and waits for nothing. Nobody scrapes, nothing is gathered.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..background import ErrorReporter
from ..errors import VllmopsError
from ..host.roles import Role
from ..protocol.server import Observation
from ..protocol.view import StoreUse, View
from . import engine, objects
from .adapters import metrics as adapter
from .imports import when_imported
from .log import log

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from ..protocol.remote import Member
    from ..rpc.view import Viewer
    from ..store.store import ResponseStore, Stats

LOOK_S = 5.0  # from one look at the server to the next, for each API server
IDLE_S = 120.0  # after the last scrape nothing is gathered
OLD = 6  # so many pauses later, what was gathered shows no present
SHARE = 0.005  # of a core that the thread takes at most
TIMEOUT_S = 2.0
STORE_S = 60.0  # from one count of the store to the next; it goes through many rows


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


class Store:
    """The store of this API server, counted now and then by its own event loop."""

    def __init__(self) -> None:
        self.counting: Future[Stats] | None = None
        self.due = 0.0
        self.began = 0.0
        self.last: StoreUse | None = None

    def use(self) -> StoreUse | None:
        """What was counted last; never waits."""
        store: Any = getattr(objects.latest("responses"), "store", None)
        now = time.monotonic()
        if self.counting and self.counting.done():
            counting, self.counting = self.counting, None
            self.due = now + max(STORE_S, (now - self.began) / SHARE)
            failed = store is None or counting.exception()
            self.last = None if failed else used(store, counting.result())
        if store is not None and self.counting is None and now >= self.due:
            from ..store.store import EVERYBODY, ResponseStore  # noqa: PLC0415

            if not isinstance(store, ResponseStore):  # vLLM's own
                return None
            try:
                _, loop = engine.front_end()
            except RuntimeError:  # not up yet
                return self.last
            self.began = now
            self.counting = asyncio.run_coroutine_threadsafe(store.stats(EVERYBODY), loop)
        return self.last


def used(store: ResponseStore, found: Stats) -> StoreUse:
    return StoreUse(
        backend=type(store.backend).__name__.lower(),
        statuses=found.statuses,
        bytes=found.bytes,
        evictions=found.evictions,
        capacity=store.backend.limits.max_size,
    )


def install() -> None:
    """Show the server's state in the ``/metrics`` of an API server."""
    collector = Gathering(server())
    for module, show in adapter.SHOWN.items():
        when_imported(module, objects.guarded(partial(show, collector)))


def server() -> Callable[[], tuple[View, int]]:
    """Looks at the server of this process, again and again."""
    viewer: list[Viewer] = []
    store = Store()

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
        return replace(viewer[0].view(seen), store=store.use()), count

    return look
