"""The rows that ``vllmops top`` shows: pure functions of looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from ..model.caches import (
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from ..model.findings import Finding, Severity
from ..model.ranks import Placement, format_role_and_ranks, make_process_key
from ..model.roles import Role
from ..model.server_snapshot import Gap, ProcessHeartbeat, ProcessState
from ..model.vllm_metrics import Metrics
from ..observe.requests.listing import InFlightRequest
from ..rules.progress import DEAD, LATE_S, RULES, Stall
from .server_followers import TargetSample

FRESH = 30  # looks, after which metrics are old
STILL_S = 2.0  # a step of a healthy engine is shorter, as a rule
KERNEL = {"T": "stopped by a signal", "t": "stopped by a debugger", "?": "not known"}
RULE = {rule.code: rule for rule in RULES}


class ProcessRow(Placement, frozen=True, kw_only=True):
    """A process.

    Args:
        role, pid: of it.
        state: in words.
        severity: of that state; None if it is well.
        cpu: cores that it used between the last two looks; None if unknown.
        rss_bytes: resident; None if unknown.
        step: calls of ``schedule()`` so far; None if the process has no scheduler.
        running, waiting: requests; None if the process has no scheduler.
    """

    role: str
    pid: int
    state: str
    severity: Severity | None = None
    cpu: float | None = None
    rss_bytes: int | None = None
    step: int | None = None
    running: int | None = None
    waiting: int | None = None


class NodeRow(msgspec.Struct, frozen=True):
    """A node; its name is empty where the server does not tell."""

    name: str
    processes: tuple[ProcessRow, ...]


class CacheRow(msgspec.Struct, frozen=True):
    """A cache.

    Args:
        name: its kind and side.
        process: that has it.
        entries: None if it does not count them.
        usage, capacity: in `unit`; None if unknown.
        unit: ``bytes`` or ``slots``.
        hits, queries: so far; None if it does not count them.
    """

    name: str
    process: str
    entries: int | None
    usage: float | None = msgspec.field(name="used")
    capacity: float | None
    unit: str
    hits: int | None = None
    queries: int | None = None


class ServerFigures(msgspec.Struct, frozen=True):
    """A server's figures at one moment; None if unknown.

    Args:
        tokens_per_s: of prompts and answers.
        running, waiting: requests.
        kv: share of the KV cache in use, 0 to 1; of the fullest engine.
        prefix_hits: share of tokens found in the prefix cache, since the start.
        mm_hits: share of items found in the multimodal cache, since the start.
    """

    tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    prefix_hits: float | None = None
    mm_hits: float | None = None


class ServerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A server.

    Args:
        target: what ``--target`` takes.
        state: in words.
        severity: of that state; None if it is well.
        stage: the stage of one that starts.
        url, model: None if unknown.
        age_s: seconds since the last look; None before the first.
        nodes: with their processes.
        figures: the last ones.
        caches: of its processes.
        requests: in flight, the oldest first.
        findings: worst first.
        gaps: what could not be seen.
    """

    target: str
    state: str
    severity: Severity | None = None
    stage: str = ""
    url: str | None = None
    model: str | None = None
    age_s: float | None = None
    nodes: tuple[NodeRow, ...] = ()
    figures: ServerFigures = ServerFigures()
    caches: tuple[CacheRow, ...] = ()
    requests: tuple[InFlightRequest, ...] = ()
    findings: tuple[Finding, ...] = ()
    gaps: tuple[Gap, ...] = msgspec.field(default=(), name="unseen")


def make_server_row(target: str, samples: Sequence[TargetSample], now_s: float) -> ServerRow:
    """The row of a server.

    Args:
        target: what ``--target`` takes.
        samples: at it, oldest first; there may be none.
        now_s: the time, by the monotonic clock.
    """
    if not samples:
        return ServerRow(target=target, state="not seen yet", severity=Severity.WARNING)
    look = samples[-1]
    state, severity = describe_condition(look)
    return ServerRow(
        target=target,
        state=state,
        severity=severity,
        stage=look.stage if look.state == "starting" else "",
        url=look.url,
        model=look.model,
        age_s=max(now_s - look.at_s, 0.0),
        nodes=tuple(make_node_rows(samples)),
        figures=compute_figures(samples),
        caches=tuple(row for told in look.details.caches for row in make_cache_rows(told)),
        requests=look.details.requests,
        findings=tuple(list_findings(look)),
        gaps=tuple(list_gaps(look)),
    )


def describe_condition(sample: TargetSample) -> tuple[str, Severity | None]:
    """A server's state in words, and how bad it is."""
    if sample.problem:
        return "not seen", Severity.ERROR
    if sample.state == "starting":
        return sample.state, None
    if sample.reason:
        bad = Severity.ERROR if sample.state in {"", "failed"} else Severity.WARNING
        return (sample.state or "ended"), bad
    if (
        sample.server_sample
        and (lost := {p.state for p in sample.server_sample.processes})
        and lost <= {*DEAD, "?"}
    ):
        return ("not reached" if "?" in lost else "ended"), Severity.ERROR
    sure = [stall for stall in sample.stalls if not stall.alternative]
    if sure or sample.stalls:
        seconds = max(stall.since_s for stall in sure or sample.stalls)
        return (
            f"{'stalled' if sure else 'perhaps stalled'} for {seconds:.0f} s",
            Severity.ERROR if sure else Severity.WARNING,
        )
    beats = (
        [pulse.heartbeat for pulse in sample.server_sample.heartbeats]
        if sample.server_sample
        else []
    )
    unready = {beat.unready: None for beat in beats if beat.unready}
    return ", ".join((sample.state or "up", *unready)), Severity.WARNING if unready else None


def list_findings(sample: TargetSample) -> Iterator[Finding]:
    """What is wrong, the worst first, as far as looks show it."""
    found = [*map(make_stall_finding, sample.stalls), *sample.details.findings]
    yield from sorted(found, key=lambda finding: -finding.severity.rank)


def make_stall_finding(stall: Stall) -> Finding:
    """The finding that a stall is; what only stacks can decide is a warning."""
    found = RULE[stall.code].make_finding(stall.subject, stall.evidence)
    if not stall.alternative:
        return found
    evidence = f"{stall.evidence}; only the stacks can tell whether it is stuck"
    return msgspec.structs.replace(found, severity=Severity.WARNING, evidence=evidence)


def list_gaps(sample: TargetSample) -> Iterator[Gap]:
    """What could not be seen, and why."""
    if sample.problem:
        yield sample.problem
    elif sample.reason and sample.state != "starting":
        hint = f"vllmops logs {sample.target}" if sample.state else "vllmops ps --all"
        yield Gap(sample.target, "target.over", sample.reason, hint)
    if sample.details.note:
        hint = "vllmops help agent.node-lost"
        yield Gap("other nodes", "agent.node-lost", sample.details.note, hint)
    yield from sample.details.gaps


# -- processes -----------------------------------------------------------------------------------


def make_node_rows(samples: Sequence[TargetSample]) -> Iterator[NodeRow]:
    """The nodes of a server, in the order of their first process."""
    seen = samples[-1].server_sample
    if seen is None:
        return
    earlier = next((look for look in reversed(samples[:-1]) if look.server_sample), None)
    before = (
        {make_process_key(p): p for p in earlier.server_sample.processes}
        if earlier and earlier.server_sample
        else {}
    )
    apart_s = samples[-1].at_s - earlier.at_s if earlier else 0.0
    pulses = {make_process_key(pulse): pulse for pulse in seen.heartbeats}
    found: dict[str, list[ProcessRow]] = {}
    for state in seen.processes:
        if state.role == Role.OTHER:
            continue
        row = make_process_row(
            state, pulses.get(make_process_key(state)), before.get(make_process_key(state)), apart_s
        )
        found.setdefault(state.node, []).append(row)
    for name, rows in found.items():
        yield NodeRow(name, tuple(rows))


def make_process_row(
    state: ProcessState,
    heartbeat: ProcessHeartbeat | None,
    previous_state: ProcessState | None,
    apart_s: float,
) -> ProcessRow:
    """The row of a process.

    Args:
        state: as the kernel sees it.
        heartbeat: its heartbeat; None without one.
        previous_state: as the kernel saw it `apart_s` ago; None if unknown.
        apart_s: seconds.
    """
    cpu = None
    if previous_state and apart_s > 0 and state.state not in DEAD:
        cpu = max(state.cpu_s - previous_state.cpu_s, 0.0) / apart_s
    text, severity = describe_process_state(state, heartbeat)
    return ProcessRow(
        **state.placement_fields(),
        role=state.role,
        pid=state.pid,
        state=text,
        severity=severity,
        cpu=cpu,
        rss_bytes=state.rss_bytes,
        step=heartbeat.heartbeat.current_step if heartbeat else None,
        running=heartbeat.heartbeat.running if heartbeat else None,
        waiting=heartbeat.heartbeat.waiting if heartbeat else None,
    )


def describe_process_state(
    state: ProcessState, heartbeat: ProcessHeartbeat | None
) -> tuple[str, Severity | None]:
    """What a process does, and how bad that is."""
    if state.state in DEAD:
        return "has ended", Severity.ERROR
    if state.state in KERNEL:
        return KERNEL[state.state], Severity.WARNING if state.state == "?" else Severity.ERROR
    if heartbeat is None:
        return (
            ("no agent", Severity.INFO) if state.role in {"api", "engine", "worker"} else ("", None)
        )
    if heartbeat.age_s >= LATE_S:
        return f"no heartbeat for {heartbeat.age_s:.0f} s", Severity.WARNING
    beat = heartbeat.heartbeat
    if (beat.loop_s or 0.0) >= LATE_S:
        return f"event loop blocked for {beat.loop_s:.0f} s", Severity.ERROR
    if (beat.still_s or 0.0) >= STILL_S:
        return f"no token for {beat.still_s:.0f} s", Severity.WARNING
    if beat.unready:
        return beat.unready, Severity.WARNING
    if beat.running or beat.waiting or beat.engine_requests or beat.rendering_s:
        return "at work", None
    return "idle" if state.role != Role.WORKER else "", None


# -- figures -------------------------------------------------------------------------------------


def compute_figures(samples: Sequence[TargetSample]) -> ServerFigures:
    """The figures by the last looks; metrics are those that were read last."""
    read = list_timed_metrics(samples[-FRESH:])
    running, waiting = count_requests(samples[-1], read[-1][1] if read else None)
    if not read or samples[-1].server_sample is None:
        return ServerFigures(running=running, waiting=waiting)
    metrics = read[-1][1]
    return ServerFigures(
        tokens_per_s=compute_token_rate(*read[-2:]) if len(read) > 1 else None,
        running=running,
        waiting=waiting,
        kv=metrics.kv_cache_usage,
        prefix_hits=compute_share(metrics.prefix_hits, metrics.prefix_queries),
        mm_hits=compute_share(metrics.mm_hits, metrics.mm_queries),
    )


def list_timed_metrics(samples: Sequence[TargetSample]) -> list[tuple[float, Metrics]]:
    """The metrics that were read, with the time of each."""
    return [
        (look.at_s, look.server_sample.metrics)
        for look in samples
        if look.server_sample and look.server_sample.metrics
    ]


def count_requests(
    sample: TargetSample, metrics: Metrics | None
) -> tuple[float | None, float | None]:
    """Requests running and waiting: by heartbeats, as metrics keep their values in a hang."""
    beats = (
        [pulse.heartbeat for pulse in sample.server_sample.heartbeats]
        if sample.server_sample
        else []
    )
    known = [beat for beat in beats if beat.running is not None]
    if known:
        return sum(b.running or 0 for b in known), sum(b.waiting or 0 for b in known)
    return (metrics.running, metrics.waiting) if metrics else (None, None)


def compute_token_rate(
    first_sample: tuple[float, Metrics], last_sample: tuple[float, Metrics]
) -> float | None:
    """Tokens per second between two readings of the metrics."""
    (began_s, before), (end_s, after) = first_sample, last_sample
    if before.tokens is None or after.tokens is None or end_s <= began_s:
        return None
    grown = after.tokens - before.tokens
    return grown / (end_s - began_s) if grown >= 0 else None  # the server was started anew


def compute_share(part: float | None, total: float | None) -> float | None:
    return (part or 0.0) / total if total else None


def make_sparkline_series(samples: Sequence[TargetSample]) -> dict[str, list[float]]:
    """What sparklines show, oldest first, by the names in `ServerFigures`.

    Running and waiting have a value for each look, the others one for each reading of the metrics.
    """
    read = list_timed_metrics(samples)
    counts = [
        count_requests(look, look.server_sample.metrics if look.server_sample else None)
        for look in samples
    ]
    return {
        "tokens_per_s": [compute_token_rate(first, last) or 0.0 for first, last in pairwise(read)],
        "running": [running or 0.0 for running, _ in counts],
        "waiting": [waiting or 0.0 for _, waiting in counts],
        "kv": [metrics.kv_cache_usage or 0.0 for _, metrics in read],
    }


def make_cache_rows(process_caches: ProcessCaches) -> Iterator[CacheRow]:
    """The caches of a process."""
    process = " ".join(
        filter(
            None,
            (format_role_and_ranks(process_caches.role, process_caches), str(process_caches.pid)),
        )
    )
    for cache in process_caches.caches:
        match cache:
            case LruCache():
                name = f"{cache.kind} {cache.side}"
                counts = (cache.entries, cache.bytes, cache.capacity_bytes, "bytes")
                yield CacheRow(name, process, *counts, cache.hits, cache.queries)
            case ShmCache() if cache.writer:
                name = f"{cache.kind} {cache.side}"
                counts_ = (len(cache.keys), cache.bytes, cache.capacity_bytes, "bytes")
                yield CacheRow(name, process, *counts_, cache.hits, cache.queries)
            case EncoderCache():
                used = cache.slots - cache.free_slots
                yield CacheRow(
                    "encoder", process, len(cache.requests_by_key), used, cache.slots, "slots"
                )
            case EncoderDecoderCache():
                used = cache.slots - cache.free_slots
                yield CacheRow("encoder", process, None, used, cache.slots, "slots")
            case WorkerEncoderCache():
                yield CacheRow("encoder", process, len(cache.keys), cache.bytes, None, "bytes")
            case _:
                pass
