"""Lines above a stack, or below it, that say in any words whose it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...model.ranks import MOST_WRITTEN, NUMBERS, parse_ranks
from ...support.lazy_patterns import compile_lazily
from .stack_lines import CACHED

LONGEST = 160  # characters
KIND = r"(?:[Rr]ank|RANK|TP|PP|DP|EP|[Ww]orker|[Nn]ode|GPU)"
TITLE = r"(?:VLLM::)?(?:EngineCore|Worker|APIServer|DPCoordinator)(?:_\w+)?"
NAME = rf"(?:{TITLE}\b|{KIND}s?[ _#-]?(?:{NUMBERS})\b)"
LISTED = rf"{NAME}(?:\s*(?:[/,&+]|and|und)\s*{NAME})*"
HEADING = compile_lazily(rf"[^()\"]{{0,40}}?(?<![\w.])(?P<names>{LISTED})(?P<rest>.*)$")
# A title in brackets behind the name of a rank tells more than that.
TITLED = compile_lazily(rf"[^()\w]{{0,4}}\({TITLE}\b")
PARTS = compile_lazily(rf"(?P<title>{TITLE})\b|(?P<kind>{KIND})s?[ _#-]?(?P<numbers>{NUMBERS})\b")
SHORT = {"TP", "PP", "DP", "EP"}  # before which no blank stands
PID = compile_lazily(r"\b(?:pid|PID)\b[ =:#]*(?P<pid>\d+)")
# Whose the frames are that follow in the same line.
OWNED = compile_lazily(
    rf"[|*\- ]*`?(?P<names>{LISTED})`?\**(?: [\w ]{{1,24}}| ?\([\w ,=+%]{{1,24}}\))? ?[:=|] ?"
    r"(?P<rest>.+)$"
)
LOGGED = compile_lazily(r"\d\d:\d\d:\d\d|\b(?:INFO|ERROR|WARNING|DEBUG)\b")
SAME = r"(?:same|identical(?:ly)?|ditto|likewise|dasselbe|ebenso)"
SAME_FOR = compile_lazily(
    rf"\W*(?:(?:the|exactly) )?{SAME}\b[^()\d]{{0,40}}?(?P<names>{LISTED})[^()\w]*$"
)
SAME_AS = compile_lazily(
    rf"\W*(?P<names>{LISTED})\W{{1,4}}(?:(?:is|are|the|stack) ){{0,2}}(?:{SAME}|as|like)\b"
    rf"[^()\d]{{0,24}}?(?P<like>{NAME})?[^()\w]*$"
)


@dataclass(frozen=True)
class Heading:
    """The processes that a line names.

    Args:
        titles: of the processes that have the stack; at least one.
        pid: of the first; 0 if the line does not say.
        like: the title of the process whose stack they have; empty for the one before.
        opens: whether the line ends as one does that frames follow.
    """

    titles: tuple[str, ...]
    pid: int = 0
    like: str = ""
    opens: bool = False


@lru_cache(CACHED)
def parse_heading(line: str) -> Heading | None:
    """The processes that a line names, if it can stand above a stack."""
    if len(line) > LONGEST or LOGGED.search(line):
        return None
    match = HEADING.match(line)
    if not match:
        return None
    titles = parse_process_titles(match["names"])
    if len(titles) == 1 and (titled := TITLED.match(match["rest"])):
        titles = parse_process_titles(titled[0])
    pid = PID.search(line)
    return Heading(titles, int(pid["pid"]) if pid else 0, opens=line.endswith(":"))


@lru_cache(CACHED)
def parse_same_stack(line: str) -> Heading | None:
    """The processes of which a line says that they have a stack that stands in the text."""
    if len(line) > LONGEST:
        return None
    match = SAME_FOR.match(line) or SAME_AS.match(line)
    if not match:
        return None
    like = match.groupdict().get("like")
    return Heading(
        parse_process_titles(match["names"]), like=parse_process_titles(like)[0] if like else ""
    )


def parse_inline_heading(line: str) -> tuple[Heading, str] | None:
    """The processes that a line names before frames, and the rest of the line."""
    match = OWNED.match(line)
    return (Heading(parse_process_titles(match["names"])), match["rest"]) if match else None


def parse_process_titles(names: str) -> tuple[str, ...]:
    """The titles in a list of names: ``TP0 / TP1``, ``ranks 1-3``, ``Worker_TP2, Worker_TP3``."""
    titles: list[str] = []
    for part in PARTS.finditer(names):
        if part["title"]:
            titles.append(part["title"])
        else:
            kind = part["kind"] if part["kind"] in SHORT else f"{part['kind']} "
            titles += [f"{kind}{number}" for number in parse_ranks(part["numbers"])]
    return tuple(dict.fromkeys(titles[:MOST_WRITTEN]))
