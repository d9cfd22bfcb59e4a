"""One line of pasted stacks: a header, a frame, or nothing of interest."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from ...model.ranks import NUMBERS
from ...model.stacks import Frame
from ...support.lazy_patterns import DECIMAL, compile_lazily

CACHED = 1 << 14  # lines: dumps repeat themselves

THREAD = compile_lazily(
    r"Thread(?: (?:(?P<tid>0x[0-9a-fA-F]+|\d+)|None|<\w+>|[A-Z]\w*)(?:/0x[0-9a-fA-F]+)?)? "
    r"\((?P<state>idle|active)(?P<gil>\+gil)?\)(?::? ?\"(?P<name>.*)\"|:)?$"
)
OURS = compile_lazily(
    r"(?P<name>\S.*): (?P<state>idle|active)(?P<gil>, holds the GIL)?(?:, \d+ threads alike)?$"
)
FAULT = compile_lazily(
    r"(?:Current thread|Thread) (?P<tid>0x[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? "
    r"\(most recent call first\):?$"
)
GDB_THREAD = compile_lazily(
    r"Thread \d+ \((?:Thread 0x[0-9a-f]+ \()?LWP (?P<tid>\d+)\)?(?: \"(?P<name>[^\"]*)\")?.*\):?$"
)
PROCESS = compile_lazily(r"Process (?:(?P<pid>\d+)|<\w+>)(?:: (?P<title>.*)|:)?$")
OUR_PROCESS = compile_lazily(r"(?P<title>[A-Z][\w ]*?) pid (?P<pid>\d+)$")
LABEL = compile_lazily(
    r"[#*=\-_` ]*(?P<title>(?:VLLM::)?(?:EngineCore|Worker|APIServer|DPCoordinator)[\w-]*)"
    r"[*`]*(?:[ ,:(\[]*(?:pid|PID)[ =:]*(?P<pid>\d+)[)\]]*)?"
    r"(?:[*`: ]*(?:(?:call )?stack(?: trace)?s?)?|,? [\w -]{1,40}:)[#*=\-_`: ]*$"
)
# A process's name at the end of a line above its stack: "py-spy of Worker_TP2:".
NAMED = compile_lazily(
    r"[^()`:]{0,60}\b(?:of|for|from|on)(?: the)? `?(?P<title>(?:VLLM::)?"
    r"(?:EngineCore|Worker|APIServer|DPCoordinator)\w*)`?(?: process)?"
    r"(?:[ ,(]*(?:pid|PID)[ =:]*(?P<pid>\d+)\)?)?:[*_ ]*$"
)
# A rank's name above its stack.
RANK = compile_lazily(
    r"[#*=\-_`>( ]*(?P<title>(?:[Rr]ank|RANK|TP|PP|DP|[Ww]orker|[Nn]ode|GPU)[ _#-]?\d+)(?P<pid>)"
    r"[*`:) ]*(?:[^.:()\w][^.()]{0,40})?$"
)
# A sentence above a stack that says whose it is.
SAID = compile_lazily(
    r"(?=.*:\W*$)[^()`]{0,120}?\b(?:(?i:all|both)(?: of)?(?: the)?(?: (?P<count>\d+))?"
    r" (?:ranks|workers|GPUs|processes)"
    rf"|(?P<kind>[Rr]ank|[Ww]orker|TP|PP|DP|GPU)s?[ _#-]?(?P<numbers>{NUMBERS}))\b"
    r"[^()`]{0,80}:\W*$"
)
STACK_OF = compile_lazily(r"[~+ ]*Stack of (?P<name>\S.*?) \((?P<tid>\d+)\)[~+ ]*$")
COMMAND = compile_lazily(
    r"(?:.*\s)?(?:py-spy dump|(?:cuda-|roc)?gdb)\b.*?(?:--pid|-p)[ =]?(?P<pid>\d+)"
    r"|Attaching to .*process (?P<gdb>\d+)$"
)
FILE = compile_lazily(r".*VLLM_STACK_DUMP_for_(?P<title>\w+?)_(?P<pid>\d+)\.log")
AGAIN = compile_lazily(r"Call stack dump #\d+ at |Timeout \(\d+:\d\d:\d\d.*\)!$")
FATAL = compile_lazily(r"Fatal Python error: .+$")
LAST = compile_lazily(r"Traceback \(most recent call last\):?$")
FIRST = compile_lazily(r"Traceback \(most recent call first\):?$")
ERROR = compile_lazily(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Dead)\b(?:: .*)?$"
)

NATIVE = compile_lazily(
    r"\.so(?:\.[\d.]+)?$|\.(?:pyx|pxd|cpp|cu|cc|c|h|hpp|dylib|dll|cubin)$"
    r"|^\[\w+\]$|(?:^|/)python[\d.]*$|^ld-linux"
)
QUOTED = compile_lazily(
    r"File \"(?P<file>[^\"]*)\", line (?P<line>\d+|\?+)(?P<comma>,?) ?in ?(?P<function>\S+)"
)
GDB_PYTHON = compile_lazily(
    r"#\d+ .*?Frame 0x[0-9a-f]+, for file (?P<file>.+?), line (?P<line>\d+), ?in ?(?P<function>\S+)"
)
GDB_FRAME = compile_lazily(
    r"#\d+\s+(?:0x[0-9a-f]+ in )?(?P<function>\S.*?) ?\(.*?\)?"
    r"(?: (?:at (?P<file>[^\s:]+):(?P<line>\d+)|from (?P<library>\S+)))?$"
)
# vLLM's own trace of calls (VLLM_TRACE_FUNCTION).
TRACED = compile_lazily(
    r"(?:[\d :.-]+ )?(?P<way>Call to|Return from) (?P<function>\S+) in (?P<file>\S+):(?P<line>\d+) "
    r"(?:from|to) (?P<caller>\S+) in (?P<caller_file>\S+):(?P<caller_line>\d+)$"
)
# gdb's extension for Python prints the interpreter's frames among the native ones.
GDB_MIXED = compile_lazily(r"(?:#\d+ +)?\(?py(?:thon)?\)?:? +(?=File \")")
# A chain of calls by their names alone, among other words.
NAMES = compile_lazily(
    r"\b[A-Za-z_][\w.]*(?:\(\))?(?:\s*(?:←|<-+|<|-+>|→|=>)\s*[A-Za-z_][\w.]*(?:\(\))?){2,}"
)
# From a call to its caller, or back, as people type it; and a frame among other words.
# From a function to the one that it calls: the outermost stands first.
CALLS = compile_lazily(r"[\w)`] *(?:→|⟶|⇒|-+>|=>) *[\w(`]")
ARROWS = compile_lazily(r"\s*(?:←|<-+|-+>|→|⟵|⟶|⇐|⇒|=>|<(?=\s))\s*")
PIECE = compile_lazily(
    r"(?<![\w.])`?(?P<function>(?:[A-Za-z_]|<(?=\w+>))[\w.<>:]*)`?\s*\(`?(?:"
    r"(?P<file>(?:<[\w .]+>|[^()`\s:,]*\.(?:py|pyx|cu|cpp|so[\d.]*)))"
    r"(?:(?:[:#, ]+(?:L|line )?)(?P<line>\d+))?"
    r"|(?P<number>\d+))`?\)"
)
# The same with the file first, as tools for tracebacks print it; of lldb; of the kernel.
OTHERWISE = compile_lazily(
    r"(?:^|.*\s)`?(?P<file>[\w./~+-]+\.(?:py|pyx|cu|cpp)):(?P<line>\d+),? in "
    r"`?(?P<function>[\w.<>]+)(?:\(\))?`?$"
    r"|(?:#\d+ )?(?P<function2>[\w.<>]+)(?:\(\))? (?:from|at|@) "
    r"(?P<file2>\S+\.py):(?P<line2>\d+)$"
    r"|[\W\d]*?`?(?P<function5>[A-Za-z_][\w.<>]*)(?:\(\))?`? +"
    r"`?(?P<file5>[\w.~-]*/[\w./~-]+\.py):(?P<line5>\d+)`?$"
    r"|.*\bframe #\d+: 0x[0-9a-f]+ (?P<file3>\S+?)`(?P<function3>.+?)(?: \+ \d+)?(?: at .*)?$"
    r"|\[<[0-9a-fx]+>\] (?P<function4>\w+)\+0x\S+(?: \[\w+\])?$"
)
WORD = compile_lazily(r"(?P<tick>`?)(?P<function>[A-Za-z_][\w.]*)(?:\(\))?`?$")
# A table of py-spy top: shares and times before the function.
TOP = compile_lazily(r"[\d.]+%\s+[\d.]+%\s+[\d.]+s\s+[\d.]+s\s+(?=\S)")
TOTAL = compile_lazily(rf"\s*[\d.]+%\s+(?P<percent>{DECIMAL})%\s+[\d.]+s\s")
# A row of a profile: what runs, not what waits, unless it is nearly all.
COUNTED = compile_lazily(r"\s*\d[\d/]*(?:\s+\d+\.\d+){4}\s")  # of cProfile
SHARE = compile_lazily(r"(?:^|[|\s(])(?P<percent>\d{1,3}(?:\.\d+)?) ?%")
MOST_OF_TIME = 90.0
LOCAL = compile_lazily(r"\w+: |(?:Arguments|Locals):$")
HEADS = (THREAD, FAULT, GDB_THREAD, PROCESS, STACK_OF)
FRAME_END = compile_lazily(r":\d+\)|\.so[\d.]*\)|, line \d+")
UNITS = (
    THREAD,
    FAULT,
    GDB_THREAD,
    LAST,
    FIRST,
    AGAIN,
    FATAL,
    PROCESS,
    OUR_PROCESS,
    OURS,
    QUOTED,
    FILE,
)


def is_profile_row(line: str) -> bool:
    """Whether a line is a row of a profile that tells nothing of a wait."""
    if COUNTED.match(line):
        return True
    if match := TOTAL.match(line):  # who calls what runs is there all the time, too
        return float(match["percent"]) < MOST_OF_TIME
    share = SHARE.search(line)
    return share is not None and float(share["percent"]) < MOST_OF_TIME


@functools.lru_cache(CACHED)
def is_complete_line(line: str) -> bool:
    if line.endswith(")"):
        if line[0] == "#":
            return line.count("(") <= line.count(")")
        return parse_frame(line) is not None
    if line[:1] == "#":
        return GDB_FRAME.match(line) is not None and line.count("(") <= line.count(")")
    return any(unit.match(line) for unit in UNITS)


@functools.lru_cache(CACHED)
def parse_frame(line: str) -> Frame | None:
    """The frame in a line of py-spy or of `stacks dump`; None if the line has none."""
    if line[-1:] != ")" or line.startswith(("Python v", "Process ")):
        return None
    # The name of a C++ function has blanks and brackets, too.
    function, _, place = line[:-1].rpartition("(")
    function = function.rstrip(" ")
    file, _, number = place.rpartition(":")
    if not number.isdecimal() or file[-1:] in {"", " ", ":"}:
        file, number = place, ""
    if not function or function[0].isspace() or not file or file[-1] in " :" or ")" in file:
        return None
    python = file.endswith(".py") or file.startswith("<")
    # A script's file name may have no suffix; an address has no letters.
    script = number and " " not in function and not file.replace(".", "").isdigit()
    if not (python or script or NATIVE.search(file)) or " at 0x" in file:
        return None
    if python:
        if " " in function and not function.startswith(("Arguments:", "Locals:")):
            return None
        # If a whole dump is on one line, variables stand before the next name.
        function = function.rsplit(" ", 1)[-1]
    elif LOCAL.match(function):
        return None
    return Frame(function, file, file, int(number) if number else None)


@functools.lru_cache(CACHED)
def parse_inline_frames(line: str) -> tuple[Frame, ...]:
    """The frames among other words: marked, with arrows between them, with remarks behind them."""
    return tuple(_find_inline_frames(line))


def _find_inline_frames(line: str) -> Iterator[Frame]:
    if match := OTHERWISE.match(line):
        function, file, at = _unpack_frame_match(match)
        yield Frame(function, file, file, at)
        return
    if "%" in line:
        line = TOP.sub("", line)
    parts = ARROWS.split(line)
    if len(parts) > 2 and (chain := NAMES.search(line)) and "_" in chain[0]:
        line = chain[0]
        parts = ARROWS.split(line)
    if LOCAL.match(line) and "`" not in line and len(parts) < 2:
        return
    pieces = [PIECE.search(part) for part in parts]
    if not any(pieces):
        words = [WORD.match(part) for part in parts]
        if len(words) > 2 and all(words) and "_" in line:  # names alone
            yield from (Frame(word["function"], "", "") for word in words if word)
        return
    for part, piece in zip(parts, pieces, strict=True):
        if piece and (piece["file"] or len(parts) > 1):
            file = piece["file"] or ""
            line_number = piece["line"] or piece["number"]
            yield Frame(piece["function"], file, file, int(line_number) if line_number else None)
        elif not piece and (word := WORD.match(part)) and (word["tick"] or "_" in part):
            yield Frame(word["function"], "", "")


def _unpack_frame_match(match: re.Match[str]) -> tuple[str, str, int | None]:
    """Function, file and line of whichever form matches."""
    for suffix in ("", "2", "5", "3"):
        if name := match[f"function{suffix}"]:
            number = match[f"line{suffix}"] if suffix != "3" else None
            return name.strip("-+[]"), match[f"file{suffix}"], int(number) if number else None
    return match["function4"], "[kernel]", None
