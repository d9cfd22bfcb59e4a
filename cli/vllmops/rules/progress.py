"""Whether a server makes no progress: pure functions of its samples.

``/health`` and the gauge of running requests can't show it: ``/health`` makes no round trip to the
engine, and the gauge keeps its last value when the engine stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from ..model import probe
from ..model.findings import Rule, Severity
from ..model.ranks import format_process, make_process_key
from ..model.server_metrics import Certainty
from ..model.server_snapshot import AgentReport, ProcessHeartbeat, ServerSample
from ..support.numbers import format_count

PATIENCE_S = probe.PATIENCE_S
# Longer than any step but that of a machine that has no memory left.
SURE_S = 60.0
# Metrics count a prompt's tokens when all of them are processed, so they need more patience.
METRICS_FACTOR = 3.0
# A beat is due every second, and a busy machine may be late with it.
LATE_S = 3.0
SAME_BEAT_S = 0.1
# The API server fetches and decodes images before it gives a request to the engine.
RENDERING_S = 5.0
# A dead engine stays dead; this leaves time to a server that is just shutting down.
UNHEALTHY_S = 3.0
DEAD = {"", "Z"}  # states of a process
UNSEEN = "?"  # the state of a process on another machine
STACKS = "vllmops stacks dump --explain names the code that is stuck"

NO_PROGRESS = Rule(
    "engine.no-progress",
    Severity.ERROR,
    "requests are pending but no tokens are produced",
    STACKS,
)
UNREACHED = Rule(
    "engine.unreached",
    Severity.ERROR,
    "requests left the API server and did not reach the scheduler",
    STACKS,
)
NO_PYTHON = Rule(
    "process.no-python",
    Severity.ERROR,
    "a process no longer runs Python",
    "it is stopped, or native code holds the GIL: vllmops stacks dump --native shows which",
)
API_SILENT = Rule(
    "api.silent",
    Severity.ERROR,
    "the API server answers nothing, not even /health",
    "its event loop is blocked, or the process is stopped: vllmops stacks dump --explain "
    "shows which",
)
RENDERING = Rule(
    "api.no-progress",
    Severity.ERROR,
    "a request is stuck in the API server and does not reach the engine",
    STACKS,
)
ENDED = Rule(
    "process.ended",
    Severity.ERROR,
    "a process of the server has ended, but others are still alive",
    "vllmops logs shows its last lines; then vllmops restart",
)
UNHEALTHY = Rule(
    "api.unhealthy",
    Severity.ERROR,
    "/health says that the engine is dead",
    "vllmops logs --process engine shows its last lines; then vllmops restart",
)
RULES = (NO_PROGRESS, UNREACHED, NO_PYTHON, API_SILENT, RENDERING, ENDED, UNHEALTHY)
FINAL = {ENDED.code, UNHEALTHY.code}  # the dead do not rise


class Stall(msgspec.Struct, frozen=True):
    """Something that has stopped.

    Args:
        code: of the rule.
        subject: what has stopped.
        since_s: for how many seconds at least.
        evidence: of that finding.
        alternative: what else it may be. ``idle``: the figures may be stale. ``work``: work may
            take as long. The stacks decide both. ``writing``: only the heartbeat's file may be
            late; the agent's answer decides.
        mark: stays the same while the stall is the same one.
    """

    code: str
    subject: str
    since_s: float
    evidence: str
    alternative: Literal["", "idle", "work", "writing"] = msgspec.field(default="", name="doubt")
    mark: str = ""

    def is_confirmed(self, stacks_result: str | None, answering_processes: Collection[str]) -> bool:
        """Whether it is a stall, by what else is known.

        Args:
            stacks_result: what the stacks say; None without stacks.
            answering_processes: the processes whose agents answered, as `format_role_and_pid` gives
                them.
        """
        match self.alternative:
            case "idle":
                return stacks_result != "idle"
            case "work":
                return stacks_result == "hang"
            case "writing":
                return self.subject not in answering_processes
        return True


def find_stalls(samples: Sequence[ServerSample], patience_s: float = PATIENCE_S) -> list[Stall]:
    """What has stopped, by the last sample.

    Args:
        samples: oldest first; what an agent does not report needs older samples.
        patience_s: seconds that a server may make no progress while requests are pending.

    Returns:
        The most certain first; nothing while a compiler runs, because its end is waited for.
    """
    if not samples or any(look.compilers for look in samples[-2:]):
        return []
    mute = [*find_silent_api_servers(samples, patience_s)]
    found = [
        *find_frozen_engines(samples, patience_s),
        *mute,
        *find_ended_processes(samples, patience_s),
    ]
    found += find_unhealthy_api_servers(samples, patience_s)
    # A silent API server reads no responses, so finished requests still count as handed over.
    found += [] if mute else find_unreached_requests(samples, patience_s)
    found += find_stopped_heartbeats(samples, patience_s, bool(found))
    found += find_stuck_rendering(samples, patience_s)
    if not any(pulse.heartbeat.still_s is not None for pulse in samples[-1].heartbeats):
        found += find_frozen_counters(samples, patience_s * METRICS_FACTOR)
    return found


def classify_certainty(
    samples: Sequence[ServerSample], answers: Callable[[str], bool]
) -> Certainty:
    """How sure it is that the server has stalled, by what it says of itself and without stacks.

    Args:
        samples: oldest first.
        answers: whether the agent of a process answers, named as `format_role_and_pid` does; only
            asked where that decides.
    """

    def is_sure(stall: Stall) -> bool:
        if stall.since_s < SURE_S:
            return False
        return not stall.alternative or (
            stall.alternative == "writing" and not answers(stall.subject)
        )

    stalls_ = find_stalls(samples)
    if any(map(is_sure, stalls_)):
        return "sure"
    return "likely" if stalls_ else ""


def has_fatal_stall(samples: Sequence[ServerSample]) -> bool:
    """Whether a part of the server seems to have died."""
    return any(stall.code in FINAL for stall in find_stalls(samples, patience_s=0.0))


def is_possibly_stalled(samples: Sequence[ServerSample]) -> bool:
    """Whether a longer time could show a stall: requests are pending and nothing has moved."""
    return bool(find_stalls(samples, patience_s=0.0)) and len(samples) > 1


def can_confirm_stall(samples: Sequence[ServerSample], within_s: float) -> bool:
    """Whether more samples within some seconds could show a stall: counters need more patience."""
    slow = (
        {*find_frozen_counters(samples, 0.0)} if within_s < PATIENCE_S * METRICS_FACTOR else set()
    )
    return len(samples) > 1 and bool({*find_stalls(samples, patience_s=0.0)} - slow)


def is_making_progress(heartbeats: Sequence[ProcessHeartbeat]) -> bool:
    """Whether heartbeats are fresh and engines make progress, so that agents will answer."""
    engines = [pulse for pulse in heartbeats if pulse.heartbeat.still_s is not None]
    return bool(engines) and all(
        pulse.age_s < LATE_S and pulse.age_s + (pulse.heartbeat.still_s or 0.0) < LATE_S
        for pulse in heartbeats
    )


def select_live_heartbeats(sample: ServerSample) -> list[ProcessHeartbeat]:
    """The heartbeats of live processes; a heartbeat's file may outlive its process."""
    dead = {make_process_key(process) for process in sample.processes if process.state in DEAD}
    return [pulse for pulse in sample.heartbeats if make_process_key(pulse) not in dead]


def find_frozen_engines(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """Engines that report no progress with their requests."""
    for pulse in select_live_heartbeats(samples[-1]):
        beat = pulse.heartbeat
        if not beat.still_s or pulse.age_s >= LATE_S:
            continue  # a late heartbeat does not show the present
        still_s = beat.still_s + pulse.age_s
        if still_s >= patience_s:
            evidence = (
                f"{beat.running} running and {beat.waiting} waiting requests, no token for "
                f"{still_s:.0f} s; step {beat.current_step}"
            )
            if has_step_progress(samples, pulse):
                evidence += "; steps go on but schedule nothing"
            yield Stall(NO_PROGRESS.code, format_role_and_pid(pulse), still_s, evidence)


def has_step_progress(samples: Sequence[ServerSample], heartbeat: ProcessHeartbeat) -> bool:
    """Whether an engine's steps go on although its requests make no progress."""
    # The heartbeat of the last token is left out: its step may not have been counted yet.
    began_s = (
        samples[-1].at_s - heartbeat.age_s - (heartbeat.heartbeat.still_s or 0.0) + SAME_BEAT_S
    )
    steps = {
        earlier.heartbeat.current_step
        for look in samples
        for earlier in look.heartbeats
        if make_process_key(earlier) == make_process_key(heartbeat)
        and look.at_s - earlier.age_s >= began_s
    }
    return len(steps) > 1


def find_unreached_requests(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """Requests that left the API server and do not arrive in the engine."""
    way = find_requests_in_transit(samples[-1])
    if way is None:
        return
    requests, began = way.requests, samples[-1].at_s
    for look in reversed(samples):
        before = find_requests_in_transit(look)
        if before is None or before.steps != way.steps or not (requests & before.requests):
            break
        requests, began = requests & before.requests, look.at_s
    since_s = samples[-1].at_s - began
    if since_s < patience_s:
        return
    pulses = samples[-1].heartbeats
    handed = sum(pulse.heartbeat.engine_requests or 0 for pulse in pulses)
    engines = [pulse for pulse in pulses if pulse.heartbeat.still_s is not None]
    yield Stall(
        UNREACHED.code,
        ", ".join(map(format_role_and_pid, engines)),
        since_s,
        f"the API server has handed over {format_count(handed, 'request')}; for {since_s:.0f} s "
        "the "
        "scheduler has none running and none waiting",
        # Other engines, perhaps on other machines, may have them.
        alternative="idle"
        if any("_DP" in process.title for process in samples[-1].processes)
        else "",
        mark=repr((sorted(requests), way.steps)),
    )


class RequestsInTransit(NamedTuple):
    """What API servers have handed over while the engines have no request.

    Others may come and give up meanwhile, so it is the oldest that counts.

    Args:
        requests: the oldest request of each; how many it has, where it does not say.
        steps: of the engines so far.
    """

    requests: frozenset[str]
    steps: tuple[int | None, ...]


def find_requests_in_transit(sample: ServerSample) -> RequestsInTransit | None:
    """What is on its way in a look; None where nothing is, or an engine has a request."""
    engines = [
        pulse.heartbeat for pulse in sample.heartbeats if pulse.heartbeat.still_s is not None
    ]
    handed = sum(pulse.heartbeat.engine_requests or 0 for pulse in sample.heartbeats)
    if not engines or not handed or any(beat.running or beat.waiting for beat in engines):
        return None
    if any(pulse.age_s >= LATE_S for pulse in sample.heartbeats):
        return None  # a late heartbeat does not show the present
    fronts = [pulse.heartbeat for pulse in sample.heartbeats if pulse.heartbeat.engine_requests]
    return RequestsInTransit(
        frozenset(beat.oldest_request_id or str(beat.engine_requests) for beat in fronts),
        tuple(beat.current_step for beat in engines),
    )


def find_silent_api_servers(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """API servers that do not answer: their agents say so, or ``/health`` does not answer."""
    reported = False
    for pulse in select_live_heartbeats(samples[-1]):
        blocked_s = pulse.heartbeat.loop_s or 0.0
        if blocked_s and blocked_s >= patience_s and pulse.age_s < LATE_S:
            reported = True
            evidence = f"its event loop has run nothing for {blocked_s:.0f} s"
            yield Stall(API_SILENT.code, format_role_and_pid(pulse), blocked_s, evidence)
    since_s = compute_unchanged_seconds(
        samples, lambda look: "silent" if look.health == 0 else None
    )
    apis = [process for process in samples[-1].processes if process.role == "api"]
    if since_s is not None and since_s >= patience_s and apis and not reported:
        subject = ", ".join(f"api {process.pid}" for process in apis)
        evidence = f"/health accepts connections and has not answered for {since_s:.0f} s"
        yield Stall(API_SILENT.code, subject, since_s, evidence)


def find_unhealthy_api_servers(
    samples: Sequence[ServerSample], patience_s: float
) -> Iterator[Stall]:
    """API servers that report a dead engine."""
    asked = [look for look in samples if look.health is not None]
    since_s = compute_unchanged_seconds(asked, has_dead_engine) if asked else None
    if since_s is not None and since_s >= min(patience_s, UNHEALTHY_S):
        apis = [process for process in samples[-1].processes if process.role == "api"]
        subject = ", ".join(f"api {process.pid}" for process in apis) or "the server"
        yield Stall(UNHEALTHY.code, subject, since_s, "/health answers 503")


def has_dead_engine(sample: ServerSample) -> object:
    """Whether ``/health`` says that the engine is dead; a server that drains answers the same."""
    drains = any(pulse.heartbeat.unready == "draining" for pulse in sample.heartbeats)
    return (sample.health == 503 and not drains) or None


def find_ended_processes(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """Dead processes beside live ones; in a clean shutdown the others end soon, too."""

    def list_dead_pids(sample: ServerSample) -> object:
        vital = [process for process in sample.processes if process.role in probe.VITAL]
        gone = [process.pid for process in vital if process.state in DEAD]
        return gone if 0 < len(gone) < len(vital) else None

    since_s = compute_unchanged_seconds(samples, list_dead_pids)
    if since_s is not None and since_s >= patience_s:
        last = [p for p in samples[-1].processes if p.role in probe.VITAL and p.state in DEAD]
        subject = ", ".join(format_process(process) for process in last)
        yield Stall(ENDED.code, subject, since_s, f"dead for {since_s:.0f} s")


def find_stuck_rendering(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """Requests that stay in an API server; a slow download of an image looks the same."""
    for pulse in select_live_heartbeats(samples[-1]):
        since_s, blocked_s = pulse.heartbeat.rendering_s or 0.0, pulse.heartbeat.loop_s or 0.0
        if since_s >= max(patience_s, RENDERING_S) and max(blocked_s, pulse.age_s) < LATE_S:
            yield Stall(
                RENDERING.code,
                format_role_and_pid(pulse),
                since_s,
                f"an HTTP request arrived {since_s:.0f} s ago and has not reached the engine",
                alternative="work",
                mark=f"{pulse.pid} {pulse.heartbeat.monotonic - since_s:.2f}",
            )


def find_stopped_heartbeats(
    samples: Sequence[ServerSample], patience_s: float, stuck: bool
) -> Iterator[Stall]:
    """Live processes whose heartbeat has stopped.

    An idle engine without a heartbeat delays no request yet: it is a finding of
    `rules.server_state` and no stall. An API server without one delays every request.

    Args:
        samples: oldest first.
        patience_s: as in `find_stalls`.
        stuck: whether something else has stopped.
    """
    pulses = select_live_heartbeats(samples[-1])
    work = stuck or any(
        pulse.heartbeat.engine_requests or pulse.heartbeat.running or pulse.heartbeat.waiting
        for pulse in pulses
    )
    for pulse in pulses:
        if (work or pulse.role == "api") and pulse.age_s >= max(patience_s, LATE_S):
            yield Stall(
                NO_PYTHON.code,
                format_role_and_pid(pulse),
                pulse.age_s,
                describe_heartbeat_age(pulse),
                alternative="writing",
                mark=f"{pulse.pid} {pulse.heartbeat.sequence}",
            )


def describe_heartbeat_age(heartbeat: ProcessHeartbeat) -> str:
    """How old a process's last heartbeat is, in words."""
    return f"its last heartbeat is {heartbeat.age_s:.0f} s old; one per second is expected"


def find_frozen_counters(samples: Sequence[ServerSample], patience_s: float) -> Iterator[Stall]:
    """Without agents: the counters do not change while the metrics show pending requests."""
    since_s = compute_unchanged_seconds(samples, get_pending_counters)
    if since_s is None or since_s < patience_s:
        return
    last = samples[-1].metrics
    assert last is not None
    yield Stall(
        NO_PROGRESS.code,
        "the server",
        since_s,
        f"its metrics show {last.running or 0:.0f} running and {last.waiting or 0:.0f} waiting "
        f"requests, and its counters have not changed for {since_s:.0f} s",
        alternative="idle",
        mark=repr(get_pending_counters(samples[-1])),
    )


def get_pending_counters(sample: ServerSample) -> object:
    """The counters while requests are pending; None without such requests, or in sleep mode."""
    metrics = sample.metrics
    if metrics is None or not (metrics.running or metrics.waiting) or metrics.awake == 0:
        return None
    return metrics.running, metrics.waiting, metrics.tokens, metrics.finished, metrics.preemptions


def compute_unchanged_seconds(
    samples: Sequence[ServerSample], get_value: Callable[[ServerSample], object]
) -> float | None:
    """For how many seconds a sign has had its last value; None if that is None."""
    current = get_value(samples[-1])
    if current is None:
        return None
    since_s = samples[-1].at_s
    for look in reversed(samples):
        if get_value(look) != current:
            break
        since_s = look.at_s
    return samples[-1].at_s - since_s


def format_role_and_pid(process: ProcessHeartbeat | AgentReport) -> str:
    """Role and pid, as findings name a process."""
    return format_process(process)
