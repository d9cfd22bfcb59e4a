"""What the looks at a server say of it to an orchestrator: pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..model.findings import Finding
from ..model.probe import VITAL, ProbeResult, judge_state
from ..model.ranks import format_process
from ..model.server_snapshot import ProcessState, ServerSample, ServerSnapshot
from ..rules.diagnosis import Diagnosis, find_cause
from ..rules.progress import FINAL, UNSEEN, Stall, select_live_heartbeats
from ..rules.stacks.thread_phases import ThreadPosition, find_thread_position
from ..rules.step_limits import compute_step_deadline
from ..servers.discovery import Server
from ..servers.record import InstanceState

# Whatever it is, so long without progress is no work: not a prompt of many tokens.
LONG_S = 120.0
# These are so whatever the processes do.
FACTS = {"engine.missing", "process.stopped", "stack.crash", "stack.engine-core-missing"}
# No work ever looks like these, however busy the process is.
PROOFS = {
    *("stack.admission-deadlock", "stack.dp-collective-mismatch", "stack.input-thread-dead"),
    *("stack.lost-broadcast", "stack.mm-cache-eviction-spin", "stack.schedule-livelock"),
    "stack.tool-parser-regex",
}
BUSY = 0.1  # of a core, or of a GPU's time; one that is blocked still beats and is looked into
LEAST = 0.01  # of a core, for who gets hardly any of it
HALF = 0.5  # of the time
TURN_S = 0.0005  # of a thread that computes, on average
# It waits so long for a turn where others have the processors: what it would do can't be known.
WAIT_S = 0.1
WINDOW_S = 8.0
NUMBER = re.compile(r"\d+")
STEPPING = {"engine", "worker"}  # the roles whose threads take part in a step
# States of a process that could go on, or waits for a disk.
HINDERED = {"R", "D", UNSEEN}
FEW = 3  # looks in a row
# Waits that may take long in a server that works.
OUTSIDE = {
    *("transfer", "module-load", "benchmark", "compile", "build-lock", "storage"),
    "grammar-compile",
}
# Images and videos are encoded in the step that schedules the first token of one.
ENCODER = re.compile(r"encoder|embed_multimodal|vision_(?:tower|model)")


class StallProof(NamedTuple):
    """What makes a stall sure.

    Args:
        after_s: how many seconds it must have lasted.
        reason: in words; empty where only its length tells.
    """

    after_s: float
    reason: str = ""


def prove_stalls(
    stalls: Sequence[Stall],
    snapshot: ServerSnapshot,
    diagnosis: Diagnosis,
    stall_periods: Sequence[tuple[float, float]] = (),
) -> StallProof:
    """From when on stalls are sure.

    A step of a long prompt keeps one place in the stacks for half a minute, as a hang does. What
    tells it from a hang: the processor or the GPU works, and its length agrees with its size.

    Args:
        stalls: the stalls.
        snapshot: the evidence.
        diagnosis: of that.
        stall_periods: earlier stalls, from when to when in seconds since the epoch.
    """
    why, explained = find_cause(stalls, diagnosis), diagnosis.explanation
    if any(stall.code in FINAL for stall in stalls) or why.code in FACTS:
        return StallProof(0.0, why.title)
    if is_cpu_starved(snapshot):
        return StallProof(LONG_S)
    if why.code in PROOFS:
        return StallProof(0.0, why.title)
    if explained and explained.verdict == "hang" and not is_computing(snapshot, why):
        return StallProof(0.0, f"{why.title}, and nothing computes")
    stuck = {stall.subject for stall in stalls if stall.alternative in {"", "writing"}}
    engines = [each for each in snapshot.recordings if each.alive and format_process(each) in stuck]
    if not engines or can_take_long(snapshot):
        return StallProof(LONG_S)
    if is_idle(snapshot):
        return StallProof(0.0, "nothing computes, and nothing outside the server is waited for")
    # Data parallel ranks step together: each waits for the one with the longest prompt.
    steps = {
        p.pid: p.heartbeat.current_step for look in snapshot.samples[-1:] for p in look.heartbeats
    }
    paces = [
        compute_step_deadline(each, steps.get(each.pid), stall_periods)
        for each in snapshot.recordings
        if each in engines or (each.alive and each.open_step)
    ]
    known, slow = [pace for pace in paces if pace], compute_slowdown(snapshot)
    if slow is None or len(known) < len(paces):
        return StallProof(LONG_S)
    last = max(known)
    return StallProof(min(slow * last.after_s, LONG_S), last.reason)


def can_take_long(snapshot: ServerSnapshot) -> bool:
    """Whether a step may take long for a reason that its size does not tell."""
    if any(each.steps and each.steps[-1].deferred for each in snapshot.recordings):
        return True  # for a transfer, from elsewhere
    inside = [
        process
        for sample in snapshot.stacks
        for process in sample.processes
        if process.role in STEPPING
    ]
    return (
        not inside
        or not all(process.threads for process in inside)
        or any(
            is_outside_step(find_thread_position(p, thread)) for p in inside for thread in p.threads
        )
    )


def is_outside_step(position: ThreadPosition) -> bool:
    """Whether a thread does, or waits for, what is no part of most steps."""
    return (
        position.wait in OUTSIDE
        or position.phase.stage == "start"
        or position.phase.id == "maintenance"
        or any(ENCODER.search(frame.function) for frame in position.thread.frames)
    )


def is_idle(snapshot: ServerSnapshot) -> bool:
    """Whether no process and no GPU does anything."""
    vital = {p.pid for look in snapshot.samples[-1:] for p in look.processes if p.role in VITAL}
    return bool(vital) and not is_active(snapshot, vital)


def compute_slowdown(snapshot: ServerSnapshot) -> float | None:
    """How many times longer a step takes because others have the processors; None if unknown."""
    last = snapshot.samples[-1].processes if snapshot.samples else ()
    inside = {process.pid for process in last if process.role in STEPPING}
    if any(process.state == UNSEEN for process in last):
        return None
    wanted = compute_cpu_demands(snapshot)
    busiest = max(inside, key=lambda pid: wanted.get(pid, 0.0), default=0)
    if wanted.get(busiest, 0.0) >= BUSY:
        return 1.0 / min(max(compute_cpu_shares(snapshot)[busiest], LEAST), 1.0)
    return None if inside & find_hindered_pids(snapshot) else 1.0


def find_hindered_pids(snapshot: ServerSnapshot) -> set[int]:
    """The processes that could go on but get no processor, wait for a disk, or can't be seen."""
    found = [
        {process.pid for process in look.processes if process.state in HINDERED}
        for look in snapshot.samples[-FEW:]
    ]
    return set[int].intersection(*found) if found else set()


def compute_cpu_shares(snapshot: ServerSnapshot) -> dict[int, float]:
    """How much of a processor each process has used of late, by pid."""
    return {
        pid: (after.cpu_s - before.cpu_s) / apart_s
        for pid, (before, after, apart_s) in pair_recent_states(snapshot).items()
    }


def compute_cpu_demands(snapshot: ServerSnapshot) -> dict[int, float]:
    """How much of a processor each process has used of late, or would have if it could."""
    missed = compute_cpu_waits(snapshot)
    return {
        pid: share + missed.get(pid, 0.0) for pid, share in compute_cpu_shares(snapshot).items()
    }


def compute_cpu_waits(snapshot: ServerSnapshot) -> dict[int, float]:
    """The share of time in which each main thread could compute, and others had the processor.

    A thread that only wakes up to look for something waits for its turns, too, but they are short,
    and so are the waits.
    """
    found = {}
    for pid, (before, after, apart_s) in pair_recent_states(snapshot).items():
        if before.main and after.main:
            turns = after.main.count - before.main.count
            ran_s = after.main.ran_s - before.main.ran_s
            waited_s = after.main.waited_s - before.main.waited_s
            if ran_s >= turns * TURN_S or waited_s >= turns * WAIT_S:
                found[pid] = waited_s / apart_s
    return found


def is_cpu_starved(snapshot: ServerSnapshot) -> bool:
    """Whether a process of the server gets next to no processor: then its stacks stand anyway."""
    states = {p.pid: p for look in snapshot.samples[-1:] for p in look.processes if p.role in VITAL}
    used, missed, kept = (
        compute_cpu_shares(snapshot),
        compute_cpu_waits(snapshot),
        find_hindered_pids(snapshot),
    )
    return any(
        used.get(pid, BUSY) < LEAST
        and (missed.get(pid, 0.0) >= HALF or (pid in kept and process.state != UNSEEN))
        for pid, process in states.items()
    )


def pair_recent_states(
    snapshot: ServerSnapshot,
) -> dict[int, tuple[ProcessState, ProcessState, float]]:
    """Each process at the first and at the last look of late, and the seconds between."""
    first, last = dict[int, tuple[float, ProcessState]](), dict[int, tuple[float, ProcessState]]()
    for look in snapshot.samples:
        if snapshot.samples[-1].at_s - look.at_s <= WINDOW_S:
            for process in look.processes:
                first.setdefault(process.pid, (look.at_s, process))
                last[process.pid] = (look.at_s, process)
    return {
        pid: (first[pid][1], process, at_s - first[pid][0])
        for pid, (at_s, process) in last.items()
        if at_s > first[pid][0]
    }


def is_computing(snapshot: ServerSnapshot, finding: Finding) -> bool:
    """Whether the processes that a finding is about compute; all of them if it names none.

    An engine by itself waits for its workers, so they are meant, too, where they can be seen.
    """
    last = {pid: after for pid, (_, after, _) in pair_recent_states(snapshot).items()}
    named = last.keys() & set(map(int, NUMBER.findall(finding.subject))) or set(last)
    ranks = {(last[pid].node, last[pid].dp_rank) for pid in named if last[pid].role == "engine"}
    workers = {pid for pid, p in last.items() if p.role == "worker" and p.state != UNSEEN}
    if workers.isdisjoint(named):
        named |= {pid for pid in workers if (last[pid].node, last[pid].dp_rank) in ranks}
    return not named or is_active(snapshot, named)


def is_active(snapshot: ServerSnapshot, pids: Collection[int]) -> bool:
    """Whether one of these processes, or any GPU, works, or would if it could."""
    wanted = compute_cpu_demands(snapshot)
    return (
        max((wanted.get(pid, 0.0) for pid in pids), default=0.0) >= BUSY
        or not find_hindered_pids(snapshot).isdisjoint(pids)
        or any(gpu.utilization is None or gpu.utilization >= BUSY for gpu in snapshot.machine.gpus)
    )


def describe_likely_stall(stalls: Sequence[Stall]) -> str:
    """The first stall that can hardly be anything else, in words; empty without one."""
    return next((stall.evidence for stall in stalls if not stall.alternative), "")


def is_server_up(sample: ServerSample) -> bool:
    """Whether a server that has no record is up: its front end runs, or its engines schedule."""
    engines = [pulse.heartbeat for pulse in sample.heartbeats if pulse.role == "engine"]
    return (
        sample.health == 200
        or any(pulse.heartbeat.loop_s is not None for pulse in sample.heartbeats)
        or (bool(engines) and all(beat.current_step is not None for beat in engines))
    )


def judge_server(
    server: Server,
    sample: ServerSample | None,
    *,
    was_up: bool = False,
    is_over: bool = False,
    stall: str = "",
    is_certain: bool = False,
    evidence: str = "",
    note: str = "",
) -> ProbeResult:
    """The verdict on a server.

    Args:
        server: as it is known now.
        sample: the last one; None before the first one.
        was_up: whether a server without a record was up before.
        is_over: whether a server without a record is gone.
        stall: what makes no progress, in words; empty without a stall.
        is_certain: whether that is proven.
        evidence: the bundle that was kept of it; empty without one.
        note: which of its nodes do not answer.
    """
    unready = dict.fromkeys(
        pulse.heartbeat.unready
        for pulse in (select_live_heartbeats(sample) if sample else ())
        if pulse.heartbeat.unready
    )
    if record := server.record:
        state, stage = record.state, record.stage
    elif is_over:
        state, stage = InstanceState.FAILED, ""
    else:
        was_up = was_up or (sample is not None and is_server_up(sample))
        state, stage = (
            (InstanceState.READY if was_up else InstanceState.STARTING),
            "it does not answer yet",
        )
    return judge_state(
        state,
        stage,
        unready=unready,
        stall="; ".join(filter(None, (stall, note))),
        is_certain=is_certain,
        evidence=evidence,
    )
