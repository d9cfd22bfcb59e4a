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
from ..collect.agents import agent_client as agent
from ..collect.agents import agent_files, membership
from ..collect.http import vllm_client
from ..collect.machine import gpu, kernel_log, nccl_ras, proc, processes, shared_memory
from ..collect.machine.memory import read_available_memory
from ..collect.machine.process_states import find_compilers, observe_process
from ..collect.machine.processes import Process
from ..collect.stacks import pyspy
from ..model import process_identity
from ..model.cache_comparison import CacheComparison, CompareRequest
from ..model.caches import CacheSnapshot
from ..model.pasted_stacks import PastedStacks
from ..model.patches import ProcessPatches
from ..model.ranks import format_process
from ..model.roles import ROLES, Role, find_title_role
from ..model.server_snapshot import (
    AgentReport,
    Canary,
    DiskSpace,
    Exposure,
    Gap,
    Machine,
    ProcessHeartbeat,
    ProcessState,
    RasCapture,
    ServerSample,
    ServerSnapshot,
    ShmLeftover,
    Xid,
)
from ..model.stacks import StacksSnapshot
from ..rules import cache_comparison, progress
from ..rules.stacks import explanation
from ..servers.discovery import Server
from ..servers.record import InstanceState
from ..support.errors import VllmopsError
from ..support.home import format_user, resolve_home
from . import step_recordings
from .caches import comparison as compares
from .caches import snapshot as caches
from .memory import recorder
from .requests import stalled_transfers

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
class ExaminationOptions:
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


def examine_server(
    server: Server,
    options: ExaminationOptions | None = None,
    show: Callable[[str], None] = lambda _: None,
) -> ServerSnapshot:
    """A snapshot of a server; it names the parts that could not be seen.

    Args:
        server: as discovery found it.
        options: how thorough.
        show: takes what the examination waits for, in words.
    """
    return Examination(server, options or ExaminationOptions(), show).run()


class Examination:
    """The examination of one server.

    Args:
        server: as discovery found it.
        options: how thorough.
        show: takes what the examination waits for, in words.
        server_samples: earlier samples that belong to it.
        began: when the first sample was taken, by the monotonic clock.
    """

    def __init__(
        self,
        server: Server,
        options: ExaminationOptions,
        show: Callable[[str], None],
        server_samples: Sequence[ServerSample] = (),
        began: float | None = None,
    ) -> None:
        self.server = server
        self.options = options
        self.show = show
        self.taken_at = time.time()
        self.began = time.monotonic() if began is None else began
        self.until_sampled = time.monotonic() + options.stacks_s
        self.server_samples = list(server_samples)
        self.samples: list[StacksSnapshot] = []
        self.ras: list[RasCapture] = []
        self.gaps: list[Gap] = []
        self.parts: SnapshotParts | None = None

    def run(self) -> ServerSnapshot:
        with ThreadPoolExecutor(12) as pool:  # a thread for each task
            probe = pool.submit(send_canary, self.server) if self.options.canary else None
            self.parts = parts = SnapshotParts(pool, self.server)
            sample = pool.submit(self.sample_stacks)
            asked = pool.submit(self.collect_ras_captures)
            self.take_sample()
            sample.result()
            asked.result()
            time.sleep(max(self.options.interval_s - self.age_s, 0.0))
            self.take_sample()
            if self.options.always or self.seems_stuck():
                self.examine_longer(pool)
            if self.ras:  # the second look decides: counts move, or stand still
                self.collect_ras_captures()
            while probe and not probe.done():
                self.show("waiting for the response to one request for one token")
                time.sleep(LOOK_S)
                self.take_sample()
            return self.build_full_snapshot(parts, probe.result() if probe else None)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    def take_sample(self) -> None:
        self.server_samples.append(observe_server(self.server, self.began))

    def collect_ras_captures(self) -> None:
        """Ask NCCL's RAS service, where one of the server's processes has it."""
        if not self.server.fleet:
            asked = self.server.select_processes(Role.ENGINE, Role.WORKER)
            self.ras += nccl_ras.collect_captures(asked, self.began)

    def sample_stacks(self) -> None:
        """Take the stacks once."""
        try:
            snapshot = pyspy.dump_stacks(
                self.server.processes,
                timeout_s=self.compute_stacks_timeout(),
                server=self.server.name,
            )
        except VllmopsError as error:
            self.add_gap(Gap("stacks", error.code, error.message, error.hint))
            return
        self.samples.append(snapshot)
        for process in snapshot.processes:
            problem = process.error or process.instead
            if problem and problem.code != "stacks.gone":
                what = "stacks by py-spy" if process.instead else "stacks"
                part = f"{what} of {format_process(process)}"
                self.add_gap(Gap(part, problem.code, problem.message, problem.hint))

    def compute_stacks_timeout(self) -> float:
        """Seconds for the next sample: half of the time that is left; all of it for the last one.

        On a busy machine the first sample takes longest, and some hangs need all samples.
        """
        more = max(self.options.samples - len(self.samples) - 1, 0)
        left_s = self.until_sampled - time.monotonic() - more * self.options.apart_s
        return max(left_s / 2 if more else left_s, LEAST_S)

    def add_gap(self, gap: Gap) -> None:
        """Keep what could not be seen, once."""
        if gap not in self.gaps:
            self.gaps.append(gap)

    def seems_stuck(self) -> bool:
        """Whether only a longer examination can decide."""
        if progress.is_possibly_stalled(self.server_samples):
            return True
        if not self.samples:
            return False
        explained = explanation.explain_stacks(PastedStacks(tuple(self.samples), complete=True))
        return explained.verdict in {"hang", "maybe"}

    def examine_longer(self, pool: ThreadPoolExecutor) -> None:
        """Take more stacks, and samples for as long as a healthy server may make no progress."""
        taken = pool.submit(self.sample_remaining_stacks) if self.samples else None
        while (taken and not taken.done()) or self.is_undecided():
            self.show("something seems to be stuck; watching it for some seconds")
            time.sleep(LOOK_S / 2)
            self.take_sample()
        if taken:
            taken.result()

    def sample_remaining_stacks(self) -> None:
        """Take the samples that are left."""
        for _ in range(self.options.samples - len(self.samples)):
            time.sleep(self.options.apart_s)
            self.sample_stacks()

    def is_undecided(self) -> bool:
        """Whether something has made no progress, but not for long enough yet."""
        patience_s = self.options.patience_s
        stalls = progress.find_stalls(self.server_samples, patience_s)
        within_s = 1.5 * patience_s
        return (
            not stalls
            and self.age_s < within_s
            and progress.can_confirm_stall(self.server_samples[-3:], within_s)
        )

    def build_partial_snapshot(self, reason: str) -> ServerSnapshot:
        """What has been seen until now.

        Args:
            reason: why the examination ends early, in words.
        """
        parts, known = (self.parts.finished_fields(), self.parts.gaps) if self.parts else ({}, ())
        late = ", ".join(word for name, word in PARTS.items() if name not in parts)
        rest = [Gap(late, "cut-short", reason)] if late else []
        if self.options.always and (missing := self.options.samples - len(self.samples)):
            rest.append(Gap(f"{missing} of {self.options.samples} stacks", "cut-short", reason))
        gaps = (*self.gaps, *known, *(rest if self.server.processes else []))
        errors = () if self.server.processes else collect_xids(self.server)
        return self.make_snapshot(
            **{"machine": Machine(memory_total=0, memory_available=0, xids=errors), **parts},
            gaps=tuple(dict.fromkeys(gaps)),
        )

    def make_snapshot(self, **fields: Any) -> ServerSnapshot:
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
            samples=tuple(self.server_samples),
            stacks=tuple(self.samples),
            ras=tuple(self.ras),
            **fields,
        )

    def build_full_snapshot(self, parts: SnapshotParts, probe: Canary | None) -> ServerSnapshot:
        """The snapshot with all parts; waits for them."""
        server, known = self.server, parts.wait_for_fields()
        for unseen in parts.gaps:
            self.add_gap(unseen)
        began = min((process.create_time for process in server.processes), default=None)
        versions = (answer.hello.vllm_version for answer in known["reports"])
        version = next(filter(None, versions), None)
        return self.make_snapshot(
            **known,
            uptime_s=None if began is None else max(self.taken_at - began, 0.0),
            vllm_version=version or (vllm_client.fetch_version(server.url) if server.url else None),
            memory=None if began is None else recorder.load_newest_recording(server.label, began),
            canary=probe,
            gaps=tuple(self.gaps),
        )


class SnapshotParts:
    """The other parts, all at once."""

    def __init__(self, pool: ThreadPoolExecutor, server: Server) -> None:
        self.server = server
        self.agent_gaps: list[Gap] = []
        self.other_gaps: list[Gap] = []
        own = server.select_processes(*ROLES)
        self.caches: Future[CacheSnapshot | None] = pool.submit(self.observe_caches)
        self.fields: dict[str, Future[Any]] = {
            "reports": pool.submit(self.fetch_reports, own),
            "patches": pool.submit(self.fetch_patches, own),
            "caches": self.caches,
            "comparisons": pool.submit(self.compare_caches),
            "recordings": pool.submit(lambda: step_recordings.collect_history(server).recordings),
            "lost_loads": pool.submit(lambda: tuple(stalled_transfers.prove_lost_loads(server))),
            "machine": pool.submit(observe_machine, server),
            "guard": pool.submit(check_exposure, server),
        }
        if server.fleet:
            what = "the machine: memory, disks, GPUs, log, and who can reach the server"
            why = "the server is on another machine"
            self.other_gaps.append(Gap(what, "remote", why, "run vllmops doctor there"))
        starts_or_ends = server.record and server.record.state is not InstanceState.READY
        if not starts_or_ends and (note := server.describe_silent_nodes()):
            self.other_gaps.append(Gap("other nodes", LOST, note, LOST_HINT))

    def wait_for_fields(self) -> dict[str, Any]:
        """The fields of a snapshot, once all are known."""
        return {name: field.result() for name, field in self.fields.items()}

    def finished_fields(self) -> dict[str, Any]:
        """Those that are known by now."""
        done = {name: field for name, field in self.fields.items() if field.done()}
        return {name: field.result() for name, field in done.items() if not field.exception()}

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What could not be seen, first the agents that did not answer."""
        return (*self.agent_gaps, *self.other_gaps)

    def fetch_reports(self, agent_processes: Sequence[Process]) -> tuple[AgentReport, ...]:
        answers, silent = agent.collect_answers(agent_processes, fetch_agent_report)
        for each in silent:
            part = f"agent of {format_process(each)}"
            self.agent_gaps.append(Gap(part, each.code, each.reason, each.hint))
        return tuple(answers)

    def fetch_patches(self, agent_processes: Sequence[Process]) -> tuple[ProcessPatches, ...]:
        answers, _ = agent.collect_answers(
            agent_processes, lambda process: agent.open_agent(process).fetch_patches()
        )
        return tuple(answers)

    def observe_caches(self) -> CacheSnapshot | None:
        try:
            return caches.observe_caches(caches.CacheAgents(self.server))
        except VllmopsError:
            return None  # `agents` names who did not answer

    def compare_caches(self) -> tuple[CacheComparison, ...]:
        """Both sides of the caches of a busy server, which one snapshot can't compare.

        The engine is asked between two steps; an engine that may hang is not asked.
        """
        caches = self.caches.result()
        sample = caches.samples[-1] if caches else None
        # `agents` names who did not answer.
        if sample is None or sample.gaps or not cache_comparison.should_compare(sample):
            return ()
        if not progress.is_making_progress(list(observe_processes(self.server).heartbeats)):
            why = "the engine is in a long step or hangs, so it was not asked"
            self.other_gaps.append(Gap(SIDES, "compare.standing", why))
            return ()
        try:
            compared, silent = compares.compare_caches(self.server, COMPARE)
        except VllmopsError as error:
            late = error.code == "compare.timeout"
            why = "the engine's steps take too long to wait for" if late else error.message
            hint = COMPARE_LONGER if late else error.hint
            self.other_gaps.append(Gap(SIDES, error.code, why, hint))
            return ()
        for api in silent:
            self.other_gaps.append(Gap(f"{SIDES} of api {api.pid}", "compare.silent", api.reason))
        notes = (
            note
            for comparison in compared
            for note in cache_comparison.explain_missing_comparison(comparison)
        )
        for note in dict.fromkeys(notes):
            self.other_gaps.append(Gap(SIDES, f"compare.{note.code}", note.text, COMPARE_LONGER))
        return tuple(compared)


def fetch_agent_report(process: Process) -> AgentReport:
    """What a process's agent reports; raises as `agent_client.open_agent` does."""
    reached = agent.open_agent(process)
    return AgentReport(
        **agent.get_process_fields(process),
        pid=process.pid,
        hello=reached.fetch_hello(),
        engine=reached.fetch_engine_state(),
        traffic=reached.fetch_traffic(),
        packages=fetch_package_versions(reached),
    )


def fetch_package_versions(agent_client: agent.Agent) -> dict[str, str]:
    """What is installed beside a process; nothing where its agent is too old to say."""
    try:
        return agent_client.fetch_packages().versions
    except VllmopsError:
        return {}


def observe_server(server: Server, began: float, *, web: bool = True) -> ServerSample:
    """What changes from moment to moment; costs next to nothing without `web`.

    Args:
        server: to examine.
        began: when the first sample was taken, by the monotonic clock.
        web: whether to ask for ``/metrics`` and ``/health``, too.
    """
    at_s = time.monotonic() - began
    metrics = health = None
    if web and server.url:
        answer = vllm_client.fetch_health(server.url)
        health = None if answer.has_retry_after else answer.status  # who drains is not unhealthy
        metrics = vllm_client.fetch_metrics(server.url) if answer.status else None
    state = observe_processes(server, compiling=True)
    return ServerSample(
        at_s=at_s,
        heartbeats=state.heartbeats,
        metrics=metrics,
        health=health,
        processes=state.states,
        compilers=state.compilers,
    )


class ProcessesSnapshot(NamedTuple):
    """The processes of a server, as the kernel and their heartbeats show them."""

    states: tuple[ProcessState, ...]
    heartbeats: tuple[ProcessHeartbeat, ...]
    compilers: tuple[str, ...] = ()


def observe_processes(server: Server, *, compiling: bool = False) -> ProcessesSnapshot:
    """The processes of a server now; costs next to nothing on this machine.

    Args:
        server: to look at.
        compiling: whether to look for compilers, too.
    """
    if server.fleet:
        try:
            members = server.fleet.fetch_snapshot()
        except VllmopsError:
            # A gateway may restart: as with a process that has died, it has ended if that lasts.
            gone = server.fleet.unreachable_s >= progress.PATIENCE_S
            return ProcessesSnapshot(
                tuple(
                    make_unreachable_state(process, is_server_gone=gone)
                    for process in server.processes
                ),
                (),
            )
        return ProcessesSnapshot(members.processes, members.heartbeats, members.compilers)
    below = tuple(find_compilers(server.processes)) if compiling else ()
    return ProcessesSnapshot(
        tuple(map(observe_process, server.processes)), tuple(read_heartbeats(server)), below
    )


def make_unreachable_state(process: Process, *, is_server_gone: bool) -> ProcessState:
    """A process of another machine that can't be asked about.

    Args:
        process: the process.
        is_server_gone: whether nobody answers any more for its server.
    """
    state = "" if is_server_gone else progress.UNSEEN
    return ProcessState(
        **agent.get_process_fields(process),
        pid=process.pid,
        create_time=process.create_time,
        state=state,
    )


def read_heartbeats(server: Server) -> Iterator[ProcessHeartbeat]:
    """The heartbeats of a server's processes."""
    for process in server.select_processes(*ROLES):
        with suppress(VllmopsError):
            if pulse := agent_files.read_heartbeat(process):
                yield ProcessHeartbeat(
                    **agent.get_process_fields(process),
                    pid=process.pid,
                    age_s=pulse.age_s,
                    heartbeat=pulse.heartbeat,
                )


def observe_machine(server: Server) -> Machine:
    """Memory, disks, shared memory and GPUs of the machine, and processes of dead servers."""
    if server.fleet:
        return Machine(memory_total=0, memory_available=0)
    table = processes.read_process_table()
    total, available = read_available_memory(server.pid)
    return Machine(
        memory_total=total,
        memory_available=available,
        disks=tuple(list_disks()),
        leftovers=tuple(list_shm_leftovers()),
        orphans=tuple(find_orphaned_processes(table)),
        gpus=gpu.observe_gpus(),
        xids=collect_xids(server),
    )


def collect_xids(server: Server) -> tuple[Xid, ...]:
    """GPU errors since a server began, also of one that is over.

    From the kernel's log, and those that only the driver told; without those that another process
    made for itself alone.
    """
    record = server.record
    ages = [process_identity.compute_age_s(process.start_ticks) for process in server.processes]
    if not ages and record and record.started_at:
        ages = [max(time.time() - record.started_at, 0.0)]
    logged = kernel_log.read_xids(max(ages, default=0.0))
    known = {(xid.gpu, xid.number) for xid in logged}
    found = (*logged, *(xid for xid in gpu.collect_xids() if (xid.gpu, xid.number) not in known))
    if shared_memory.explain_hidden_processes():
        return found  # pids are others than the kernel's
    own = {process.pid for process in (*server.processes, *(record.processes if record else ()))}
    return tuple(xid for xid in found if xid.number not in ONE_PROCESS or xid.pid in {None, *own})


def list_disks() -> Iterator[DiskSpace]:
    """The file systems that matter, every one once."""
    seen = set()
    for path, use in (
        (resolve_home(), "state and logs"),
        (Path("/tmp"), "temporary files"),  # noqa: S108 - where other programs write them
        (shared_memory.SHM, "shared memory"),
    ):
        with suppress(OSError):
            place = next(parent for parent in (path, *path.parents) if parent.exists())
            device = place.stat().st_dev
            if device not in seen:
                seen.add(device)
                usage = psutil.disk_usage(str(place))
                yield DiskSpace(str(place), use, usage.total, usage.free)


def list_shm_leftovers() -> Iterator[ShmLeftover]:
    """Segments of the kinds that vLLM makes and that no live process uses."""
    unused = shared_memory.find_unused_segments()
    for segment in unused.segments:
        owner = format_user(segment.uid)
        yield ShmLeftover(segment.name, segment.bytes, segment.age_s, owner, unused.uncertainty)


def find_orphaned_processes(table: processes.Table) -> Iterator[ProcessState]:
    """Processes of dead servers: what has started those of a live one is there."""
    for tree in membership.group_server_trees(table)[1]:
        if find_title_role(table[tree[0].pid].arguments) and processes.is_orphaned(tree[0].pid):
            yield observe_process(tree[0])


def check_exposure(server: Server) -> Exposure:
    """Who can reach a server, and what protects it."""
    if server.fleet:
        return Exposure()
    environment = proc.read_environment(server.pid) if server.pid else {}
    addresses = tuple(list_listening_addresses(server))
    exposed = any(not is_loopback(address) for address in addresses) if addresses else None
    key = environment.get(KEY)
    return Exposure(
        addresses=addresses,
        exposed=exposed,
        is_open=vllm_client.fetch_status_code(f"{server.url}/v1/models") == 200
        if exposed
        else None,
        # A path that exists answers another method with 405.
        dev_routes=vllm_client.fetch_status_code(f"{server.url}/reset_mm_cache", "OPTIONS") == 405
        if exposed
        else None,
        signing_key=None if not environment else "absent" if not key else classify_signing_key(key),
        store=None if not environment else "memory" if environment.get(STORE) == "1" else "none",
    )


def classify_signing_key(key: str) -> str:
    """Whether a signing key is strong: 32 bytes in hex, as vLLM's proposal demands."""
    is_hex = all(digit in "0123456789abcdefABCDEF" for digit in key)
    return "strong" if is_hex and len(key) >= KEY_DIGITS else "weak"


def list_listening_addresses(server: Server) -> Iterator[str]:
    """The addresses that a server listens on, with its port."""
    for process in server.select_processes(Role.API, Role.LAUNCHER):
        with suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections("tcp"):
                address = connection.laddr
                if connection.status == psutil.CONN_LISTEN and address.port == server.port:
                    yield f"{address.ip}:{address.port}"
            return


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::1:"))


def send_canary(server: Server) -> Canary:
    """Send one request for one token."""
    if not server.url:
        return Canary("unable", 0.0, "the server's address is not known")
    return vllm_client.request_one_token(server.url, CANARY_S)
