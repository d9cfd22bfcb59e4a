"""What people write about a hang in sentences: who is where, by the names of functions in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping

import msgspec

from ...model.ranks import MOST_WRITTEN, NUMBERS, parse_ranks
from ...model.stacks import DumpOptions, Frame, ProcessStacks, StacksSnapshot, ThreadStack
from ...support.lazy_patterns import compile_lazily
from .. import toml_tables
from .thread_phases import LOCKS, find_phase_ids, find_wait_ids, is_startup_frame
from .wait_chains import WaitChain, find_wait_chain

MOST_READ = 1 << 15  # characters: what people write is short, and a log ends with what counts
LONGEST = 2000  # characters of a sentence
COMMENT = compile_lazily(r"(?m)^[ +]*(?:#|//) ")  # of code, as a patch shows it
MARKUP = compile_lazily(r"[`*]")
PAIRS = compile_lazily(r"(?:\b\w+ ?= ?[^\s,]+, ?){6,}")  # a configuration that is printed
# A heading, an item of a list and a line of a log are sentences, too.
SENTENCE = compile_lazily(
    r"(?<=[.!?])\s+|\n\s*\n|\s+$|\n(?=\s*(?:[-*|>]|\d+[.)])\s|[^\n]{0,60}\d\d:\d\d:\d\d)"
)
HEADING = compile_lazily(r"(?m)^#+ .*$")
SUBJECT = (
    r"(?i:\b(?P<kind>ranks?|workers?|tp|pp|dp|gpus?|nodes?)[ _#-]?(?P<numbers>" + NUMBERS + r")\b"
    r"|\b(?:the )?(?P<others>others?|remaining|rest of the)(?: (?P<left>\d+))?"
    r" (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<every>all|both|every|each)(?: of)?(?: the)?(?: (?P<count>\d+))?"
    r"(?: [\w-]+)? (?:ranks?|workers?|gpus?|processes)\b"
    r"|\b(?P<role>engine ?core|engine|scheduler|api ?server|worker)\b)"
)
SUBJECTS = compile_lazily(SUBJECT)
CLAUSE = compile_lazily(
    r"(?<=[.!?;:])\s+|\n\s*\n|\n(?=\s*[-*|])|,?\s+\b(?:while|whereas|but)\b|,\s+(?:and\s+)?(?:the\s+)?(?="
    + re.sub(r"\?P<\w+>", "?:", SUBJECT)
    + r")"
)
NAME = compile_lazily(
    r"`(?P<tick>[A-Za-z_][\w.:]*)(?:\(\))?`|\b(?P<bare>[A-Za-z]\w*_\w+|\w+(?=\(\)))"
)
IN = compile_lazily(r"(?i)\b(?:in|at|on|inside|within|under|calls?|calling|from|for)\W*$")
ROLES = {"engine": "engine", "scheduler": "engine", "api": "api", "worker": "worker"}


class ReportPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words of a report; see the head of the file."""

    pattern: str = msgspec.field(name="words")
    example: str


class HangPattern(ReportPattern, frozen=True, forbid_unknown_fields=True):
    """Words that tell what is stuck.

    Args:
        ids: of the catalogue, the most probable first.
        proof: whether the words alone say that something is stuck.
        part: whether they only name a part of the server.
        phase: the id, in ``thread_phases.toml``, of what the server was doing; empty if they do not
            tell.
    """

    ids: tuple[str, ...]
    phase: str = ""
    proof: bool = False
    part: bool = False


class ReportTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    text: tuple[ReportPattern, ...]
    sentence: tuple[ReportPattern, ...]
    stuck: tuple[ReportPattern, ...]
    sign: tuple[HangPattern, ...]


@functools.cache
def load_report_tables() -> ReportTables:
    """The words, in the order of the file."""
    return toml_tables.load_table("stacks/prose.toml", ReportTables)


@functools.cache
def _compile_patterns(kind: str) -> list[re.Pattern[str]]:
    return [
        compile_lazily(row.pattern, re.MULTILINE) for row in getattr(load_report_tables(), kind)
    ]


def _matches_pattern(kind: str, text: str) -> bool:
    """Whether a row of a kind matches a text in lower case."""
    return any(row.search(text) for row in _compile_patterns(kind))


def parse_wait_chain(text: str, facts: Mapping[str, str]) -> WaitChain | None:
    """What is stuck by a report in sentences; None if it is none, or nothing known is named.

    Args:
        text: without stacks.
        facts: as of `find_wait_chain`.
    """
    text = select_statements(text)
    if not is_hang_report(text):
        return None
    processes: dict[str, ProcessStacks] = {}
    for clause in CLAUSE.split(text):
        names = tuple(_find_named_frames(clause))
        if not names:
            continue
        for title, role in dict.fromkeys(_find_processes(clause)) or {("", "worker"): None}:
            processes.setdefault(title, _make_process_stacks(title, role, names))
    named = [frame for process in processes.values() for frame in process.threads[0].frames]
    # A step of a start is a place to be stuck in; of one that serves, it takes more to tell.
    if not any(map(_is_wait_or_start, named)):
        return None
    sample = StacksSnapshot(
        captured_at=0.0, seconds=0.0, options=DumpOptions(), processes=tuple(processes.values())
    )
    return find_wait_chain(sample, facts)


@functools.lru_cache(1)  # several readers ask for the same text
def select_statements(text: str) -> str:
    """The sentences that say what happens: no question, no wish, no hang that is denied."""
    if len(text) > MOST_READ:
        text = f"{text[: MOST_READ // 2]}\n\n{text[-MOST_READ // 2 :]}"
    if _matches_pattern("text", text.lower()):
        return ""
    text = HEADING.sub(r"\g<0>\n\n", text)
    return "\n\n".join(
        part
        for part in SENTENCE.split(text)
        if not part.endswith("?") and not _matches_pattern("sentence", normalize_sentence(part))
    )


def normalize_sentence(sentence: str) -> str:
    """A sentence in lower case, one blank between words, no markup and no configuration."""
    text = MARKUP.sub("", PAIRS.sub(" ", COMMENT.sub("", sentence)))
    return " ".join(text.split())[:LONGEST].lower()


def is_hang_report(report: str) -> bool:
    """Whether a report says that something is stuck."""
    return any(_matches_pattern("stuck", normalize_sentence(part)) for part in report.split("\n\n"))


def _find_named_frames(clause: str) -> Iterator[Frame]:
    """The functions that a clause says somebody is in, and that the tables know."""
    for match in NAME.finditer(clause):
        name = (match["tick"] or match["bare"]).replace("::", ".").rpartition(".")[2]
        frame = Frame(name, "", "")
        if (match["tick"] or IN.search(clause[: match.start()])) and (
            find_wait_ids(frame) or find_phase_ids(frame) or name in LOCKS
        ):
            yield frame


def _is_wait_or_start(frame: Frame) -> bool:
    """Whether a name says what somebody waits for, or a step of a start."""
    return is_startup_frame(frame) or bool(find_wait_ids(frame)) or frame.function in LOCKS


def _find_processes(clause: str) -> Iterator[tuple[str, str]]:
    """The processes that a clause is about: what to call each, and its role."""
    for match in SUBJECTS.finditer(clause):
        if match["numbers"]:
            kind = match["kind"].lower().rstrip("s")
            kind = kind.upper() if len(kind) == 2 else kind
            for number in parse_ranks(match["numbers"]):
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


def _make_process_stacks(title: str, role: str, names: tuple[Frame, ...]) -> ProcessStacks:
    thread = ThreadStack("MainThread", "active", owns_gil=False, tid=None, frames=names)
    return ProcessStacks(role=role, pid=0, create_time=0.0, title=title, threads=(thread,))
