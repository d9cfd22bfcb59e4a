"""Who waits for whom, and what is at the end: the processes at the root, and what may be wrong."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...model.pasted_stacks import CrashTraceback
from ...model.stacks import ProcessStacks, StacksSnapshot, ThreadStack
from .. import toml_tables
from .progress_facts import matches_condition
from .signatures import strip_qualifiers
from .thread_phases import (
    NOWHERE,
    ThreadPosition,
    drop_parent_frames,
    find_thread_position,
    find_wait_ids,
    is_helper_thread,
    is_main_thread,
)

COLLECTIVES = {"collective", "dp-collective", "expert-exchange"}
SERVING = {"engine", "worker", "other"}


class HangCondition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is stuck under some conditions; see the head of ``stacks/wait_chains.toml``.

    Args:
        ids: of the catalogue, the most probable first.
        relation, stage, phase, wait: of the root; empty for any.
        facts: figures that must be known and agree, such as ``waiting = ">0"``.
    """

    ids: tuple[str, ...]
    relation: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    phase: tuple[str, ...] = ()
    wait: tuple[str, ...] = ()
    facts: dict[str, str] = {}


class TracebackPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A traceback that is what is left of a hang.

    Args:
        id: of the catalogue.
        function: pattern of the bare name of one of its frames; empty for any.
        error: pattern to find in its last line; empty for any.
    """

    id: str
    function: str = ""
    error: str = ""


class HangTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    answer: tuple[HangCondition, ...]
    crash: tuple[TracebackPattern, ...]


@functools.cache
def load_hang_tables() -> HangTables:
    """The table of answers, in the order of the file."""
    return toml_tables.load_table("stacks/wait_chains.toml", HangTables)


def find_hang_id(crash: CrashTraceback) -> str:
    """The id of the hang that a traceback tells; empty if it is of a crash."""
    for row in load_hang_tables().crash:
        named = not row.function or any(
            re.fullmatch(row.function, strip_qualifiers(frame.function)) for frame in crash.frames
        )
        if named and (not row.error or re.search(row.error, crash.error)):
            return row.id
    return ""


@dataclass(frozen=True)
class WaitChain:
    """What is at the end of who waits for whom.

    Args:
        ids: what it may be, the most probable first.
        relation: what the processes do together; empty if nothing.
        roots: the threads that others wait for and that wait for no process of the text.
        victims: the threads that wait for them.
    """

    ids: tuple[str, ...]
    relation: str
    roots: tuple[ThreadPosition, ...]
    victims: tuple[ThreadPosition, ...]


def find_wait_chain(sample: StacksSnapshot, facts: Mapping[str, str]) -> WaitChain | None:
    """Who waits for whom in one sample; None if all threads rest or compute as they should.

    Args:
        sample: the stacks.
        facts: figures, by the names in `progress_facts.FACTS`.
    """
    tellings = [find_decisive_position(process) for process in sample.processes if process.threads]
    busy = [
        p for p in tellings if p.wait not in {"rest", "ipc-read"} and not _is_helper_position(p)
    ]
    serving = [place for place in busy if place.process.role in SERVING]
    waiting = [place for place in tellings if place.wait == "ipc-read"]
    rest = [p for p in tellings if p.wait == "rest" and p.process.role == "worker"]
    if any(place.process.role == "worker" for place in serving):
        # An engine that writes waits for the workers to read.
        writing = [p for p in serving if p.process.role == "engine" and p.wait == "ipc-write"]
        serving = [place for place in serving if place not in writing]
        waiting += writing
    # An API server waits for its engine, whatever it does meanwhile.
    if not serving and not waiting:
        serving = busy
    if not serving:
        return _find_unanswered_engines(waiting, rest, facts) or _find_lost_transfer(sample)
    relation, roots = _find_roots(serving, rest)
    if not relation and any(place.process.role == "engine" for place in waiting):
        relation = "waited-for"
    named = set(map(id, roots))
    victims = [place for place in (*serving, *waiting) if id(place) not in named]
    ids = _find_hang_ids(relation, roots[0], facts)
    return WaitChain(ids, relation, tuple(roots), tuple(victims)) if ids else None


def find_decisive_position(process: ProcessStacks) -> ThreadPosition:
    """The place of the thread that says most about a process."""
    if place := _find_gil_wait(process):
        return place
    places = [find_thread_position(process, thread) for thread in process.threads]
    return min(places, key=functools.partial(_rank_position, process))


def _find_gil_wait(process: ProcessStacks) -> ThreadPosition | None:
    """A main thread that is idle amid Python code while another thread has the GIL."""
    main = next((t for t in process.threads if t.name == "MainThread"), None)
    if not main or main.state != "idle" or not find_gil_holders(process, main):
        return None
    place = find_thread_position(process, main)
    python = any(frame.short_file.endswith(".py") for frame in main.frames[:1])
    return (
        dataclasses.replace(place, wait="gil")
        if place.wait in {"call", "sleep"} and python
        else None
    )


def find_gil_holders(process: ProcessStacks, waiting: ThreadStack) -> list[ThreadStack]:
    """The threads that have the GIL while another one waits, and of which no table says why."""
    return [
        thread
        for thread in process.threads
        if thread.owns_gil
        and thread is not waiting
        and find_thread_position(process, thread).wait == "call"
    ]


def _is_helper_position(position: ThreadPosition) -> bool:
    """Whether a place is that of a helper thread, and no name says what it does."""
    return (
        position.wait == "call"
        and position.phase == NOWHERE
        and (
            not is_main_thread(position.process, position.thread)
            or is_helper_thread(position.thread)
        )
    )


def _rank_position(process: ProcessStacks, position: ThreadPosition) -> tuple[bool, ...]:
    main = is_main_thread(process, position.thread)
    return (
        position.wait == "rest",
        position.wait in {"ipc-read", "sleep"},
        # What no name explains tells less than what one does; a scheduler that runs may be at work.
        position.wait == "call" and position.phase.id in {"", "schedule", "step"},
        # Who waits for another thread of the process is not the one that is stuck.
        position.wait == "lock",
        not main,
    )


def _find_lost_transfer(sample: StacksSnapshot) -> WaitChain | None:
    """An engine that is at rest while a connector's own threads live: a transfer may be lost."""
    for process in sample.processes:
        for thread in process.threads:
            if not is_main_thread(process, thread) and any(
                "transfer" in find_wait_ids(frame) for frame in thread.frames
            ):
                place = ThreadPosition(process, thread, NOWHERE, "transfer", thread.frames[0])
                return WaitChain(("kv-connector-wait",), "connector", (place,), ())
    return None


def _find_unanswered_engines(
    waiting: Sequence[ThreadPosition],
    other_positions: Sequence[ThreadPosition],
    facts: Mapping[str, str],
) -> WaitChain | None:
    """Engines that wait for a message while no worker of the text is busy."""
    engines = [place for place in waiting if place.phase.id not in {"", "api", "spawn"}] or [
        place for place in waiting if place.process.role == "engine"
    ]
    if not engines:
        return None
    names = {strip_qualifiers(frame.function) for place in engines for frame in place.thread.frames}
    remote = "recv" in names or any(
        "ray" in frame.short_file.split("/")[0] for p in engines for frame in p.thread.frames
    )
    relation = "lost" if other_positions else "remote" if remote else "unseen"
    ids = _find_hang_ids(relation, engines[0], facts)
    return WaitChain(ids, relation, tuple(engines), ()) if ids else None


def _find_roots(
    busy_positions: Sequence[ThreadPosition], other_positions: Sequence[ThreadPosition]
) -> tuple[str, list[ThreadPosition]]:
    """What busy processes do together, and which of them the others wait for."""
    inside = [place for place in busy_positions if place.wait in COLLECTIVES]
    outside = [place for place in busy_positions if place.wait not in COLLECTIVES]
    if inside and outside:
        same = {_make_step_key(place) for place in inside} & {
            _make_step_key(place) for place in outside
        }
        return ("not-entered" if same else "elsewhere"), _select_smallest_group(outside)
    if not inside:
        return "", _select_smallest_group(outside)
    entered = [place for place in inside if place.is_in_collective]
    late = [place for place in inside if not place.is_in_collective]
    if (
        entered
        and late
        and {_find_collective_name(p) for p in entered} == {_find_collective_name(p) for p in late}
    ):
        return "not-entered", late
    if len({_find_collective_name(place) for place in inside}) > 1:
        ranks = any("_DP" in place.process.title for place in inside)
        parallel = any(place.wait != "collective" for place in inside)
        return ("differ-dp" if ranks or parallel else "differ"), _select_smallest_group(inside)
    if len(inside) > 1:
        return "same", inside
    parallel = any(place.wait == "dp-collective" for place in inside)
    return (
        ("absent-dp" if parallel else "absent", list(other_positions))
        if other_positions
        else ("", inside)
    )


def _find_collective_name(position: ThreadPosition) -> str:
    """The collective that a thread is in, by the outermost frame that names it."""
    frames = [
        frame
        for frame in drop_parent_frames(position.thread.frames)
        if position.wait in find_wait_ids(frame)
    ]
    innermost = frames[-1] if frames else position.frame
    return strip_qualifiers(innermost.function) if innermost else ""


def _make_step_key(position: ThreadPosition) -> str:
    return f"{position.phase.id} {_find_collective_name(position)}"


def _select_smallest_group(positions: Sequence[ThreadPosition]) -> list[ThreadPosition]:
    """Those of the smallest group that stands at one place; all if the groups have one size."""
    groups: dict[str, list[ThreadPosition]] = {}
    for place in positions:
        groups.setdefault(f"{place.wait} {_find_collective_name(place)}", []).append(place)
    smallest = min(map(len, groups.values()))
    few = [place for group in groups.values() if len(group) == smallest for place in group]
    return few if len(few) < len(positions) else list(positions)


def _find_hang_ids(
    relation: str, root: ThreadPosition, facts: Mapping[str, str]
) -> tuple[str, ...]:
    for answer in load_hang_tables().answer:
        if (
            (not answer.relation or relation in answer.relation)
            and (not answer.stage or root.phase.stage in answer.stage)
            and (not answer.phase or root.phase.id in answer.phase)
            and (not answer.wait or root.wait in answer.wait)
            and all(n in facts and matches_condition(facts[n], c) for n, c in answer.facts.items())
        ):
            return answer.ids
    return ()
