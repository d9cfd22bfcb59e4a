"""Looks at servers, each in threads of its own: one that does not answer holds up no other one.

A look reads heartbeats, files of some hundred bytes. What costs a server something, its metrics,
requests and caches, is asked for less often.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from itertools import chain, repeat

import msgspec

from ..background import ErrorReporter, thread
from ..diagnose.findings import Finding
from ..diagnose.progress import DEAD, Stall
from ..diagnose.vigil import Vigil
from ..errors import VllmopsError
from ..host.roles import Role
from ..instances.logs import Tail
from ..instances.record import Folder
from ..instances.servers import Server, find, pending, resolve
from ..protocol.caches import ProcessCaches
from ..protocol.server import Observation, Unseen
from ..requests import listing
from ..requests.listing import Row
from ..rpc import agent
from ..watch.watch import SLIP_S
from ..watch.watched import Phase, Watched

LOOK_S = 1.0
METRICS_S = 5.0
REQUESTS_S, CACHES_S = 3.0, 15.0
DISCOVER_S = 20.0  # the process table takes long to read
RETRY_S = 10.0
STUCK_S = 30.0
KEPT = 120  # looks
LOG_BYTES, LOG_LINES = 64 << 10, 1000


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a server told when they were last asked.

    Args:
        requests: in flight, the oldest first.
        findings: requests that only one side knows.
        caches: by process.
        unseen: what could not be asked for.
        note: which nodes of the server do not answer; empty if all do.
    """

    requests: tuple[Row, ...] = ()
    findings: tuple[Finding, ...] = ()
    caches: tuple[ProcessCaches, ...] = ()
    unseen: tuple[Unseen, ...] = ()
    note: str = ""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment.

    Args:
        target: what ``--target`` takes.
        at_s: by the monotonic clock.
        state: of an instance, such as ``starting``; empty for other servers.
        stage: the stage of an instance that starts.
        url: where it answers, None if unknown.
        model: as given to vLLM.
        why: why it is not up; empty if it is.
        seen: its processes; None if there are none.
        stalls: what has stopped.
        asked: what its processes told.
        problem: why nothing can be seen of it; None if something can.
    """

    target: str
    at_s: float
    state: str = ""
    stage: str = ""
    url: str | None = None
    model: str | None = None
    why: str = ""
    seen: Observation | None = None
    stalls: tuple[Stall, ...] = ()
    asked: Asked = Asked()
    problem: Unseen | None = None


class Follower:
    """Follows one server, over restarts.

    Args:
        target: what ``--target`` takes.
        server: as discovery found it; None to resolve the target.

    Attributes:
        looks: the last ones, oldest first.
        failure: why the target could not be resolved when it was last tried; None if it was.
        log: the last lines of its log, read while `reads_log` is set.
        lines_read: how many lines of it were read so far.
    """

    def __init__(self, target: str, server: Server | None = None) -> None:
        self.target = target
        self.server = server
        self.watched: Watched | None = None
        self.vigil = Vigil(LOOK_S)
        self.stalls: tuple[Stall, ...] = ()
        self.phase: Phase | None = None
        self.looks: tuple[Look, ...] = ()
        self.failure: VllmopsError | None = None
        self.asked = Asked()
        self.asked_s = self.resolved_s = self.cached_s = float("-inf")
        self.reads_log = False
        self.log: tuple[str, ...] = ()
        self.lines_read = 0
        self.tail: tuple[str, Tail] | None = None

    @property
    def last(self) -> Look | None:
        """The last look; None before the first."""
        return self.looks[-1] if self.looks else None

    def keep(self, look: Look) -> None:
        self.looks = (*self.looks[1 - KEPT :], look)

    # -- looking -----------------------------------------------------------------------------

    def look(self) -> None:
        """Take a look, and keep it."""
        now = time.monotonic()
        if self.watched is None:
            if now - self.resolved_s < RETRY_S:
                return
            try:
                self.watched = Watched(self.server or resolve(self.target))
            except VllmopsError as error:
                why = Unseen(self.target, error.code, error.message, error.hint)
                self.keep(Look(target=self.target, at_s=now, problem=why))
                self.failure = error
                return
            finally:
                self.resolved_s = time.monotonic()
        self.failure = None
        self.keep(self.seen(self.watched, now))
        if self.reads_log:
            self.read_log(self.watched.server)

    def seen(self, watched: Watched, now: float) -> Look:
        before, self.phase = self.phase, watched.phase()
        late = bool(self.looks) and now - self.looks[-1].at_s > LOOK_S + SLIP_S
        if self.phase is not before or late:
            self.vigil.begin()
            self.stalls = ()
        seen = None
        if self.phase is not Phase.OVER and watched.server.processes:
            asks = self.phase is Phase.UP and self.due(now)
            seen = watched.look(ask=asks)
            # Without heartbeats only metrics and health show a stall: other looks are no sign.
            if self.phase is Phase.UP and (asks or has_heartbeat(seen)):
                self.stalls = tuple(self.vigil.see(seen))
        server, record = watched.server, watched.server.record
        return Look(
            target=self.target,
            at_s=now,
            state=record.state if record else "",
            stage=record.stage if record else "",
            url=server.url,
            model=server.model,
            why="" if self.phase is Phase.UP else watched.why,
            seen=seen,
            stalls=self.stalls,
            asked=self.asked if self.phase is Phase.UP else Asked(),
        )

    def due(self, now: float) -> bool:
        """Whether to ask for metrics and health now: sooner if something has stopped."""
        last = self.vigil.looks[-1] if self.vigil.looks else None
        soon = last is None or (has_heartbeat(last) and self.vigil.step().ask)
        if soon or now - self.asked_s >= METRICS_S:
            self.asked_s = now
            return True
        return False

    # -- asking ------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask the server's processes for what heartbeats do not have."""
        look = self.last
        if self.watched is None or self.phase is not Phase.UP or look is None or not look.seen:
            self.asked = Asked()
            return
        server = self.watched.server
        if not look.seen.pulses:
            if all(process.state in DEAD for process in look.seen.processes):
                self.asked = Asked(note=self.asked.note)
                return
            hint = f"vllmops attach -t {self.target}"
            why = Unseen("requests and caches", "agent.absent", "no agent answers", hint)
            self.asked = Asked(unseen=(why,), note=self.asked.note)
            return
        found = requests(server) if busy(look.seen) else Asked()
        caches, note = self.asked.caches, self.asked.note
        if time.monotonic() - self.cached_s >= CACHES_S:
            caches, note = cached(server), server.note()
            self.cached_s = time.monotonic()
        self.asked = msgspec.structs.replace(found, caches=caches, note=note)

    def read_log(self, server: Server) -> None:
        """Read what was added to the log of an instance."""
        if server.name is None:
            return
        path = Folder(server.name).log
        if self.tail is None or self.tail[0] != server.name:
            offset = 0
            with suppress(OSError):
                offset = max(path.stat().st_size - LOG_BYTES, 0)
            self.tail = server.name, Tail(path, offset=offset)
        added = self.tail[1].lines()
        self.log = (*self.log, *added)[-LOG_LINES:]
        self.lines_read += len(added)


def has_heartbeat(seen: Observation) -> bool:
    """Whether heartbeats show if an engine makes progress."""
    return any(pulse.beat.still_s is not None for pulse in seen.pulses)


def busy(seen: Observation) -> bool:
    """Whether some process reports a request."""
    beats = [pulse.beat for pulse in seen.pulses]
    return any(b.running or b.waiting or b.handed or b.rendering_s for b in beats)


def requests(server: Server) -> Asked:
    """The requests of a server."""
    try:
        found = listing.take(server, STUCK_S)
    except VllmopsError as error:
        return Asked(unseen=(Unseen("requests", error.code, error.message, error.hint),))
    return Asked(
        requests=tuple(found.rows),
        findings=tuple(found.findings),
        unseen=tuple(
            Unseen(f"requests of {one.role} {one.pid}", one.code, one.why, one.hint)
            for one in found.silent
        ),
    )


def cached(server: Server) -> tuple[ProcessCaches, ...]:
    """The caches of the processes that answer."""
    asked = server.of(Role.API, Role.ENGINE)
    return tuple(agent.side_by_side(asked, lambda process: agent.reach(process).caches())[0])


class Board:
    """All servers that are shown.

    Args:
        targets: what ``--target`` takes; without any, every server of this machine, also those
            that start later.
        make: makes a follower.
    """

    def __init__(
        self,
        targets: Sequence[str],
        make: Callable[[str, Server | None], Follower] = Follower,
    ) -> None:
        self.make = make
        self.discovers = not targets
        self.followers: dict[str, Follower] = {}
        self.failures: deque[str] = deque(maxlen=1)
        self.stop = threading.Event()
        self.targets = tuple(targets)

    def begin(self) -> None:
        """Start to look, in threads that end with `end`."""
        for target in self.targets:
            self.follow(target, None)
        if self.discovers:
            self.repeat("discover", self.discover, DISCOVER_S)

    def end(self) -> None:
        """Look no more; a thread that waits for a server is not waited for."""
        self.stop.set()

    def discover(self) -> None:
        """Follow the servers of this machine that are not followed yet."""
        for server in find():
            label = server.label
            if label not in self.followers and (server.processes or pending(server)):
                self.follow(label, server)
        for label, follower in list(self.followers.items()):
            ended = follower.phase is Phase.OVER and follower.watched
            if ended and not ended.folder:
                del self.followers[label]

    def follow(self, target: str, server: Server | None) -> None:
        follower = self.followers[target] = self.make(target, server)
        gone = lambda: self.followers.get(target) is not follower  # noqa: E731
        self.repeat(f"look at {target}", follower.look, LOOK_S, gone)
        self.repeat(f"ask {target}", follower.ask, REQUESTS_S, gone)

    def repeat(
        self,
        name: str,
        work: Callable[[], object],
        pause_s: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do something at once, and again and again, with what this thread may use."""
        context = copy_context()
        pauses = chain([0.0], repeat(pause_s))
        thread(
            f"top: {name}",
            lambda: context.run(work),
            ErrorReporter(f"top can't {name}", self.failures.append),
            wait=lambda _: self.stop.wait(next(pauses)) or gone(),
        )


def once(followers: Sequence[Follower], timeout_s: float) -> None:
    """Two looks at each server, `LOOK_S` apart; one that takes longer has fewer.

    Args:
        followers: of the servers.
        timeout_s: seconds for all of them together.
    """

    def work(follower: Follower) -> None:
        follower.look()
        follower.ask()
        time.sleep(LOOK_S)
        follower.asked_s = float("-inf")
        follower.look()

    threads = [
        # Daemons: the process does not wait for a server that does not answer.
        threading.Thread(target=copy_context().run, args=(work, each), daemon=True)
        for each in followers
    ]
    until = time.monotonic() + timeout_s
    for started in threads:
        started.start()
    for started in threads:
        started.join(max(until - time.monotonic(), 0.0))
