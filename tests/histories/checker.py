"""Judges what clients did and read: a pure function over recorded operations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

RANKS = {"queued": 0, "in_progress": 1, "lost": 2, "completed": 3, "failed": 3, "cancelled": 3}
CODES = {200, 404, 409, 503}
MAKES = {"create", "respond", "link", "stream"}


class Op(NamedTuple):
    """One operation of a client.

    Args:
        kind: create, add, turn, read, delete (of conversations); respond, get, cancel, remove;
            link, a response after another one; stream, one whose events are read to the end.
        target: id of the conversation or response.
        owner: who asked.
        began, ended: seconds.
        code: of HTTP; 0 where the outcome is unknown.
        marks: the texts of the items that it adds or reads, in order.
        status: of the response that it reads; `lost` where its run was given up.
        maker: whose the target is.
        asked: the text of the request.
        before: the response that a link follows; empty for the first one.
        events: of a stream without its last one: the number of each, and all of it.
    """

    kind: str
    target: str
    owner: str
    began: float
    ended: float
    code: int
    marks: tuple[str, ...] = ()
    status: str = ""
    maker: str = "ann"
    asked: str = ""
    before: str = ""
    events: tuple[tuple[int, str], ...] = ()

    @property
    def ok(self) -> bool:
        return self.code == 200


def check(history: Sequence[Op]) -> list[str]:
    """What is wrong with a history, one line for each thing; empty where nothing is."""
    by_target: dict[str, list[Op]] = defaultdict(list)
    for op in history:
        by_target[op.target].append(op)
    found: list[str] = []
    for target, ops in by_target.items():
        ops.sort(key=lambda op: op.ended)
        wrong = (*codes(ops), *lifetime(ops), *items(ops), *statuses(ops), *streams(ops))
        found += [f"{target}: {what}" for what in wrong]
    return [*found, *links(by_target)]


def codes(ops: Sequence[Op]) -> Iterator[str]:
    """Each answer is one that the operation can have."""
    lost = any(op.status == "lost" for op in ops)
    for op in ops:
        allowed = CODES if op.kind in {"turn", "add"} else CODES - {409}
        # One that has ended can't be cancelled, and one that runs can't be followed. Of a run that
        # died with its server, the last events that somebody saw may have died, too.
        refused = op.kind in {"cancel", "link"} or (op.kind == "stream" and lost)
        allowed = allowed | {400} if refused else allowed
        if op.code and op.code not in allowed:
            yield f"{op.kind} was answered {op.code}"


def lifetime(ops: Sequence[Op]) -> Iterator[str]:
    """What was made is there for its owner, and nobody else, until it is deleted."""
    makes = [op for op in ops if op.kind in MAKES and op.ok]
    deletes = [op for op in ops if op.kind in {"delete", "remove"}]
    for op in ops:
        if op.owner != op.maker:
            if op.ok:
                yield f"{op.owner} could {op.kind} what is {op.maker}'s"
        elif op in makes:
            continue
        elif op.ok and any(one.ok and one.ended < op.began for one in deletes):
            yield f"{op.kind} found it after it was deleted"
        elif op.code == 404 and any(one.ended < op.began for one in makes):
            asked = any(one.began < op.ended and one is not op for one in deletes)
            if not asked:
                yield f"{op.kind} did not find it"


def items(ops: Sequence[Op]) -> Iterator[str]:
    """No item of a conversation is lost, doubled, out of order or between those of a turn."""
    reads = [op for op in ops if op.kind == "read" and op.ok and op.owner == op.maker]
    adds = [op for op in ops if op.kind in {"add", "turn"} and op.marks]
    for read in reads:
        yield from contents(read, adds)
        yield from order(read, adds)
    for before in reads:
        for after in reads:
            if before.ended < after.began and after.marks[: len(before.marks)] != before.marks:
                yield f"a later read does not begin with an earlier one: {after.marks}"
    if reads:
        yield from check_seen_marks(reads[-1], adds)


def contents(read: Op, adds: Sequence[Op]) -> Iterator[str]:
    """A read has what was acknowledged before it, once and in one piece, and nothing else."""
    marks = read.marks
    there = set(marks)
    if len(there) < len(marks):
        yield f"items are doubled: {marks}"
    if unknown := there - {mark for op in adds for mark in op.marks}:
        yield f"nobody added {sorted(unknown)}"
    for op in adds:
        if op.ok and op.ended < read.began and not set(op.marks) <= there:
            yield f"{op.marks} were lost"
        elif set(op.marks) & there:
            if op.code not in {0, 200, 503} or op.began > read.ended:
                yield f"{op.marks} are there after {op.code}"
            first = marks.index(op.marks[0]) if op.marks[0] in there else len(marks)
            if marks[first : first + len(op.marks)] != op.marks:
                yield f"{op.marks} are torn or interleaved: {marks}"


def order(read: Op, adds: Sequence[Op]) -> Iterator[str]:
    """What ended before another began stands before it."""
    there = [op for op in adds if op.ok and op.marks[0] in read.marks]
    for one in there:
        for other in there:
            behind = read.marks.index(one.marks[0]) > read.marks.index(other.marks[0])
            if one.ended < other.began and behind:
                yield f"{one.marks} came before {other.marks}, but stand behind"


def check_seen_marks(read: Op, adds: Sequence[Op]) -> Iterator[str]:
    """What a turn saw is all that stood before it."""
    for op in adds:
        if op.kind == "turn" and op.ok and op.status and op.marks[0] in read.marks:
            stood = ",".join(read.marks[: read.marks.index(op.marks[0])])
            if stood != op.status.removeprefix("saw:"):
                yield f"{op.marks} saw {op.status}, but {stood!r} stood before"


def streams(ops: Sequence[Op]) -> Iterator[str]:
    """A stream has each event once and in order, whoever reads it, and ends as it is stored."""
    shown: dict[int, str] = {}
    for op in ops:
        numbers = [number for number, _ in op.events]
        if numbers != list(range(len(numbers))):
            yield f"events are lost, doubled or out of order: {numbers}"
        for number, event in op.events:
            if shown.setdefault(number, event) != event:
                yield f"event {number} was {shown[number]} and is {event}"
        if op.kind == "stream" and op.status == "completed":
            text = "".join(json.loads(event).get("delta") or "" for _, event in op.events)
            if (text.partition("|")[0],) != op.marks:
                yield f"its events said {text!r}, and it is {op.marks}"


def links(by_target: Mapping[str, Sequence[Op]]) -> Iterator[str]:
    """Each link of a chain saw all that came before it, and is refused only where that is gone."""
    made = {op.target: op for ops in by_target.values() for op in ops if op.kind in MAKES}
    for op in made.values():
        if op.kind != "link":
            continue
        earlier, name = list[Op](), op.before
        while name:
            earlier.insert(0, made[name])
            name = made[name].before
        others = [other for one in earlier for other in by_target[one.target]]
        if op.ok and op.status != "saw:" + (seen := expected_marks(earlier, op, by_target)):
            yield f"{op.target}: it {op.status}, but {seen!r} came before"
        elif op.code == 404 and all(one.ok and one.ended < op.began for one in earlier):
            if not any(other.kind == "remove" and other.began < op.ended for other in others):
                yield f"{op.target}: it did not find what is there"
        elif op.code == 400 and find_end_status(by_target[op.before], op.began):
            yield f"{op.target}: it can't follow what has ended"


def expected_marks(earlier: Sequence[Op], op: Op, by_target: Mapping[str, Sequence[Op]]) -> str:
    """What a link has to see; of a run whose end nobody has seen yet, what it saw."""
    marks: list[str] = []
    for one in earlier:
        marks.append(one.asked)
        if one.kind == "link":
            sure = True
        elif (end := find_end_status(by_target[one.target], op.began)) is not None:
            sure = end == "completed"
        else:
            sure = f"re:{one.asked}" in op.status.removeprefix("saw:").split(",")
        marks += [f"re:{one.asked}"] if sure else []
    return ",".join(marks)


def find_end_status(ops: Sequence[Op], at: float) -> str | None:
    """How a response had ended by a time, as far as somebody was told; None if nobody was."""
    told = [op.status for op in ops if op.ok and op.ended < at and RANKS.get(op.status) == 3]
    return told[0] if told else None


def statuses(ops: Sequence[Op]) -> Iterator[str]:
    """A status goes forward alone, and what has ended stays as it ended."""
    told = [op for op in ops if op.status in RANKS and op.ok]
    for before in told:
        for after in told:
            if before.ended >= after.began:
                continue
            one, other = RANKS[before.status], RANKS[after.status]
            if other < one or (one == 3 and before.status != after.status):
                yield f"{before.status} became {after.status}"
            if one == 3 and other == 3 and before.marks != after.marks:
                yield f"its answer changed from {before.marks} to {after.marks}"
