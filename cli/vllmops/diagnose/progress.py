"""Whether a server has stopped getting on; pure, from looks at it.

``/health`` and the gauge of running requests tell nothing of it: the first makes no round trip to
the engine, the second keeps its last value when nobody counts any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import msgspec

from ..protocol.server import Look, Pulse, Told
from .findings import Rule, Severity

# The longest that a healthy server keeps requests without a sign: a step, with some to spare.
PATIENCE_S = 10.0
# Metrics count a prompt's tokens when the last of them is through: they want more patience.
METRICS_FACTOR = 3.0
# A beat is due every second, and a busy machine may be late with it.
LATE_S = 3.0
SAME_BEAT_S = 0.1
# Pictures are fetched and decoded before the engine hears of a request.
RENDERING_S = 5.0
# An engine that is dead stays so: this is for a server that is just being taken down.
UNHEALTHY_S = 3.0
DEAD = {"", "Z"}  # states of a process
VITAL = {"launcher", "api", "engine", "worker", "coordinator"}
STACKS = "see which code it is stuck in: vllmops stacks dump --explain"

NO_PROGRESS = Rule(
    "engine.no-progress",
    Severity.ERROR,
    "requests are there, and none gets a token further",
    STACKS,
)
UNREACHED = Rule(
    "engine.unreached",
    Severity.ERROR,
    "requests have been handed to the engine and have not come to its scheduler",
    STACKS,
)
NO_PYTHON = Rule(
    "process.no-python",
    Severity.ERROR,
    "a process runs no Python any more",
    "it is stopped, or native code keeps the GIL: vllmops stacks dump --native tells which",
)
API_SILENT = Rule(
    "api.silent",
    Severity.ERROR,
    "the API server answers nothing, /health neither",
    "its event loop is blocked, or the process is stopped: vllmops stacks dump --explain",
)
RENDERING = Rule(
    "api.no-progress",
    Severity.ERROR,
    "a request is stuck in the API server and does not come to the engine",
    STACKS,
)
ENDED = Rule(
    "process.ended",
    Severity.ERROR,
    "a process of the server has ended, and the others live on",
    "its last words: vllmops logs; then vllmops restart",
)
UNHEALTHY = Rule(
    "api.unhealthy",
    Severity.ERROR,
    "/health says that the engine is dead",
    "vllmops logs --process engine; then vllmops restart",
)
RULES = (NO_PROGRESS, UNREACHED, NO_PYTHON, API_SILENT, RENDERING, ENDED, UNHEALTHY)


class Stall(msgspec.Struct, frozen=True):
    """Something that has stopped.

    Args:
        code: of the rule.
        subject: what has stopped.
        since_s: for how long it is known to have, in seconds.
        evidence: what was seen.
        doubt: what else it may be: ``idle``, where figures may be stale, and ``work``, which may
            take as long, so that stacks must be asked; ``writing``, where only the heartbeat's
            file may be, so that the agent must.
        mark: the same for as long as such a doubt is about the same.
    """

    code: str
    subject: str
    since_s: float
    evidence: str
    doubt: Literal["", "idle", "work", "writing"] = ""
    mark: str = ""

    def stands(self, verdict: str | None, answered: Collection[str]) -> bool:
        """Whether it counts.

        Args:
            verdict: what the stacks say, None where there are none.
            answered: the processes whose agents answered, as `named`.
        """
        match self.doubt:
            case "idle":
                return verdict != "idle"
            case "work":
                return verdict == "hang"
            case "writing":
                return self.subject not in answered
        return True


def stalls(looks: Sequence[Look], patience_s: float = PATIENCE_S) -> list[Stall]:
    """What has stopped, by the last look.

    Args:
        looks: in their order; the more, the longer what agents can't tell can be seen back.
        patience_s: how long a server may show no sign while requests are there.

    Returns:
        The most telling first; empty too where a compiler runs, whose end is waited for.
    """
    if not looks or any(look.compilers for look in looks[-2:]):
        return []
    mute = [*silent(looks, patience_s)]
    found = [*frozen(looks, patience_s), *mute, *ended(looks, patience_s)]
    found += unhealthy(looks, patience_s)
    # Where the front end does not read answers, what it has handed over seems to be on the way.
    found += [] if mute else unreached(looks, patience_s)
    found += pythonless(looks, patience_s, bool(found))
    found += waylaid(looks, patience_s)
    if not any(pulse.beat.still_s is not None for pulse in looks[-1].pulses):
        found += counted(looks, patience_s * METRICS_FACTOR)
    return found


def suspicious(looks: Sequence[Look]) -> bool:
    """Whether a longer look could show a stall: something waits, and has not moved."""
    return bool(stalls(looks, patience_s=0.0)) and len(looks) > 1


def at_work(pulses: Sequence[Pulse]) -> bool:
    """Whether every process gives signs, and its engines get on: who asks them gets an answer."""
    engines = [pulse for pulse in pulses if pulse.beat.still_s is not None]
    return bool(engines) and all(
        pulse.age_s < LATE_S and pulse.age_s + (pulse.beat.still_s or 0.0) < LATE_S
        for pulse in pulses
    )


def living(look: Look) -> list[Pulse]:
    """The heartbeats of processes that live; one's file may outlive it."""
    dead = {process.pid for process in look.processes if process.state in DEAD}
    return [pulse for pulse in look.pulses if pulse.pid not in dead]


def frozen(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """Engines whose requests stand still, by their own word."""
    for pulse in living(looks[-1]):
        beat = pulse.beat
        if not beat.still_s or pulse.age_s >= LATE_S:
            continue  # a late one says nothing of now
        still_s = beat.still_s + pulse.age_s
        if still_s >= patience_s:
            evidence = (
                f"{beat.running} running and {beat.waiting} waiting, none a token further for "
                f"{still_s:.0f} s; step {beat.current_step}"
            )
            if stepping(looks, pulse):
                evidence += ", and steps go on: they schedule nothing"
            yield Stall(NO_PROGRESS.code, named(pulse), still_s, evidence)


def stepping(looks: Sequence[Look], pulse: Pulse) -> bool:
    """Whether an engine's steps go on although its requests stand still."""
    # The beat that saw the last token is left out: its step may have been on the way.
    began_s = looks[-1].at_s - pulse.age_s - (pulse.beat.still_s or 0.0) + SAME_BEAT_S
    steps = {
        each.beat.current_step
        for look in looks
        for each in look.pulses
        if each.pid == pulse.pid and look.at_s - each.age_s >= began_s
    }
    return len(steps) > 1


def unreached(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """Requests between the front end and the engine, and none of them arrives."""
    since_s = lasting(looks, on_the_way)
    if since_s is None or since_s < patience_s:
        return
    pulses = looks[-1].pulses
    handed = sum(pulse.beat.handed or 0 for pulse in pulses)
    engines = [pulse for pulse in pulses if pulse.beat.still_s is not None]
    yield Stall(
        UNREACHED.code,
        ", ".join(map(named, engines)),
        since_s,
        f"{handed} handed over by the API server; none running, none waiting for {since_s:.0f} s",
        # Other engines, on other machines perhaps, may have them.
        doubt="idle" if any("_DP" in process.title for process in looks[-1].processes) else "",
        mark=repr(on_the_way(looks[-1])),
    )


def on_the_way(look: Look) -> object:
    """What the front end has handed over while the engines have nothing; None where it is not so.

    Requests that end make room for others: only where their number and the engines' steps stay
    are they taken for the same.
    """
    engines = [pulse.beat for pulse in look.pulses if pulse.beat.still_s is not None]
    handed = sum(pulse.beat.handed or 0 for pulse in look.pulses)
    if not engines or not handed or any(beat.running or beat.waiting for beat in engines):
        return None
    if any(pulse.age_s >= LATE_S for pulse in look.pulses):
        return None  # what it says is not of now
    return handed, tuple(beat.current_step for beat in engines)


def silent(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """API servers that do not answer: by their agents' word, or by ``/health``."""
    told = False
    for pulse in living(looks[-1]):
        blocked_s = pulse.beat.loop_s or 0.0
        if blocked_s and blocked_s >= patience_s and pulse.age_s < LATE_S:
            told = True
            evidence = f"its event loop has run nothing for {blocked_s:.0f} s"
            yield Stall(API_SILENT.code, named(pulse), blocked_s, evidence)
    since_s = lasting(looks, lambda look: "silent" if look.health == 0 else None)
    apis = [process for process in looks[-1].processes if process.role == "api"]
    if since_s is not None and since_s >= patience_s and apis and not told:
        subject = ", ".join(f"api {process.pid}" for process in apis)
        evidence = f"/health takes connections, and has not answered for {since_s:.0f} s"
        yield Stall(API_SILENT.code, subject, since_s, evidence)


def unhealthy(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """API servers whose engine is dead, by their own word."""
    asked = [look for look in looks if look.health is not None]
    since_s = lasting(asked, lambda look: look.health == 503 or None) if asked else None
    if since_s is not None and since_s >= min(patience_s, UNHEALTHY_S):
        apis = [process for process in looks[-1].processes if process.role == "api"]
        subject = ", ".join(f"api {process.pid}" for process in apis) or "the server"
        yield Stall(UNHEALTHY.code, subject, since_s, "/health answers 503")


def ended(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """Processes that are dead while an API server lives on; in an orderly end it follows soon."""

    def dead(look: Look) -> object:
        alive = [process for process in look.processes if process.state not in DEAD]
        gone = [p.pid for p in look.processes if p.role in VITAL and p.state in DEAD]
        return (gone or None) if any(process.role == "api" for process in alive) else None

    since_s = lasting(looks, dead)
    if since_s is not None and since_s >= patience_s:
        last = [p for p in looks[-1].processes if p.role in VITAL and p.state in DEAD]
        subject = ", ".join(f"{process.role} {process.pid}" for process in last)
        yield Stall(ENDED.code, subject, since_s, f"dead for {since_s:.0f} s")


def waylaid(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """Requests that an API server keeps; a picture that comes slowly looks the same."""
    for pulse in living(looks[-1]):
        since_s, blocked_s = pulse.beat.rendering_s or 0.0, pulse.beat.loop_s or 0.0
        if since_s >= max(patience_s, RENDERING_S) and max(blocked_s, pulse.age_s) < LATE_S:
            yield Stall(
                RENDERING.code,
                named(pulse),
                since_s,
                f"an HTTP request came {since_s:.0f} s ago and has not come to the engine",
                doubt="work",
                mark=f"{pulse.pid} {pulse.beat.monotonic - since_s:.2f}",
            )


def pythonless(looks: Sequence[Look], patience_s: float, stuck: bool) -> Iterator[Stall]:
    """Processes whose heartbeat has ended while they live.

    An engine that is idle and stopped holds up nobody yet; told by `diagnose.server`, it is no
    stall. An API server holds up whoever comes.

    Args:
        looks: in their order.
        patience_s: as in `stalls`.
        stuck: whether something else shows that work is held up.
    """
    pulses = living(looks[-1])
    work = stuck or any(
        pulse.beat.handed or pulse.beat.running or pulse.beat.waiting for pulse in pulses
    )
    for pulse in pulses:
        if (work or pulse.role == "api") and pulse.age_s >= max(patience_s, LATE_S):
            yield Stall(
                NO_PYTHON.code,
                named(pulse),
                pulse.age_s,
                late(pulse),
                doubt="writing",
                mark=f"{pulse.pid} {pulse.beat.sequence}",
            )


def late(pulse: Pulse) -> str:
    """How long ago a process last gave a sign."""
    return f"its last heartbeat is {pulse.age_s:.0f} s old, one a second is due"


def counted(looks: Sequence[Look], patience_s: float) -> Iterator[Stall]:
    """Without agents: the counters stand still while requests are said to be there."""
    since_s = lasting(looks, standing)
    if since_s is None or since_s < patience_s:
        return
    last = looks[-1].metrics
    assert last is not None
    yield Stall(
        NO_PROGRESS.code,
        "the server",
        since_s,
        f"{last.running or 0:.0f} running and {last.waiting or 0:.0f} waiting by its metrics, and "
        f"for {since_s:.0f} s none of its counters moved",
        doubt="idle",
        mark=repr(standing(looks[-1])),
    )


def standing(look: Look) -> object:
    """Where the counters stand while work is pending; None where none is, or all sleep."""
    found = look.metrics
    if found is None or not (found.running or found.waiting) or found.awake == 0:
        return None
    return found.running, found.waiting, found.tokens, found.finished, found.preemptions


def lasting(looks: Sequence[Look], sign: Callable[[Look], object]) -> float | None:
    """For how many seconds up to the last look a sign has been the same and not None."""
    wanted = sign(looks[-1])
    if wanted is None:
        return None
    since = looks[-1].at_s
    for look in reversed(looks):
        if sign(look) != wanted:
            break
        since = look.at_s
    return looks[-1].at_s - since


def named(pulse: Pulse | Told) -> str:
    return f"{pulse.role} {pulse.pid}"
