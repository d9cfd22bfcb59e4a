"""The memory of a server's processes over time; sizes in bytes, times in seconds.

What only the process itself knows comes from the agent, the rest from outside. Judged by
`rules.memory_growth`, kept in files by `model.snapshot_files`: a head, then a line for each sample.
"""

from __future__ import annotations

import msgspec

from .agent_state import SCHEMA, AgentAnswer, Count, Moment
from .ranks import Placement


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The ``Request`` objects of an engine.

    Args:
        alive_requests: that exist.
        finished_alive: those of them that are finished and that the scheduler no longer knows.
        known_requests: that the scheduler knows.
        late_s: seconds from the process's start to the moment when counting began; what is older
            and not in use any more is not counted.
    """

    alive_requests: Count = msgspec.field(name="alive")
    finished_alive: Count
    known_requests: Count = msgspec.field(name="known")
    late_s: float


class CacheUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache holds.

    Args:
        kind: ``mm-lru``, ``mm-processor-only``, ``mm-shm``, ``encoder`` (a scheduler's, which
            counts slots) or ``encoder-outputs`` (a worker's).
        name: the class's name.
        entries: items in it, None if this side does not know.
        bytes: the size that it counts, None if it does not count.
        is_own_memory: whether those bytes are this process's own memory: not of a front end that
            keeps count of what the engine has, nor of shared memory, nor of a GPU's.
        slots: of an encoder cache, in use.
    """

    kind: str
    name: str
    entries: Count | None
    bytes: Count | None = None
    is_own_memory: bool = msgspec.field(default=False, name="here")
    slots: Count | None = None


class GcGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of Python's garbage collector.

    Args:
        count: as ``gc.get_count()`` says: how near its next collection is.
        collections: so far.
        collected_objects: objects, so far.
    """

    count: Count
    collections: Count
    collected_objects: Count = msgspec.field(name="collected")


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """An API server's store of Responses, in entries: counting its bytes would cost too much."""

    responses: Count
    messages: Count
    events: Count


class AgentMemory(AgentAnswer, frozen=True, kw_only=True):
    """What an agent says about its process's memory.

    Args:
        requests: None if the process has no scheduler.
        caches: each cache that could be read.
        gc: by generation, the youngest first.
        store: None if there is none.
        unfinished_requests: requests that the scheduler knows, None without one.
        in_flight: HTTP requests being answered, None if it can't count them.
        problems: what is unknown, and why, in words.
    """

    requests: RequestCounts | None = None
    caches: tuple[CacheUsage, ...] = ()
    gc: tuple[GcGeneration, ...] = ()
    store: StoreCounts | None = None
    unfinished_requests: Count | None = msgspec.field(default=None, name="unfinished")
    in_flight: Count | None = None
    problems: tuple[str, ...] = ()


class ProcessMemory(Placement, frozen=True, kw_only=True, omit_defaults=True):
    """One process in one sample.

    Args:
        role: what it does.
        pid: process id.
        rss_bytes: resident, shared pages included; None if the process is gone.
        pss_bytes: resident, shared pages by share; None if it was not measured.
        uss_bytes: resident and its own; None if it was not measured.
        gpu_bytes: on all GPUs; None without a GPU, or where the driver does not say.
        agent: what its agent reported; None if it has none or did not answer.
        gap_reason: why `agent` is None, in words.
    """

    role: str
    pid: int
    rss_bytes: Count | None = None
    pss_bytes: Count | None = None
    uss_bytes: Count | None = None
    gpu_bytes: Count | None = None
    agent: AgentMemory | None = None
    gap_reason: str = msgspec.field(default="", name="silent")


class MemorySample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sample"):
    """All processes at one moment.

    Args:
        taken_at: seconds since the epoch.
        round: rounds of the load so far, 0 before the first; None in a recording by time.
        processes: those of the recording's start, in the same order.
        quiet: whether nothing was in flight, as far as the agents know; None if none answered.
        gpus_bytes: of each GPU, what everybody uses of it.
    """

    taken_at: Moment
    round: Count | None = None
    processes: list[ProcessMemory]
    quiet: bool | None = None
    gpus_bytes: list[Count] = []


class RecordingEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """How a recording ended.

    Args:
        ended_at: seconds since the epoch.
        reason: what cut it short, in words; empty if it ended as planned.
    """

    ended_at: Moment = msgspec.field(name="at")
    reason: str = msgspec.field(default="", name="why")


class MemoryRecordingHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording's file begins with.

    Args:
        kind: what the file holds.
        schema: raised when an older reader would misread it.
        server: how the server was named.
        model: what it serves, None if unknown.
        started_at: seconds since the epoch.
        rounds: of the load; None in a recording by time.
        interval_s: between samples; None in one by rounds.
        duration_s: planned; None in one by rounds.
        load: a built-in load's name or a command, empty without.
        requests: of a built-in load in each round.
        seed: that its inputs came from.
        tolerance_bytes: growth that counts as none, for each round or hour; None means the default.
    """

    kind: str = "memory"
    schema: int = SCHEMA
    server: str
    model: str | None = None
    started_at: Moment
    rounds: Count | None = None
    interval_s: float | None = None
    duration_s: float | None = None
    load: str = ""
    requests: Count | None = None
    seed: Count | None = None
    tolerance_bytes: Count | None = None


class MemoryRecording(msgspec.Struct, kw_only=True):
    """A recording so far.

    Args:
        head: what was asked for.
        samples: in the order of time.
        end: None while it runs, or if it was killed.
    """

    head: MemoryRecordingHead
    samples: list[MemorySample] = []
    end: RecordingEnd | None = None
