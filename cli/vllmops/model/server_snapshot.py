"""A server as `vllmops doctor` sees it: all that can be known from outside and from its agents.

Taken by `observe.server_snapshot`, judged by `rules.diagnosis`, kept in bundles. It also lists what
could not be read.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from .agent_state import SCHEMA, Count, EngineState, Heartbeat, Hello, Traffic
from .cache_comparison import CacheComparison
from .caches import CacheSnapshot
from .healing import HealProof
from .memory import MemoryRecording
from .patches import ProcessPatches
from .ranks import Placement
from .stacks import StacksSnapshot
from .step_recording import StepsRecording
from .vllm_metrics import Metrics


class Gap(msgspec.Struct, frozen=True):
    """Something that could not be examined.

    Args:
        part: what it is about, such as ``agent of engine 7``.
        code: a stable word, such as ``agent.absent``.
        reason: in words.
        hint: what to do about it; empty if nothing helps.
    """

    part: str
    code: str
    reason: str = msgspec.field(name="why")
    hint: str = ""


class ThreadTimeslices(msgspec.Struct, frozen=True):
    """A thread's turns on a processor so far, as in the kernel's ``schedstat``.

    Args:
        ran_s: seconds that it ran.
        waited_s: seconds that it could have run, and others did.
        count: how often it began to run.
    """

    ran_s: float
    waited_s: float
    count: int


class ProcessState(Placement, frozen=True, kw_only=True):
    """A process as the kernel sees it.

    Args:
        role: as `vllmops.model.roles.Role`.
        pid: process id.
        create_time: seconds since the epoch.
        title: the title vLLM gave it, such as ``VLLM::Worker_TP1``; empty without one.
        state: the kernel's letter: ``R``, ``S``, ``D``, ``T``, ``Z`` …; empty if it is gone,
            ``?`` if that can't be known now.
        cpu_s: user and system time so far, in seconds.
        main: the turns of its main thread; None if the kernel does not tell.
        rss_bytes: resident.
        threads: how many.
    """

    role: str
    pid: int
    create_time: float
    title: str = ""
    state: str = ""
    cpu_s: float = 0.0
    main: ThreadTimeslices | None = None
    rss_bytes: int | None = None
    threads: int | None = None


class AgentReport(Placement, frozen=True, kw_only=True):
    """An agent's report about its process, without caches and patches.

    Args:
        packages: the versions of what is installed beside it, as `model.package_versions` has them.
    """

    role: str
    pid: int
    hello: Hello
    engine: EngineState
    traffic: Traffic
    packages: dict[str, str] = msgspec.field(default_factory=dict)


class ProcessHeartbeat(Placement, frozen=True, kw_only=True):
    """A heartbeat as read from outside.

    Args:
        role, pid: of the process.
        age_s: seconds since it was written.
        heartbeat: its content.
    """

    role: str
    pid: int
    age_s: float
    heartbeat: Heartbeat = msgspec.field(name="beat")


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """The state at one moment.

    Args:
        at_s: seconds since the first look.
        heartbeats: of the processes that have a heartbeat.
        metrics: None if the server gives none.
        health: status of ``/health``, 0 if it took the connection and did not answer in time;
            None if it was not asked, can't be reached, or asks to come back later.
        processes: as the kernel sees them.
        compilers: names of compilers that run below the server, such as ``nvcc``.
    """

    at_s: float
    heartbeats: tuple[ProcessHeartbeat, ...] = msgspec.field(default=(), name="pulses")
    metrics: Metrics | None = None
    health: int | None = None
    processes: tuple[ProcessState, ...] = ()
    compilers: tuple[str, ...] = ()


CanaryOutcome = Literal["answered", "timeout", "refused", "unable"]


class Canary(msgspec.Struct, frozen=True):
    """One request for one token.

    Args:
        outcome: ``answered``, ``timeout``, ``refused`` (it was answered with an error) or
            ``unable``: it could not be sent.
        seconds: until the answer, or until it was given up.
        detail: in words.
    """

    outcome: CanaryOutcome
    seconds: float
    detail: str = ""


class Exposure(msgspec.Struct, frozen=True, kw_only=True):
    """Who can reach the server, and what protects it; None if unknown.

    Args:
        addresses: that it listens on.
        exposed: whether others than this machine reach one of them.
        is_open: whether ``/v1/models`` answers without an API key.
        dev_routes: whether vLLM's development routes are there.
        signing_key: ``absent``, ``weak`` or ``strong``.
        store: what keeps Responses: ``memory``, ``none``, or the store's URL without credentials.
    """

    addresses: tuple[str, ...] = ()
    exposed: bool | None = None
    is_open: bool | None = msgspec.field(default=None, name="open")
    dev_routes: bool | None = None
    signing_key: str | None = None
    store: str | None = None


class DiskSpace(msgspec.Struct, frozen=True):
    """A file system; bytes.

    Args:
        path: where it was asked about.
        use: what it is for.
    """

    path: str
    use: str
    total: Count
    free: Count


class ShmLeftover(msgspec.Struct, frozen=True):
    """A segment of ``/dev/shm`` that no live process uses.

    Args:
        name: in ``/dev/shm``.
        bytes: its size.
        age_s: seconds since it was last changed.
        owner: the user who owns it.
        uncertainty: why a process that can't be seen may use it; empty if none can.
    """

    name: str
    bytes: Count
    age_s: float
    owner: str = ""
    uncertainty: str = msgspec.field(default="", name="doubt")


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU; None if the driver does not say.

    Args:
        index: as the driver counts.
        name: of the model.
        used_bytes, total_bytes: memory, whoever uses it.
        utilization: share of the time in which a kernel ran, 0 to 1.
        memory_busy: share of the time in which its memory was read or written, 0 to 1.
        watts, limit_watts: power.
        clock_mhz, most_mhz: of its processors now, and at most.
        celsius: temperature.
        throttled: whether heat or power limit it.
        slowed_by: what lowers its clock, by NVML's names, such as ``SwPowerCap``, or amdsmi's, such
            as ``ppt_pwr``; also idleness.
        by_pid: bytes of memory by process; a driver in a container may tell pids of the host.
        bad_memory: uncorrected memory errors since the driver was loaded.
    """

    index: int
    name: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    utilization: float | None = msgspec.field(default=None, name="busy")
    memory_busy: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    clock_mhz: int | None = None
    most_mhz: int | None = None
    celsius: float | None = None
    throttled: bool | None = None
    slowed_by: tuple[str, ...] = ()
    by_pid: dict[int, int] = {}
    bad_memory: int | None = None


class Xid(msgspec.Struct, frozen=True):
    """An error of a GPU, as NVIDIA's driver writes it into the kernel's log, or tells it by NVML.

    Args:
        gpu: its PCI address.
        number: the kind of error, such as 79: the GPU has fallen off the bus.
        text: the line's rest.
        age_s: seconds since it was written.
    """

    gpu: str
    number: int
    text: str
    age_s: float

    @property
    def pid(self) -> int | None:
        """The process that the driver names, as the machine counts; None if it names none."""
        named = re.search(r"\bpid='?(\d{1,10})", self.text)
        return int(named[1]) if named else None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of the server; bytes.

    Args:
        memory_total: what this machine, or the container, may use.
        memory_available: of it.
        disks: those that matter to the server.
        leftovers: segments that no live process uses.
        orphans: processes of servers that are gone.
        gpus: none without a driver.
        xids: what NVIDIA's driver reported to the kernel's log since the server started; none where
            that log can't be read.
    """

    memory_total: Count
    memory_available: Count
    disks: tuple[DiskSpace, ...] = ()
    leftovers: tuple[ShmLeftover, ...] = ()
    orphans: tuple[ProcessState, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    xids: tuple[Xid, ...] = ()


class RasCapture(msgspec.Struct, frozen=True, kw_only=True):
    """The report of NCCL's RAS service on its communicators.

    Args:
        at_s: seconds since the first look.
        pid, port: of the process that answered.
        text: JSON, or text of an NCCL before 2.28.7.
    """

    at_s: float
    pid: int
    port: int
    text: str


class ServerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One server.

    Args:
        schema: of this type.
        taken_at: seconds since the epoch.
        vllmops: the version that took it.
        server: its name, or the pid of its first process.
        url: where it answers, None if unknown.
        model: as given to vLLM.
        state: of an instance that vllmops started, such as ``starting``; else empty.
        stage: the stage of an instance that starts.
        failure: why an instance failed, in vLLM's words; empty for one that has not.
        uptime_s: seconds since its first process began.
        vllm_version: None if unknown.
        samples: some time apart, in their order.
        reports: of the agents.
        caches: None if no agent reported any.
        comparisons: of both sides of its caches, by each API server; none of a quiet one, whose
            `caches` tell as much.
        patches: by process.
        stacks: samples, in their order.
        ras: NCCL's reports, in their order; empty if this NCCL gives none.
        memory: the newest recording of it, None without one.
        recordings: the last steps of its engines.
        lost_loads: requests that wait for KV blocks in vain, as three looks have proven.
        guard: who can reach it.
        machine: that it runs on.
        canary: None unless asked for.
        gaps: what could not be examined.
    """

    kind: Literal["server"] = "server"
    schema: int = SCHEMA
    taken_at: float
    vllmops: str
    server: str
    url: str | None = None
    model: str | None = None
    state: str = ""
    stage: str = ""
    failure: str = ""
    uptime_s: float | None = None
    vllm_version: str | None = None
    samples: tuple[ServerSample, ...] = msgspec.field(default=(), name="looks")
    reports: tuple[AgentReport, ...] = ()
    caches: CacheSnapshot | None = None
    comparisons: tuple[CacheComparison, ...] = ()
    patches: tuple[ProcessPatches, ...] = ()
    stacks: tuple[StacksSnapshot, ...] = ()
    ras: tuple[RasCapture, ...] = ()
    memory: MemoryRecording | None = None
    recordings: tuple[StepsRecording, ...] = ()
    lost_loads: tuple[HealProof, ...] = ()
    guard: Exposure = Exposure()
    machine: Machine
    canary: Canary | None = None
    gaps: tuple[Gap, ...] = msgspec.field(default=(), name="unseen")
