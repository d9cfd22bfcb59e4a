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

from ..collect.agents import agent_client
from ..model.caches import ProcessCaches
from ..model.findings import Finding
from ..model.roles import Role
from ..model.server_snapshot import Gap, ServerSample
from ..observe.requests import listing
from ..observe.requests.listing import InFlightRequest
from ..rules.progress import DEAD, Stall
from ..rules.stall_detector import StallDetector
from ..servers.discovery import Server, is_pending, list_servers, resolve_server
from ..servers.logs import LogTail
from ..servers.record import InstanceFolder
from ..support.background import ErrorReporter, start_repeating_thread
from ..support.errors import VllmopsError
from ..watch.watch_loop import SLIP_S
from ..watch.watch_target import ServerPhase, WatchedServer

LOOK_S = 1.0
METRICS_S = 5.0
REQUESTS_S, CACHES_S = 3.0, 15.0
DISCOVER_S = 20.0  # the process table takes long to read
RETRY_S = 10.0
STUCK_S = 30.0
KEPT = 120  # looks
LOG_BYTES, LOG_LINES = 64 << 10, 1000


class ServerDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a server told when they were last asked.

    Args:
        requests: in flight, the oldest first.
        findings: requests that only one side knows.
        caches: by process.
        gaps: what could not be asked for.
        note: which nodes of the server do not answer; empty if all do.
    """

    requests: tuple[InFlightRequest, ...] = ()
    findings: tuple[Finding, ...] = ()
    caches: tuple[ProcessCaches, ...] = ()
    gaps: tuple[Gap, ...] = msgspec.field(default=(), name="unseen")
    note: str = ""


class TargetSample(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one moment.

    Args:
        target: what ``--target`` takes.
        at_s: by the monotonic clock.
        state: of an instance, such as ``starting``; empty for other servers.
        stage: the stage of an instance that starts.
        url: where it answers, None if unknown.
        model: as given to vLLM.
        reason: why it is not up; empty if it is.
        server_sample: its processes; None if there are none.
        stalls: what has stopped.
        details: what its processes told.
        problem: why nothing can be seen of it; None if something can.
    """

    target: str
    at_s: float
    state: str = ""
    stage: str = ""
    url: str | None = None
    model: str | None = None
    reason: str = msgspec.field(default="", name="why")
    server_sample: ServerSample | None = msgspec.field(default=None, name="seen")
    stalls: tuple[Stall, ...] = ()
    details: ServerDetails = msgspec.field(default=ServerDetails(), name="asked")
    problem: Gap | None = None


class ServerFollower:
    """Follows one server, over restarts.

    Args:
        target: what ``--target`` takes.
        server: as discovery found it; None to resolve the target.

    Attributes:
        samples: the last ones, oldest first.
        failure: why the target could not be resolved when it was last tried; None if it was.
        log: the last lines of its log, read while `reads_log` is set.
        lines_read: how many lines of it were read so far.
    """

    def __init__(self, target: str, server: Server | None = None) -> None:
        self.target = target
        self.server = server
        self.watched_server: WatchedServer | None = None
        self.stall_detector = StallDetector(LOOK_S)
        self.stalls: tuple[Stall, ...] = ()
        self.phase: ServerPhase | None = None
        self.samples: tuple[TargetSample, ...] = ()
        self.failure: VllmopsError | None = None
        self.details = ServerDetails()
        self.asked_s = self.resolved_s = self.cached_s = float("-inf")
        self.reads_log = False
        self.log: tuple[str, ...] = ()
        self.lines_read = 0
        self.tail: tuple[str, LogTail] | None = None

    @property
    def last_sample(self) -> TargetSample | None:
        """The last look; None before the first."""
        return self.samples[-1] if self.samples else None

    def add_sample(self, sample: TargetSample) -> None:
        self.samples = (*self.samples[1 - KEPT :], sample)

    # -- looking -----------------------------------------------------------------------------

    def take_sample(self) -> None:
        """Take a look, and keep it."""
        now = time.monotonic()
        if self.watched_server is None:
            if now - self.resolved_s < RETRY_S:
                return
            try:
                self.watched_server = WatchedServer(self.server or resolve_server(self.target))
            except VllmopsError as error:
                why = Gap(self.target, error.code, error.message, error.hint)
                self.add_sample(TargetSample(target=self.target, at_s=now, problem=why))
                self.failure = error
                return
            finally:
                self.resolved_s = time.monotonic()
        self.failure = None
        self.add_sample(self.observe_server(self.watched_server, now))
        if self.reads_log:
            self.read_log(self.watched_server.server)

    def observe_server(self, watched_server: WatchedServer, now: float) -> TargetSample:
        before, self.phase = self.phase, watched_server.read_phase()
        late = bool(self.samples) and now - self.samples[-1].at_s > LOOK_S + SLIP_S
        if self.phase is not before or late:
            self.stall_detector.reset()
            self.stalls = ()
        seen = None
        if self.phase is not ServerPhase.OVER and watched_server.server.processes:
            asks = self.phase is ServerPhase.UP and self.should_fetch_metrics(now)
            seen = watched_server.take_sample(ask=asks)
            # Without heartbeats only metrics and health show a stall: other looks are no sign.
            if self.phase is ServerPhase.UP and (asks or has_heartbeat(seen)):
                self.stalls = tuple(self.stall_detector.add_sample(seen))
        server, record = watched_server.server, watched_server.server.record
        return TargetSample(
            target=self.target,
            at_s=now,
            state=record.state if record else "",
            stage=record.stage if record else "",
            url=server.url,
            model=server.model,
            reason="" if self.phase is ServerPhase.UP else watched_server.down_reason,
            server_sample=seen,
            stalls=self.stalls,
            details=self.details if self.phase is ServerPhase.UP else ServerDetails(),
        )

    def should_fetch_metrics(self, now: float) -> bool:
        """Whether to ask for metrics and health now: sooner if something has stopped."""
        last = self.stall_detector.samples[-1] if self.stall_detector.samples else None
        soon = last is None or (has_heartbeat(last) and self.stall_detector.plan_next_sample().ask)
        if soon or now - self.asked_s >= METRICS_S:
            self.asked_s = now
            return True
        return False

    # -- asking ------------------------------------------------------------------------------

    def fetch_details(self) -> None:
        """Ask the server's processes for what heartbeats do not have."""
        look = self.last_sample
        if (
            self.watched_server is None
            or self.phase is not ServerPhase.UP
            or look is None
            or not look.server_sample
        ):
            self.details = ServerDetails()
            return
        server = self.watched_server.server
        if not look.server_sample.heartbeats:
            if all(process.state in DEAD for process in look.server_sample.processes):
                self.details = ServerDetails(note=self.details.note)
                return
            hint = f"vllmops attach -t {self.target}"
            why = Gap("requests and caches", "agent.absent", "no agent answers", hint)
            self.details = ServerDetails(gaps=(why,), note=self.details.note)
            return
        found = collect_requests(server) if has_requests(look.server_sample) else ServerDetails()
        caches, note = self.details.caches, self.details.note
        if time.monotonic() - self.cached_s >= CACHES_S:
            caches, note = fetch_caches(server), server.describe_silent_nodes()
            self.cached_s = time.monotonic()
        self.details = msgspec.structs.replace(found, caches=caches, note=note)

    def read_log(self, server: Server) -> None:
        """Read what was added to the log of an instance."""
        if server.name is None:
            return
        path = InstanceFolder(server.name).server_log
        if self.tail is None or self.tail[0] != server.name:
            offset = 0
            with suppress(OSError):
                offset = max(path.stat().st_size - LOG_BYTES, 0)
            self.tail = server.name, LogTail(path, offset=offset)
        added = self.tail[1].read_new_lines()
        self.log = (*self.log, *added)[-LOG_LINES:]
        self.lines_read += len(added)


def has_heartbeat(sample: ServerSample) -> bool:
    """Whether heartbeats show if an engine makes progress."""
    return any(pulse.heartbeat.still_s is not None for pulse in sample.heartbeats)


def has_requests(sample: ServerSample) -> bool:
    """Whether some process reports a request."""
    beats = [pulse.heartbeat for pulse in sample.heartbeats]
    return any(b.running or b.waiting or b.engine_requests or b.rendering_s for b in beats)


def collect_requests(server: Server) -> ServerDetails:
    """The requests of a server."""
    try:
        found = listing.list_requests(server, STUCK_S)
    except VllmopsError as error:
        return ServerDetails(gaps=(Gap("requests", error.code, error.message, error.hint),))
    return ServerDetails(
        requests=tuple(found.rows),
        findings=tuple(found.findings),
        gaps=tuple(
            Gap(f"requests of {one.role} {one.pid}", one.code, one.reason, one.hint)
            for one in found.gaps
        ),
    )


def fetch_caches(server: Server) -> tuple[ProcessCaches, ...]:
    """The caches of the processes that answer."""
    asked = server.select_processes(Role.API, Role.ENGINE)
    return tuple(
        agent_client.collect_answers(
            asked, lambda process: agent_client.open_agent(process).fetch_caches()
        )[0]
    )


class FollowedServers:
    """All servers that are shown.

    Args:
        targets: what ``--target`` takes; without any, every server of this machine, also those
            that start later.
        make: makes a follower.
    """

    def __init__(
        self,
        targets: Sequence[str],
        make: Callable[[str, Server | None], ServerFollower] = ServerFollower,
    ) -> None:
        self.make = make
        self.discovers = not targets
        self.followers: dict[str, ServerFollower] = {}
        self.failures: deque[str] = deque(maxlen=1)
        self.stop = threading.Event()
        self.targets = tuple(targets)

    def start_following(self) -> None:
        """Start to look, in threads that end with `stop_following`."""
        for target in self.targets:
            self.follow_server(target, None)
        if self.discovers:
            self.start_repeating("discover", self.discover_servers, DISCOVER_S)

    def stop_following(self) -> None:
        """Look no more; a thread that waits for a server is not waited for."""
        self.stop.set()

    def discover_servers(self) -> None:
        """Follow the servers of this machine that are not followed yet."""
        for server in list_servers():
            label = server.label
            if label not in self.followers and (server.processes or is_pending(server)):
                self.follow_server(label, server)
        for label, follower in list(self.followers.items()):
            ended = follower.phase is ServerPhase.OVER and follower.watched_server
            if ended and not ended.folder:
                del self.followers[label]

    def follow_server(self, target: str, server: Server | None) -> None:
        follower = self.followers[target] = self.make(target, server)
        gone = lambda: self.followers.get(target) is not follower  # noqa: E731
        self.start_repeating(f"look at {target}", follower.take_sample, LOOK_S, gone)
        self.start_repeating(f"ask {target}", follower.fetch_details, REQUESTS_S, gone)

    def start_repeating(
        self,
        name: str,
        work: Callable[[], object],
        pause_s: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do something at once, and again and again, with what this thread may use."""
        context = copy_context()
        pauses = chain([0.0], repeat(pause_s))
        start_repeating_thread(
            f"top: {name}",
            lambda: context.run(work),
            ErrorReporter(f"top can't {name}", self.failures.append),
            wait=lambda _: self.stop.wait(next(pauses)) or is_gone(),
        )


def take_two_samples(followers: Sequence[ServerFollower], timeout_s: float) -> None:
    """Two looks at each server, `LOOK_S` apart; one that takes longer has fewer.

    Args:
        followers: of the servers.
        timeout_s: seconds for all of them together.
    """

    def sample_follower(follower: ServerFollower) -> None:
        follower.take_sample()
        follower.fetch_details()
        time.sleep(LOOK_S)
        follower.asked_s = float("-inf")
        follower.take_sample()

    threads = [
        # Daemons: the process does not wait for a server that does not answer.
        threading.Thread(target=copy_context().run, args=(sample_follower, each), daemon=True)
        for each in followers
    ]
    until = time.monotonic() + timeout_s
    for started in threads:
        started.start()
    for started in threads:
        started.join(max(until - time.monotonic(), 0.0))
