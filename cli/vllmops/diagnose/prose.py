"""What people write about a hang in sentences: who is where, by the names of functions in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

from ..protocol.place import MOST_WRITTEN, NUMBERS, numbers
from ..protocol.stacks import Frame, Options, ProcessStacks, StacksSnapshot, Thread
from .places import phases_of, waits_of
from .waiting import Chain, chain

STUCK = re.compile(
    r"(?i)\b(?:hang(?:s|ing)?|hung|stuck|dead-?lock\w*|live-?lock\w*|froz?en|freezes?|wedged|stall\w*"
    r"|never (?:return|come|finish|complete)s?|nothing moves|no progress|unresponsive"
    r"|stop(?:s|ped) responding|wait(?:s|ing)? for ?ever|block(?:s|ed) for ?ever)\b"
)
# A wish, a question or a change is no report.
QUIET = re.compile(
    r"(?i)\[(?:feature|rfc|doc)\w*\]|\bfeature request|\bproposal\b|\bRFC\b"
    r"|\bwould be (?:nice|great)|\bthis (?:PR|patch)\b"
    r"|\bprofil(?:e|er|ing)\b|\bflame ?graph|\brelease notes"
)
MOST_READ = 1 << 15  # characters: what people write is short, and a log ends with what counts
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\s+$")
DENIED = re.compile(
    r"(?i)(?:\b(?:no|not|never|without)|n't|no longer)(?: any| a)?(?: more)? "
    r"(?:hang|stuck|dead-?lock|stall|freez|froz)"
)
SUBJECT = (
    r"(?i:\b(?P<kind>ranks?|workers?|tp|pp|dp|gpus?|nodes?)[ _#-]?(?P<numbers>" + NUMBERS + r")\b"
    r"|\b(?:the )?(?P<others>others?|remaining|rest of the)(?: (?P<left>\d+))?"
    r" (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<every>all|both|every|each)(?: of)?(?: the)?(?: (?P<count>\d+))?"
    r" (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<role>engine ?core|engine|scheduler|api ?server|worker)\b)"
)
SUBJECTS = re.compile(SUBJECT)
CLAUSE = re.compile(
    r"(?<=[.!?;:])\s+|\n\s*\n|\n(?=\s*[-*|])|,?\s+\b(?:while|whereas|but)\b|,\s+(?="
    + re.sub(r"\?P<\w+>", "?:", SUBJECT)
    + r")"
)
NAME = re.compile(r"`(?P<tick>[A-Za-z_][\w.:]*)(?:\(\))?`|\b(?P<bare>[A-Za-z]\w*_\w+|\w+(?=\(\)))")
IN = re.compile(r"(?i)\b(?:in|at|on|inside|within|under|calls?|calling|from|for)\W*$")
ROLES = {"engine": "engine", "scheduler": "engine", "api": "api", "worker": "worker"}


def chain_of(text: str, facts: Mapping[str, str]) -> Chain | None:
    """What is stuck by a report in sentences; None if it is none, or nothing known is named.

    Args:
        text: without stacks.
        facts: as of `chain`.
    """
    text = reported(text)
    if not STUCK.search(text):
        return None
    found: dict[str, ProcessStacks] = {}
    for clause in CLAUSE.split(text):
        names = tuple(_names(clause))
        if not names:
            continue
        for title, role in dict.fromkeys(_subjects(clause)) or {("", "worker"): None}:
            found.setdefault(title, _process(title, role, names))
    if not found:
        return None
    sample = StacksSnapshot(
        captured_at=0.0, seconds=0.0, options=Options(), processes=tuple(found.values())
    )
    return chain(sample, facts)


@functools.lru_cache(1)  # several readers ask for the same text
def reported(text: str) -> str:
    """The sentences that say what happens: no question, no wish, no hang that is denied."""
    if len(text) > MOST_READ:
        text = f"{text[: MOST_READ // 2]}\n\n{text[-MOST_READ // 2 :]}"
    if QUIET.search(text):
        return ""
    sentences = SENTENCE.split(text)
    return "\n\n".join(s for s in sentences if not s.endswith("?") and not DENIED.search(s))


def _names(clause: str) -> Iterator[Frame]:
    """The functions that a clause says somebody is in, and that the tables know."""
    for match in NAME.finditer(clause):
        name = (match["tick"] or match["bare"]).replace("::", ".").rpartition(".")[2]
        frame = Frame(name, "", "")
        if (match["tick"] or IN.search(clause[: match.start()])) and (
            waits_of(frame) or phases_of(frame)
        ):
            yield frame


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
