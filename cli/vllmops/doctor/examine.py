"""Take a snapshot of a server: all parts at once, and longer if something seems to be stuck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .. import __version__
from ..caches import compare as compares
from ..caches import inspect as caches
from ..diagnose import compares as judge
from ..diagnose import progress, stacks
from ..errors import VllmopsError
from ..home import home, user
from ..host import gpu, kmsg, proc, processes, ras, shm
from ..host.memory import room
from ..host.processes import ROLES, Process
from ..host.roles import Role, titled
from ..host.states import compilers, state
from ..instances.record import State
from ..instances.servers import Server
from ..memory import record as memory
from ..protocol import identity
from ..protocol.caches import CacheSnapshot
from ..protocol.compares import CompareRequest, Comparison
from ..protocol.pasted import Pasted
from ..protocol.patches import ProcessPatches
from ..protocol.place import who
from ..protocol.server import (
    AgentReport,
    Canary,
    Disk,
    Guard,
    Leftover,
    Machine,
    Observation,
    ProcessState,
    Pulse,
    RasCapture,
    ServerSnapshot,
    Unseen,
    Xid,
)
from ..protocol.stacks import StacksSnapshot
from ..requests import loads
from ..rpc import agent, membership
from ..stacks import pyspy
from ..vllm_api import http
from . import history

# By NVIDIA's table of Xids these end one process, and its GPU serves the others as before.
ONE_PROCESS = frozenset({13, 31, 43, 45})
# Hardly longer than the second that an examination takes in any case.
COMPARE = CompareRequest(apart_s=0.2, timeout_s=1.2)
COMPARE_LONGER = "vllmops cache compare waits longer"
SIDES = "differences between the sides of caches"
LOOK_S = 1.0
LEAST_S = 0.5  # for a sample of the stacks
CANARY_S = 15.0
LOST, LOST_HINT = "agent.node-lost", "vllmops help agent.node-lost"
KEY = "VLLM_RESPONSES_STATE_SIGNING_KEY"
KEY_DIGITS = 64
STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
# What a snapshot has besides looks and stacks, in words.
PARTS = {
    "reports": "agents",
    "patches": "patches",
    "caches": "caches",
    "comparisons": SIDES,
    "recordings": "the last steps",
    "lost_loads": "lost loads",
    "machine": "the machine",
    "guard": "who can reach the server",
}


@dataclass(frozen=True)
class Options:
    """How thorough an examination is.

    Args:
        interval_s: least seconds between the first read and the second.
        patience_s: seconds that a server may make no progress while requests are pending.
        samples: of stacks, if something seems to hang.
        apart_s: seconds between them.
        always: whether to take all samples in any case.
        canary: whether to send one request for one token.
        stacks_s: seconds for all samples of stacks together.
    """

    interval_s: float = 1.0
    patience_s: float = progress.PATIENCE_S
    samples: int = 3
    apart_s: float = 1.0
    always: bool = False
    canary: bool = False
    stacks_s: float = 20.0


def take(
    server: Server, options: Options | None = None, show: Callable[[str], None] = lambda _: None
) -> ServerSnapshot:
    """A snapshot of a server; it names the parts that could not be seen.

    Args:
        server: as discovery found it.
        options: how thorough.
        show: takes what the examination waits for, in words.
    """
    return Examination(server, options or Options(), show).run()


class Examination:
    """The examination of one server.

    Args:
        server: as discovery found it.
        options: how thorough.
        show: takes what the examination waits for, in words.
        looks: earlier samples that belong to it.
        began: when the first sample was taken, by the monotonic clock.
    """

    def __init__(
        self,
        server: Server,
        options: Options,
        show: Callable[[str], None],
        looks: Sequence[Observation] = (),
        began: float | None = None,
    ) -> None:
        self.server = server
        self.options = options
        self.show = show
        self.taken_at = time.time()
        self.began = time.monotonic() if began is None else began
        self.until_sampled = time.monotonic() + options.stacks_s
        self.looks = list(looks)
        self.samples: list[StacksSnapshot] = []
        self.ras: list[RasCapture] = []
        self.unseen: list[Unseen] = []
        self.parts: Parts | None = None

    def run(self) -> ServerSnapshot:
        with ThreadPoolExecutor(12) as pool:  # a thread for each task
            probe = pool.submit(canary, self.server) if self.options.canary else None
            self.parts = parts = Parts(pool, self.server)
            sample = pool.submit(self.sample)
            asked = pool.submit(self.ask_nccl)
            self.look()
            sample.result()
            asked.result()
            time.sleep(max(self.options.interval_s - self.age, 0.0))
            self.look()
            if self.options.always or self.seems_stuck():
                self.longer(pool)
            if self.ras:  # the second look decides: counts move, or stand still
                self.ask_nccl()
            while probe and not probe.done():
                self.show("waiting for the response to one request for one token")
                time.sleep(LOOK_S)
                self.look()
            return self.whole(parts, probe.result() if probe else None)

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def look(self) -> None:
        self.looks.append(look(self.server, self.began))

    def ask_nccl(self) -> None:
        """Ask NCCL's RAS service, where one of the server's processes has it."""
        if not self.server.fleet:
            asked = self.server.of(Role.ENGINE, Role.WORKER)
            self.ras += ras.captures(asked, self.began)

    def sample(self) -> None:
        """Take the stacks once."""
        try:
            snapshot = pyspy.capture(
                self.server.processes, timeout_s=self.patience_s(), server=self.server.name
            )
        except VllmopsError as error:
            self.miss(Unseen("stacks", error.code, error.message, error.hint))
            return
        self.samples.append(snapshot)
        for process in snapshot.processes:
            problem = process.error or process.instead
            if problem and problem.code != "stacks.gone":
                what = "stacks by py-spy" if process.instead else "stacks"
                part = f"{what} of {who(process)}"
                self.miss(Unseen(part, problem.code, problem.message, problem.hint))

    def patience_s(self) -> float:
        """Seconds for the next sample: half of the time that is left; all of it for the last one.

        On a busy machine the first sample takes longest, and some hangs need all samples.
        """
        more = max(self.options.samples - len(self.samples) - 1, 0)
        left_s = self.until_sampled - time.monotonic() - more * self.options.apart_s
        return max(left_s / 2 if more else left_s, LEAST_S)

    def miss(self, what: Unseen) -> None:
        """Keep what could not be seen, once."""
        if what not in self.unseen:
            self.unseen.append(what)

    def seems_stuck(self) -> bool:
        """Whether only a longer examination can decide."""
        if progress.suspicious(self.looks):
            return True
        if not self.samples:
            return False
        explained = stacks.explain(Pasted(tuple(self.samples), complete=True))
        return explained.verdict in {"hang", "maybe"}

    def longer(self, pool: ThreadPoolExecutor) -> None:
        """Take more stacks, and samples for as long as a healthy server may make no progress."""
        taken = pool.submit(self.further) if self.samples else None
        while (taken and not taken.done()) or self.undecided():
            self.show("something seems to be stuck; watching it for some seconds")
            time.sleep(LOOK_S / 2)
            self.look()
        if taken:
            taken.result()

    def further(self) -> None:
        """Take the samples that are left."""
        for _ in range(self.options.samples - len(self.samples)):
            time.sleep(self.options.apart_s)
            self.sample()

    def undecided(self) -> bool:
        """Whether something has made no progress, but not for long enough yet."""
        patience_s = self.options.patience_s
        stalls = progress.stalls(self.looks, patience_s)
        within_s = 1.5 * patience_s
        return not stalls and self.age < within_s and progress.decidable(self.looks[-3:], within_s)

    def so_far(self, why: str) -> ServerSnapshot:
        """What has been seen until now.

        Args:
            why: why the examination ends early, in words.
        """
        parts, known = (self.parts.done(), self.parts.gaps) if self.parts else ({}, ())
        late = ", ".join(word for name, word in PARTS.items() if name not in parts)
        rest = [Unseen(late, "cut-short", why)] if late else []
        if self.options.always and (missing := self.options.samples - len(self.samples)):
            rest.append(Unseen(f"{missing} of {self.options.samples} stacks", "cut-short", why))
        gaps = (*self.unseen, *known, *(rest if self.server.processes else []))
        errors = () if self.server.processes else xids(self.server)
        return self.snapshot(
            **{"machine": Machine(memory_total=0, memory_available=0, xids=errors), **parts},
            unseen=tuple(dict.fromkeys(gaps)),
        )

    def snapshot(self, **fields: Any) -> ServerSnapshot:
        """What this examination itself has seen, and other fields of the snapshot."""
        server, record = self.server, self.server.record
        return ServerSnapshot(
            taken_at=self.taken_at,
            vllmops=__version__,
            server=server.label,
            url=server.url,
            model=server.model,
            state=record.state.value if record else "",
            stage=record.stage if record else "",
            failure=record.failure.cause if record and record.failure else "",
            looks=tuple(self.looks),
            stacks=tuple(self.samples),
            ras=tuple(self.ras),
            **fields,
        )

    def whole(self, parts: Parts, probe: Canary | None) -> ServerSnapshot:
        """The snapshot with all parts; waits for them."""
        server, known = self.server, parts.wait()
        for unseen in parts.gaps:
            self.miss(unseen)
        began = min((process.create_time for process in server.processes), default=None)
        versions = (answer.hello.vllm_version for answer in known["reports"])
        version = next(filter(None, versions), None)
        return self.snapshot(
            **known,
            uptime_s=None if began is None else max(self.taken_at - began, 0.0),
            vllm_version=version or (http.version(server.url) if server.url else None),
            memory=None if began is None else memory.newest(server.label, began),
            canary=probe,
            unseen=tuple(self.unseen),
        )


class Parts:
    """The other parts, all at once."""

    def __init__(self, pool: ThreadPoolExecutor, server: Server) -> None:
        self.server = server
        self.silent: list[Unseen] = []
        self.unseen: list[Unseen] = []
        own = server.of(*ROLES)
        self.caches: Future[CacheSnapshot | None] = pool.submit(self.cached)
        self.fields: dict[str, Future[Any]] = {
            "reports": pool.submit(self.reported, own),
            "patches": pool.submit(self.patched, own),
            "caches": self.caches,
            "comparisons": pool.submit(self.compared),
            "recordings": pool.submit(lambda: history.of(server).recordings),
            "lost_loads": pool.submit(lambda: tuple(loads.lost(server))),
            "machine": pool.submit(machine, server),
            "guard": pool.submit(guard, server),
        }
        if server.fleet:
            what = "the machine: memory, disks, GPUs, log, and who can reach the server"
            why = "the server is on another machine"
            self.unseen.append(Unseen(what, "remote", why, "run vllmops doctor there"))
        starts_or_ends = server.record and server.record.state is not State.READY
        if not starts_or_ends and (note := server.note()):
            self.unseen.append(Unseen("other nodes", LOST, note, LOST_HINT))

    def wait(self) -> dict[str, Any]:
        """The fields of a snapshot, once all are known."""
        return {name: field.result() for name, field in self.fields.items()}

    def done(self) -> dict[str, Any]:
        """Those that are known by now."""
        done = {name: field for name, field in self.fields.items() if field.done()}
        return {name: field.result() for name, field in done.items() if not field.exception()}

    @property
    def gaps(self) -> tuple[Unseen, ...]:
        """What could not be seen, first the agents that did not answer."""
        return (*self.silent, *self.unseen)

    def reported(self, own: Sequence[Process]) -> tuple[AgentReport, ...]:
        answers, silent = agent.side_by_side(own, report)
        for each in silent:
            part = f"agent of {who(each)}"
            self.silent.append(Unseen(part, each.code, each.why, each.hint))
        return tuple(answers)

    def patched(self, own: Sequence[Process]) -> tuple[ProcessPatches, ...]:
        answers, _ = agent.side_by_side(own, lambda process: agent.reach(process).patches())
        return tuple(answers)

    def cached(self) -> CacheSnapshot | None:
        try:
            return caches.take(caches.Agents(self.server))
        except VllmopsError:
            return None  # `agents` names who did not answer

    def compared(self) -> tuple[Comparison, ...]:
        """Both sides of the caches of a busy server, which one snapshot can't compare.

        The engine is asked between two steps; an engine that may hang is not asked.
        """
        caches = self.caches.result()
        sample = caches.samples[-1] if caches else None
        # `agents` names who did not answer.
        if sample is None or sample.silent or not judge.worthwhile(sample):
            return ()
        if not progress.at_work(list(seen(self.server).pulses)):
            why = "the engine is in a long step or hangs, so it was not asked"
            self.unseen.append(Unseen(SIDES, "compare.standing", why))
            return ()
        try:
            compared, silent = compares.take(self.server, COMPARE)
        except VllmopsError as error:
            late = error.code == "compare.timeout"
            why = "the engine's steps take too long to wait for" if late else error.message
            hint = COMPARE_LONGER if late else error.hint
            self.unseen.append(Unseen(SIDES, error.code, why, hint))
            return ()
        for api in silent:
            self.unseen.append(Unseen(f"{SIDES} of api {api.pid}", "compare.silent", api.why))
        notes = (note for comparison in compared for note in judge.undecided(comparison))
        for note in dict.fromkeys(notes):
            self.unseen.append(Unseen(SIDES, f"compare.{note.code}", note.text, COMPARE_LONGER))
        return tuple(compared)


def report(process: Process) -> AgentReport:
    """What a process's agent reports; raises as `agent.reach` does."""
    reached = agent.reach(process)
    return AgentReport(
        **agent.shown(process),
        pid=process.pid,
        hello=reached.hello(),
        engine=reached.engine(),
        traffic=reached.traffic(),
        packages=packages(reached),
    )


def packages(reached: agent.Agent) -> dict[str, str]:
    """What is installed beside a process; nothing where its agent is too old to say."""
    try:
        return reached.packages().versions
    except VllmopsError:
        return {}


def look(server: Server, began: float, *, web: bool = True) -> Observation:
    """What changes from moment to moment; costs next to nothing without `web`.

    Args:
        server: to examine.
        began: when the first sample was taken, by the monotonic clock.
        web: whether to ask for ``/metrics`` and ``/health``, too.
    """
    at_s = time.monotonic() - began
    metrics = health = None
    if web and server.url:
        answer = http.health(server.url)
        health = None if answer.later else answer.status  # who drains is not unhealthy
        metrics = http.metrics(server.url) if answer.status else None
    state = seen(server, compiling=True)
    return Observation(
        at_s=at_s,
        pulses=state.pulses,
        metrics=metrics,
        health=health,
        processes=state.states,
        compilers=state.compilers,
    )


class Seen(NamedTuple):
    """The processes of a server, as the kernel and their heartbeats show them."""

    states: tuple[ProcessState, ...]
    pulses: tuple[Pulse, ...]
    compilers: tuple[str, ...] = ()


def seen(server: Server, *, compiling: bool = False) -> Seen:
    """The processes of a server now; costs next to nothing on this machine.

    Args:
        server: to look at.
        compiling: whether to look for compilers, too.
    """
    if server.fleet:
        try:
            members = server.fleet.members()
        except VllmopsError:
            # A gateway may restart: as with a process that has died, it has ended if that lasts.
            gone = server.fleet.lost_s >= progress.PATIENCE_S
            return Seen(tuple(unseen(process, gone=gone) for process in server.processes), ())
        return Seen(members.processes, members.pulses, members.compilers)
    below = tuple(compilers(server.processes)) if compiling else ()
    return Seen(tuple(map(state, server.processes)), tuple(pulses(server)), below)


def unseen(process: Process, *, gone: bool) -> ProcessState:
    """A process of another machine that can't be asked about.

    Args:
        process: the process.
        gone: whether nobody answers any more for its server.
    """
    state = "" if gone else progress.UNSEEN
    return ProcessState(
        **agent.shown(process), pid=process.pid, create_time=process.create_time, state=state
    )


def pulses(server: Server) -> Iterator[Pulse]:
    """The heartbeats of a server's processes."""
    for process in server.of(*ROLES):
        with suppress(VllmopsError):
            if pulse := agent.beat(process):
                yield Pulse(
                    **agent.shown(process), pid=process.pid, age_s=pulse.age_s, beat=pulse.beat
                )


def machine(server: Server) -> Machine:
    """Memory, disks, shared memory and GPUs of the machine, and processes of dead servers."""
    if server.fleet:
        return Machine(memory_total=0, memory_available=0)
    table = processes.table()
    total, available = room(server.pid)
    return Machine(
        memory_total=total,
        memory_available=available,
        disks=tuple(disks()),
        leftovers=tuple(leftovers()),
        orphans=tuple(orphans(table)),
        gpus=gpu.states(),
        xids=xids(server),
    )


def xids(server: Server) -> tuple[Xid, ...]:
    """GPU errors since a server began, also of one that is over.

    From the kernel's log, and those that only the driver told; without those that another process
    made for itself alone.
    """
    record = server.record
    ages = [identity.age_s(process.start_ticks) for process in server.processes]
    if not ages and record and record.started_at:
        ages = [max(time.time() - record.started_at, 0.0)]
    logged = kmsg.xids(max(ages, default=0.0))
    known = {(xid.gpu, xid.number) for xid in logged}
    found = (*logged, *(xid for xid in gpu.xids() if (xid.gpu, xid.number) not in known))
    if shm.out_of_sight():
        return found  # pids are others than the kernel's
    own = {process.pid for process in (*server.processes, *(record.processes if record else ()))}
    return tuple(xid for xid in found if xid.number not in ONE_PROCESS or xid.pid in {None, *own})


def disks() -> Iterator[Disk]:
    """The file systems that matter, every one once."""
    seen = set()
    for path, use in (
        (home(), "state and logs"),
        (Path("/tmp"), "temporary files"),  # noqa: S108 - where other programs write them
        (shm.SHM, "shared memory"),
    ):
        with suppress(OSError):
            place = next(parent for parent in (path, *path.parents) if parent.exists())
            device = place.stat().st_dev
            if device not in seen:
                seen.add(device)
                usage = psutil.disk_usage(str(place))
                yield Disk(str(place), use, usage.total, usage.free)


def leftovers() -> Iterator[Leftover]:
    """Segments of the kinds that vLLM makes and that no live process uses."""
    unused = shm.unused()
    for segment in unused.segments:
        owner = user(segment.uid)
        yield Leftover(segment.name, segment.bytes, segment.age_s, owner, unused.doubt)


def orphans(table: processes.Table) -> Iterator[ProcessState]:
    """Processes of dead servers: what has started those of a live one is there."""
    for tree in membership.groups(table)[1]:
        if titled(table[tree[0].pid].words) and processes.orphaned(tree[0].pid):
            yield state(tree[0])


def guard(server: Server) -> Guard:
    """Who can reach a server, and what protects it."""
    if server.fleet:
        return Guard()
    environment = proc.environment(server.pid) if server.pid else {}
    addresses = tuple(listening(server))
    exposed = any(not loopback(address) for address in addresses) if addresses else None
    key = environment.get(KEY)
    return Guard(
        addresses=addresses,
        exposed=exposed,
        open=http.code(f"{server.url}/v1/models") == 200 if exposed else None,
        # A path that exists answers another method with 405.
        dev_routes=http.code(f"{server.url}/reset_mm_cache", "OPTIONS") == 405 if exposed else None,
        signing_key=None if not environment else "absent" if not key else strength(key),
        store=None if not environment else "memory" if environment.get(STORE) == "1" else "none",
    )


def strength(key: str) -> str:
    """Whether a signing key is strong: 32 bytes in hex, as vLLM's proposal demands."""
    is_hex = all(digit in "0123456789abcdefABCDEF" for digit in key)
    return "strong" if is_hex and len(key) >= KEY_DIGITS else "weak"


def listening(server: Server) -> Iterator[str]:
    """The addresses that a server listens on, with its port."""
    for process in server.of(Role.API, Role.LAUNCHER):
        with suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections("tcp"):
                address = connection.laddr
                if connection.status == psutil.CONN_LISTEN and address.port == server.port:
                    yield f"{address.ip}:{address.port}"
            return


def loopback(address: str) -> bool:
    return address.startswith(("127.", "::1:"))


def canary(server: Server) -> Canary:
    """Send one request for one token."""
    if not server.url:
        return Canary("unable", 0.0, "the server's address is not known")
    return http.one_token(server.url, CANARY_S)
