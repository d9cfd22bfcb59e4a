"""What people write about a hang in sentences: who is where, by the names of functions in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

import msgspec

from ..patterns import pattern
from ..protocol.place import MOST_WRITTEN, NUMBERS, numbers
from ..protocol.stacks import Frame, Options, ProcessStacks, StacksSnapshot, Thread
from . import toml
from .places import LOCKS, phases_of, starts, waits_of
from .waiting import Chain, chain

MOST_READ = 1 << 15  # characters: what people write is short, and a log ends with what counts
LONGEST = 2000  # characters of a sentence
COMMENT = pattern(r"(?m)^[ +]*(?:#|//) ")  # of code, as a patch shows it
MARKUP = pattern(r"[`*]")
PAIRS = pattern(r"(?:\b\w+ ?= ?[^\s,]+, ?){6,}")  # a configuration that is printed
# A heading, an item of a list and a line of a log are sentences, too.
SENTENCE = pattern(
    r"(?<=[.!?])\s+|\n\s*\n|\s+$|\n(?=\s*(?:[-*|>]|\d+[.)])\s|[^\n]{0,60}\d\d:\d\d:\d\d)"
)
HEADING = pattern(r"(?m)^#+ .*$")
SUBJECT = (
    r"(?i:\b(?P<kind>ranks?|workers?|tp|pp|dp|gpus?|nodes?)[ _#-]?(?P<numbers>" + NUMBERS + r")\b"
    r"|\b(?:the )?(?P<others>others?|remaining|rest of the)(?: (?P<left>\d+))?"
    r" (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<every>all|both|every|each)(?: of)?(?: the)?(?: (?P<count>\d+))?"
    r"(?: [\w-]+)? (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<role>engine ?core|engine|scheduler|api ?server|worker)\b)"
)
SUBJECTS = pattern(SUBJECT)
CLAUSE = pattern(
    r"(?<=[.!?;:])\s+|\n\s*\n|\n(?=\s*[-*|])|,?\s+\b(?:while|whereas|but)\b|,\s+(?:and\s+)?(?:the\s+)?(?="
    + re.sub(r"\?P<\w+>", "?:", SUBJECT)
    + r")"
)
NAME = pattern(r"`(?P<tick>[A-Za-z_][\w.:]*)(?:\(\))?`|\b(?P<bare>[A-Za-z]\w*_\w+|\w+(?=\(\)))")
IN = pattern(r"(?i)\b(?:in|at|on|inside|within|under|calls?|calling|from|for)\W*$")
ROLES = {"engine": "engine", "scheduler": "engine", "api": "api", "worker": "worker"}


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words of a report; see the head of the file."""

    words: str
    example: str


class Sign(Row, frozen=True, forbid_unknown_fields=True):
    """Words that tell what is stuck.

    Args:
        ids: of the catalogue, the most probable first.
        proof: whether the words alone say that something is stuck.
        part: whether they only name a part of the server.
        phase: the id of what the server was doing, of ``frames.toml``; empty if they do not tell.
    """

    ids: tuple[str, ...]
    phase: str = ""
    proof: bool = False
    part: bool = False


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    text: tuple[Row, ...]
    sentence: tuple[Row, ...]
    stuck: tuple[Row, ...]
    sign: tuple[Sign, ...]


@functools.cache
def table() -> Words:
    """The words, in the order of the file."""
    return toml.read("signs.toml", Words)


@functools.cache
def _patterns(kind: str) -> list[re.Pattern[str]]:
    return [pattern(row.words, re.MULTILINE) for row in getattr(table(), kind)]


def _says(kind: str, text: str) -> bool:
    """Whether a row of a kind matches a text in lower case."""
    return any(row.search(text) for row in _patterns(kind))


def chain_of(text: str, facts: Mapping[str, str]) -> Chain | None:
    """What is stuck by a report in sentences; None if it is none, or nothing known is named.

    Args:
        text: without stacks.
        facts: as of `chain`.
    """
    text = reported(text)
    if not is_stuck(text):
        return None
    processes: dict[str, ProcessStacks] = {}
    for clause in CLAUSE.split(text):
        names = tuple(_names(clause))
        if not names:
            continue
        for title, role in dict.fromkeys(_subjects(clause)) or {("", "worker"): None}:
            processes.setdefault(title, _process(title, role, names))
    named = [frame for process in processes.values() for frame in process.threads[0].frames]
    # A step of a start is a place to be stuck in; of one that serves, it takes more to tell.
    if not any(map(_tells, named)):
        return None
    sample = StacksSnapshot(
        captured_at=0.0, seconds=0.0, options=Options(), processes=tuple(processes.values())
    )
    return chain(sample, facts)


@functools.lru_cache(1)  # several readers ask for the same text
def reported(text: str) -> str:
    """The sentences that say what happens: no question, no wish, no hang that is denied."""
    if len(text) > MOST_READ:
        text = f"{text[: MOST_READ // 2]}\n\n{text[-MOST_READ // 2 :]}"
    if _says("text", text.lower()):
        return ""
    text = HEADING.sub(r"\g<0>\n\n", text)
    return "\n\n".join(
        part
        for part in SENTENCE.split(text)
        if not part.endswith("?") and not _says("sentence", plain(part))
    )


def plain(sentence: str) -> str:
    """A sentence in lower case, one blank between words, no markup and no configuration."""
    text = MARKUP.sub("", PAIRS.sub(" ", COMMENT.sub("", sentence)))
    return " ".join(text.split())[:LONGEST].lower()


def is_stuck(report: str) -> bool:
    """Whether a report says that something is stuck."""
    return any(_says("stuck", plain(part)) for part in report.split("\n\n"))


def _names(clause: str) -> Iterator[Frame]:
    """The functions that a clause says somebody is in, and that the tables know."""
    for match in NAME.finditer(clause):
        name = (match["tick"] or match["bare"]).replace("::", ".").rpartition(".")[2]
        frame = Frame(name, "", "")
        if (match["tick"] or IN.search(clause[: match.start()])) and (
            waits_of(frame) or phases_of(frame) or name in LOCKS
        ):
            yield frame


def _tells(frame: Frame) -> bool:
    """Whether a name says what somebody waits for, or a step of a start."""
    return starts(frame) or bool(waits_of(frame)) or frame.function in LOCKS


def _subjects(clause: str) -> Iterator[tuple[str, str]]:
    """The processes that a clause is about: what to call each, and its role."""
    for match in SUBJECTS.finditer(clause):
        if match["numbers"]:
            kind = match["kind"].lower().rstrip("s")
            kind = kind.upper() if len(kind) == 2 else kind
            for number in numbers(match["numbers"]):
                yield f"{kind} {number}", "worker"
        elif match["others"]:
            for number in range(min(int(match["left"] or 2), MOST_WRITTEN)):
                yield f"other rank {number}", "worker"
        elif match["every"]:
            for number in range(min(int(match["count"] or 2), MOST_WRITTEN)):
                yield f"rank {number}", "worker"
        else:
            role = next(r for word, r in ROLES.items() if word in match["role"].lower())
            yield role, role


def _process(title: str, role: str, names: tuple[Frame, ...]) -> ProcessStacks:
    thread = Thread("MainThread", "active", owns_gil=False, tid=None, frames=names)
    return ProcessStacks(role=role, pid=0, create_time=0.0, title=title, threads=(thread,))
