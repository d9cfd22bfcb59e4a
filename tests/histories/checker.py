"""Judges what clients did and read: a pure function over recorded operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RANKS = {"queued": 0, "in_progress": 1, "lost": 2, "completed": 3, "failed": 3, "cancelled": 3}
CODES = {200, 404, 409, 503}


class Op(NamedTuple):
    """One operation of a client.

    Args:
        kind: create, add, turn, read, delete (of conversations); respond, get, cancel, remove.
        target: id of the conversation or response.
        owner: who asked.
        began, ended: seconds.
        code: of HTTP; 0 where the outcome is unknown.
        marks: the texts of the items that it adds or reads, in order.
        status: of the response that it reads; `lost` where its run was given up.
        maker: whose the target is.
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
        wrong = (*codes(ops), *lifetime(ops), *items(ops), *statuses(ops))
        found += [f"{target}: {what}" for what in wrong]
    return found


def codes(ops: Sequence[Op]) -> Iterator[str]:
    """Each answer is one that the operation can have."""
    for op in ops:
        allowed = CODES if op.kind in {"turn", "add"} else CODES - {409}
        allowed = allowed | {400} if op.kind == "cancel" else allowed
        if op.code and op.code not in allowed:
            yield f"{op.kind} was answered {op.code}"


def lifetime(ops: Sequence[Op]) -> Iterator[str]:
    """What was made is there for its owner, and nobody else, until it is deleted."""
    makes = [op for op in ops if op.kind in {"create", "respond"} and op.ok]
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
        yield from seen(reads[-1], adds)


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


def seen(read: Op, adds: Sequence[Op]) -> Iterator[str]:
    """What a turn saw is all that stood before it."""
    for op in adds:
        if op.kind == "turn" and op.ok and op.status and op.marks[0] in read.marks:
            stood = ",".join(read.marks[: read.marks.index(op.marks[0])])
            if stood != op.status.removeprefix("saw:"):
                yield f"{op.marks} saw {op.status}, but {stood!r} stood before"


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
