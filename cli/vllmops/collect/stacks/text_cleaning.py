"""Makes lines out of what a log, a terminal, a mail program or a web page has made of them.

Prefixes of logs go, lines that a terminal wrapped are joined, lines that were run together are
split.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...support.lazy_patterns import compile_lazily
from .stack_lines import CACHED, FRAME_END, HEADS, LOCAL, PROCESS, is_complete_line

ESCAPES = compile_lazily(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufeff\u200b]"
    r"(?:(?<=\x1b)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_]))?"
)
# As programs print the escape character that they do not send, and where it was lost.
SPELT = compile_lazily(r"\[\d{1,2}(?:;\d{1,3})*m")
SPELT_ESCAPE = compile_lazily(
    r"(?:\^\[\[|ESC\[|\\x1b\[|\\u001b\[|\\033\[|␛\[|\[)\d{1,2}(?:;\d{1,3})*m"
)
# Any number of log prefixes; the last one of vLLM names the process.
PREFIX = compile_lazily(
    r"(?:\s*(?:"
    r"(?:>\s?)+"
    r"|\((?P<title>[A-Za-z]\w*) pid=(?P<pid>\d+)(?:, ip=[^)\s]*)?\)(?=\s|$)"
    r"|(?:ERROR|INFO|WARNING|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?: \[[^\]]*\])?"
    r"|\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"(?: std(?:out|err) [FP](?= |$))?"
    r"|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \S+ [^\s:]+:(?=\s|$)"
    r"|\[pod/[^\]]+\]"
    r"|[\w.-]+\s*\|(?= |$)"
    # What tools print before each line of a host or a rank, where a line of a stack follows; the
    # names of local variables are indented.
    r"|(?<!  )(?:\[[^\]<\n]{1,40}\]:?|(?!(?i:py|rank|tp|pp|dp|worker|engine))[\w.-]{1,40}[:>])"
    r"(?= +(?:Thread (?:0x|\d)|Process \d|Python v\d|Traceback \(most|File \""
    r"|[\w.<>]+ \([^()\s]*:\d+\)$|[A-Za-z_][\w.]*(?:Error|Exception)\b))"
    r"))+"
)
# A chain of calls that goes on in the next line of a paragraph.
CHAINED = compile_lazily(r"([←→])[ \t]*\n[ \t>]*(?=`)")
CHAINS = compile_lazily(r"\n[ \t>]*(?=\(`|[←→] ?`)")
FENCE = compile_lazily(r"\s*(?:`{3,}|~{3,})[\w-]*\s*$")

# Where lines were run together, each of these begins a line.
BEGINS = compile_lazily(
    r"\s*(?=(?:Thread (?:0x[0-9a-fA-F]+|\d+) \(|Current thread 0x|(?<!\w)Process \d+: "
    r"|Traceback \(most|(?<!Binary )File \"[^\"]+\", line|#\d+ +(?:0x|Frame |\w+ \()"
    r"|\([A-Za-z]\w* pid=\d+\)|Python v\d|Fatal Python error:|Call stack dump #))"
)
ENDS = compile_lazily(
    r"(Thread (?:0x[0-9a-fA-F]+ |\d+ )?\((?:idle|active)(?:\+gil)?\)(?:: \"[^\"]*\")?"
    r"|most recent call first\):|\([^()\s]*(?::\d+|\.so[\d.]*)\)"
    r"|, holds the GIL|\bpid \d+(?= \S+: (?:idle|active)))\s*(?![\w\"]*\"|[:,])"
)
RUN_TOGETHER = 160
LONGEST = 4096  # letters of a line; the time that some patterns take grows by their square
NARROWEST = 19  # columns: no terminal that wraps lines is narrower
JOINED = 14  # lines at most: a C++ name may take so many in a narrow terminal
BEGUN = compile_lazily(
    r"==> |File \"|Thread |Current thread|Process \d|#\d+ |Traceback |Call "
    r"|(?P<call>\S.* ?\([^()]*$)"
)
STARTS = compile_lazily(r"File \"|#\d+ |Traceback ")
# What can be the first part of a line that a terminal cut; most lines of a log cannot.
PLAUSIBLE = compile_lazily(
    r"Thread |Current |Process |File |Traceback |Fatal |Call |#\d"
    r"|[\w.<>-]+(?:, [\w.<>-]+)*,?(?: ?\([^()]*\)?:?)?(?: \w*)?$|[^:]*::|[A-Za-z]\w* pid"
)


def group_lines_by_process(text: str, clean_lines: list[str]) -> dict[tuple[str, int], list[str]]:
    """The lines without log prefixes and fences, by the process that the prefix names.

    Args:
        text: as pasted.
        clean_lines: gets the same lines in their order in the text; of a wrapped line, only the
            first part has the prefix.
    """
    text = ESCAPES.sub("", text)
    if SPELT.search(text):
        text = SPELT_ESCAPE.sub("", text)
    if "←" in text or "→" in text:
        text = CHAINS.sub(" ", CHAINED.sub(r"\1 ", text))
    if text.count("\\n") > max(3, text.count("\n")):
        text = text.replace("\\r", "").replace("\\n", "\n").replace('\\"', '"').replace("\\t", " ")
    streams: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines():
        key, rest = _strip_prefix(line)
        if rest is not None:
            streams.setdefault(key, []).append(rest)
            clean_lines.append(rest)
    return streams


@functools.lru_cache(CACHED)
def _strip_prefix(line: str) -> tuple[tuple[str, int], str | None]:
    """The process that a line's prefix names, and the rest; None for a fence of Markdown."""
    key = ("", 0)
    if prefix := PREFIX.match(line):
        line = line[prefix.end() :]
        if prefix["title"]:
            key = (prefix["title"], int(prefix["pid"]))
    if "`" in line or "~" in line:
        if FENCE.match(line):
            return key, None
        line = line.strip("`")
    return key, line.rstrip()


def restore_lines(lines: list[str]) -> Iterator[str]:
    """The lines as they were before a terminal wrapped them, or something ran them together."""
    parts: list[str] = []
    for line in lines:
        if len(line) > RUN_TOGETHER and len(FRAME_END.findall(line)) > 1:
            apart = BEGINS.sub("\n", ENDS.sub(r"\1\n", line)).split("\n")
            parts += [part.strip() for part in apart if part.strip()]
        else:
            parts.append(line)
    # Of a frame, the library stands at the end.
    parts = [p if len(p) <= LONGEST else p[: LONGEST // 2] + p[-LONGEST // 2 :] for p in parts]
    width = max(map(len, parts), default=0)
    taken = 0
    for at, raw in enumerate(parts, 1):
        if taken:
            taken -= 1
            continue
        line = raw.strip()
        if (len(raw) == width or not is_complete_line(line)) and _can_be_wrapped(
            line, _is_full_width(raw, width)
        ):
            taken, line = _join_wrapped_line(raw, parts[at : at + JOINED], width)
        yield line


REST = compile_lazily(r"\w+>?")


def _join_wrapped_line(raw: str, following: list[str], width: int) -> tuple[int, str]:
    """Join a line with those that a terminal has cut off from it.

    Args:
        raw: the line, with its indentation.
        following: the lines after it.
        width: of the longest line; a line that a terminal has cut is as long.

    Returns:
        How many of the following lines belong to the line, 0 if none does, and the joined line.
    """
    line = raw.strip()
    full = _is_full_width(raw, width)
    alone = is_complete_line(line)  # it makes sense without the following lines
    begun = BEGUN.match(line)
    open_call = begun is not None and begun["call"] is not None
    glued = spaced = raw
    for count, more in enumerate(following, 1):
        part = more.strip()
        indented = more.startswith("  ")
        if not part or _is_line_start(part) or (alone and _count_indent(more) > _count_indent(raw)):
            break
        # The end of a cut function name looks complete, too: it is a name.
        if is_complete_line(part) and (alone or not full or indented):
            break
        glued += part if indented else more
        spaced += f" {part}"
        if open_call and not part.endswith(")"):
            continue
        joined = _find_complete_join(glued.strip(), spaced.strip(), alone)
        if joined is None and alone:
            break
        if joined is None:
            continue
        # A name looks complete wherever it is cut: its end is a single word on the next line.
        if len(more) == width and count < len(following) and REST.fullmatch(following[count]):
            return count + 1, joined + following[count]
        return count, joined
    return 0, line


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_full_width(raw: str, width: int) -> bool:
    return len(raw) >= width - 1 >= NARROWEST


@functools.lru_cache(CACHED)
def _can_be_wrapped(line: str, is_full_width: bool) -> bool:
    """Whether a line can be the first part of one that a terminal has cut.

    Args:
        line: without indentation.
        is_full_width: whether it is as long as the terminal is wide.
    """
    if LOCAL.match(line) and not PROCESS.match(line):
        return False
    return bool(BEGUN.match(line) or (is_full_width and PLAUSIBLE.match(line)))


def _is_line_start(line: str) -> bool:
    """Whether a line can't be the rest of another one."""
    return bool(STARTS.match(line)) or any(head.match(line) for head in HEADS)


def _find_complete_join(glued_line: str, spaced_line: str, is_complete: bool) -> str | None:
    """Which way of joining makes a complete line: without or with a blank; None if neither.

    A line that is complete alone is only ever continued without a blank.
    """
    if is_complete_line(glued_line) and not (is_complete and glued_line == spaced_line):
        return glued_line
    return spaced_line if not is_complete and is_complete_line(spaced_line) else None
