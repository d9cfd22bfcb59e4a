"""Reads stacks as people paste them: any tool's form, through any log, terminal or mail program.

First lines are cleaned: prefixes of logs go, lines that a terminal wrapped are joined, lines that
were run together are split. Then each line is a header, a frame, or of no interest. No text makes
it fail: a text without stacks gives no samples.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ..errors import VllmopsError
from ..host.processes import Role, titled
from ..protocol.pasted import Crash, Pasted
from ..protocol.stacks import Frame, Options, ProcessStacks, StacksSnapshot, Thread
from . import pyspy

GUESSED = "thread states are guessed: this dump format does not show them"

ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]"
    r"|\[\d{1,2}(?:;\d{1,3})*m|[\x00-\x08\x0b\x0c\x0e-\x1f\ufeff\u200b]"
)
# Any number of log prefixes; the last one of vLLM names the process.
PREFIX = re.compile(
    r"(?:\s*(?:"
    r"(?:>\s?)+"
    r"|\((?P<title>[A-Za-z]\w*) pid=(?P<pid>\d+)\)(?=\s|$)"
    r"|(?:ERROR|INFO|WARNING|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?: \[[^\]]*\])?"
    r"|\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"(?: std(?:out|err) [FP](?= |$))?"
    r"|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \S+ [^\s:]+:(?=\s|$)"
    r"|\[pod/[^\]]+\]"
    r"|[\w.-]+\s*\|(?= |$)"
    r"))+"
)
FENCE = re.compile(r"\s*(?:`{3,}|~{3,})[\w-]*\s*$")

THREAD = re.compile(
    r"Thread(?: (?P<tid>0x[0-9a-fA-F]+|\d+|None)(?:/0x[0-9a-fA-F]+)?)? "
    r"\((?P<state>idle|active)(?P<gil>\+gil)?\)(?::? ?\"(?P<name>.*)\"|:)?$"
)
OURS = re.compile(
    r"(?P<name>\S.*): (?P<state>idle|active)(?P<gil>, holds the GIL)?(?:, \d+ threads alike)?$"
)
FAULT = re.compile(
    r"(?:Current thread|Thread) (?P<tid>0x[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? "
    r"\(most recent call first\):?$"
)
GDB_THREAD = re.compile(
    r"Thread \d+ \((?:Thread 0x[0-9a-f]+ \()?LWP (?P<tid>\d+)\)?(?: \"(?P<name>[^\"]*)\")?.*\):?$"
)
PROCESS = re.compile(r"Process (?P<pid>\d+)(?:: (?P<title>.*)|:)?$")
OUR_PROCESS = re.compile(r"(?P<title>[A-Z][\w ]*?) pid (?P<pid>\d+)$")
LABEL = re.compile(
    r"[#*=\-_` ]*(?P<title>(?:VLLM::)?(?:EngineCore|Worker|APIServer|DPCoordinator)[\w-]*)"
    r"[*`]*(?:[ ,:(\[]*(?:pid|PID)[ =:]*(?P<pid>\d+)[)\]]*)?"
    r"[*`: ]*(?:(?:call )?stack(?: trace)?s?)?[#*=\-_`: ]*$"
)
COMMAND = re.compile(
    r"(?:.*\s)?py-spy dump\b.*?(?:--pid|-p)[ =]?(?P<pid>\d+)|Attaching to .*process "
    r"(?P<gdb>\d+)$"
)
FILE = re.compile(r".*VLLM_STACK_DUMP_for_(?P<title>\w+?)_(?P<pid>\d+)\.log")
AGAIN = re.compile(r"Call stack dump #\d+ at |Timeout \(\d+:\d\d:\d\d.*\)!$")
FATAL = re.compile(r"Fatal Python error: .+$")
LAST = re.compile(r"Traceback \(most recent call last\):?$")
FIRST = re.compile(r"Traceback \(most recent call first\):?$")
ERROR = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Timeout|Warning|Dead)\b(?:: .*)?$"
)

# A frame of py-spy; the name of a C++ function has blanks and brackets.
FRAME = re.compile(
    r"(?P<function>\S.*?) ?\((?P<file><[\w .-]+>|[^()]*?[^()\s:])(?::(?P<line>\d+))?\)$"
)
NATIVE = re.compile(
    r"\.so(?:\.[\d.]+)?$|\.(?:pyx|pxd|cpp|cu|cc|c|h|hpp|dylib|dll|cubin)$"
    r"|^\[\w+\]$|(?:^|/)python[\d.]*$|^ld-linux"
)
QUOTED = re.compile(
    r"File \"(?P<file>[^\"]*)\", line (?P<line>\d+|\?+)(?P<comma>,?) ?in ?(?P<function>\S+)"
)
GDB_PYTHON = re.compile(
    r"#\d+ .*?Frame 0x[0-9a-f]+, for file (?P<file>.+?), line (?P<line>\d+), ?in ?(?P<function>\S+)"
)
GDB_FRAME = re.compile(
    r"#\d+\s+(?:0x[0-9a-f]+ in )?(?P<function>\S.*?) ?\(.*?\)?"
    r"(?: (?:at (?P<file>[^\s:]+):(?P<line>\d+)|from (?P<library>\S+)))?$"
)
LOCAL = re.compile(r"\w+: |(?:Arguments|Locals):$")
HEADS = (THREAD, FAULT, GDB_THREAD, PROCESS)
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

# Where lines were run together, each of these begins a line.
BEGINS = re.compile(
    r"\s*(?=(?:Thread (?:0x[0-9a-fA-F]+|\d+) \(|Current thread 0x|(?<!\w)Process \d+: "
    r"|Traceback \(most|(?<!Binary )File \"[^\"]+\", line|#\d+ +(?:0x|Frame |\w+ \()"
    r"|Python v\d|Fatal Python error:|Call stack dump #))"
)
ENDS = re.compile(
    r"(Thread (?:0x[0-9a-fA-F]+ |\d+ )?\((?:idle|active)(?:\+gil)?\)(?:: \"[^\"]*\")?"
    r"|most recent call first\):|\([^()\s]*(?::\d+|\.so[\d.]*)\)"
    r"|, holds the GIL|\bpid \d+(?= \S+: (?:idle|active)))\s*(?![\w\"]*\"|[:,])"
)
RUN_TOGETHER = 160
CACHED = 1 << 14  # lines: dumps repeat themselves
NARROWEST = 19  # columns: no terminal that wraps lines is narrower
JOINED = 14  # lines at most: a C++ name may take so many in a narrow terminal
BEGUN = re.compile(
    r"==> |File \"|Thread |Current thread|Process \d|#\d+ |Traceback |Call "
    r"|(?P<call>\S.* ?\([^()]*$)"
)
STARTS = re.compile(r"File \"|#\d+ |Traceback ")
# What can be the first part of a line that a terminal cut; most lines of a log cannot.
PLAUSIBLE = re.compile(
    r"Thread |Current |Process |File |Traceback |Fatal |Call |#\d"
    r"|[\w.<>-]+(?:, [\w.<>-]+)*,?(?: ?\([^()]*\)?:?)?(?: \w*)?$|[^:]*::|[A-Za-z]\w* pid"
)

WAITS = {
    "wait", "_wait_for_tstate_lock", "get", "poll", "_poll", "select", "recv", "recv_into",
    "accept", "sleep", "acquire", "_worker", "_recv", "_recv_bytes", "recv_bytes", "join",
    "readline", "read", "_run_event_loop",
}  # fmt: skip
NATIVE_WAITS = re.compile(
    r"futex|epoll_wait|poll$|sem_wait|sem_timedwait|cond_(?:timed)?wait|select|nanosleep|accept"
    r"|recv|__read|syscall$"
)
STDLIB = {
    "threading.py", "queue.py", "selectors.py", "socket.py", "thread.py", "poll.py",
    "connection.py", "subprocess.py", "popen_fork.py", "base_events.py", "backend.py",
}  # fmt: skip

ENGINE = {
    "process_input_sockets", "process_output_sockets", "run_engine_core", "step_with_batch_queue",
    "preprocess_add_request", "_process_engine_step", "_process_input_queue",
    "get_and_update_features",
}  # fmt: skip
WORKER = {"worker_busy_loop", "worker_main", "async_output_busy_loop", "_execute_worker_rpc"}
API = {
    "run_server", "run_server_worker", "serve_http", "output_handler", "build_async_engine_client",
    "extract_tool_calls", "extract_tool_calls_streaming", "_merge_mm_kwargs",
    "run_api_server_worker_proc",
}  # fmt: skip
# The first match counts. A worker may run inside its engine: more general names come last.
ROLES = (
    (Role.COORDINATOR, {"process_input_socket", "run_coordinator"}),
    (Role.WORKER, WORKER),
    (Role.ENGINE, ENGINE),
    (Role.API, API),
    (Role.ENGINE, {"run_busy_loop", "schedule"}),
    (Role.WORKER, {"execute_model", "sample_tokens", "acquire_read"}),
)


@dataclass
class _Thread:
    name: str = ""
    tid: int | None = None
    state: str = ""
    gil: bool = False
    frames: list[Frame] = field(default_factory=list)
    fault: bool = False  # from faulthandler, which prints the main thread last


@dataclass
class _Process:
    pid: int = 0
    title: str = ""
    threads: list[_Thread] = field(default_factory=list)
    parsed: tuple[Thread, ...] = ()


@dataclass
class _Crash:
    process: str
    error: str = ""
    frames: list[Frame] = field(default_factory=list)


def read(text: str, name: str = "") -> Pasted:
    """Find the stacks in a text.

    Args:
        text: any text.
        name: the name of its file; vLLM's own dump files have the process in their name.

    Returns:
        Samples, crashes and the cleaned text; no samples if the text holds no stacks.
    """
    # JSON can have any shape and any depth.
    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
        if found := _json(text):
            return found
    cleaned: list[str] = []
    streams = _streams(text, cleaned)
    reader = _Reader()
    for (title, pid), lines in streams.items():
        reader.stream(title, pid)
        if not title and (dump := FILE.match(name)):
            reader.process(int(dump["pid"]), dump["title"])
        for line in _joined(lines):
            reader.line(line)
    return Pasted(
        samples=_samples(reader.processes),
        crashes=tuple(
            Crash(crash.process, crash.error, tuple(reversed(crash.frames)))
            for crash in reader.crashes
            if crash.frames or crash.error
        ),
        text="\n".join(cleaned),
    )


def _json(text: str) -> Pasted | None:
    """The stacks in our own snapshot or in py-spy's JSON, one or more documents in a row."""
    processes: list[_Process] = []
    snapshots: list[StacksSnapshot] = []
    start = text.lstrip("\ufeff \r\n\t`")
    if start[:1] not in {"[", "{"}:
        return None
    content = start.rstrip("` \r\n\t")
    for document in list(_documents(content)):
        if isinstance(document, dict) and isinstance(document.get("data"), dict):
            document = document["data"]  # noqa: PLW2901 - the envelope of `stacks dump --json`
        if isinstance(document, dict) and "processes" in document:
            snapshots.append(msgspec.convert({"kind": "stacks", **document}, StacksSnapshot))
        by_pid: dict[int, list[Any]] = {}
        for thread in document if isinstance(document, list) else ():
            if isinstance(thread, dict):
                by_pid.setdefault(int(thread.get("pid") or 0), []).append(thread)
        for pid, threads in by_pid.items():
            try:
                parsed = pyspy.parse(msgspec.json.encode(threads))
            except VllmopsError:
                continue
            info = next((t["process_info"] for t in threads if t.get("process_info")), None)
            title = str(info.get("command_line", "")) if isinstance(info, dict) else ""
            processes.append(_Process(pid, title, parsed=parsed))
    if snapshots:
        return Pasted(tuple(snapshots), complete=True)
    return Pasted(_samples(processes)) if processes else None


def _documents(content: str) -> Iterator[Any]:
    import json  # noqa: PLC0415 - msgspec can't read one document after the other

    decoder, at = json.JSONDecoder(), 0
    while at < len(content):
        document, at = decoder.raw_decode(content, at)
        yield document
        while at < len(content) and content[at].isspace():
            at += 1


def _streams(text: str, cleaned: list[str]) -> dict[tuple[str, int], list[str]]:
    """The lines without log prefixes and fences, by the process that the prefix names.

    Args:
        text: as pasted.
        cleaned: gets the same lines in their order in the text; of a wrapped line, only the first
            part has the prefix.
    """
    text = ESCAPES.sub("", text)
    if text.count("\\n") > max(3, text.count("\n")):
        text = text.replace("\\r", "").replace("\\n", "\n").replace('\\"', '"').replace("\\t", " ")
    streams: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines():
        key = ("", 0)
        if prefix := PREFIX.match(line):
            line = line[prefix.end() :]  # noqa: PLW2901
            if prefix["title"]:
                key = (prefix["title"], int(prefix["pid"]))
        if "`" in line or "~" in line:
            if FENCE.match(line):
                continue
            line = line.strip("`")  # noqa: PLW2901
        streams.setdefault(key, []).append(line.rstrip())
        cleaned.append(line.rstrip())
    return streams


def _joined(lines: list[str]) -> Iterator[str]:
    """The lines as they were before a terminal wrapped them, or something ran them together."""
    parts: list[str] = []
    for line in lines:
        if len(line) > RUN_TOGETHER and len(FRAME_END.findall(line)) > 1:
            apart = BEGINS.sub("\n", ENDS.sub(r"\1\n", line)).split("\n")
            parts += [part.strip() for part in apart if part.strip()]
        else:
            parts.append(line)
    width = max(map(len, parts), default=0)
    at = 0
    while at < len(parts):
        raw = parts[at]
        line = raw.strip()
        at += 1
        if line and (len(raw) == width or not _complete(line)) and at < len(parts):
            taken, joined = _join(raw, parts[at : at + JOINED], width)
            if taken:
                yield joined
                at += taken
                continue
        yield line


REST = re.compile(r"\w+>?")
FRAME_END = re.compile(r":\d+\)|\.so[\d.]*\)|, line \d+")


def _join(raw: str, following: list[str], width: int) -> tuple[int, str]:
    """Join a line with those that a terminal has cut off from it.

    Args:
        raw: the line, with its indentation.
        following: the lines after it.
        width: of the longest line; a line that a terminal has cut is as long.

    Returns:
        How many of the following lines belong to the line, 0 if none does, and the joined line.
    """
    line = raw.strip()
    full = len(raw) >= width - 1 >= NARROWEST
    if not _may_be_cut(line, full):
        return 0, line
    alone = _complete(line)  # it makes sense without the following lines
    begun = BEGUN.match(line)
    open_call = begun is not None and begun["call"] is not None
    glued = spaced = raw
    for count, more in enumerate(following, 1):
        part = more.strip()
        indented = more.startswith("  ")
        if not part or _begins_anew(part):
            break
        # The end of a cut function name looks complete, too: it is a name.
        if _complete(part) and (alone or not full or indented):
            break
        glued += part if indented else more
        spaced += f" {part}"
        if open_call and not part.endswith(")"):
            continue
        joined = _completed(glued.strip(), spaced.strip(), alone)
        if joined is None and alone:
            break
        if joined is None:
            continue
        # A name looks complete wherever it is cut: its end is a single word on the next line.
        if len(more) == width and count < len(following) and REST.fullmatch(following[count]):
            return count + 1, joined + following[count]
        return count, joined
    return 0, line


def _may_be_cut(line: str, full: bool) -> bool:
    """Whether a line can be the first part of one that a terminal has cut.

    Args:
        line: without indentation.
        full: whether it is as long as the terminal is wide.
    """
    if LOCAL.match(line) and not PROCESS.match(line):
        return False
    return bool(BEGUN.match(line) or (full and PLAUSIBLE.match(line)))


def _begins_anew(line: str) -> bool:
    """Whether a line can't be the rest of another one."""
    return bool(STARTS.match(line)) or any(head.match(line) for head in HEADS)


def _completed(glued: str, spaced: str, alone: bool) -> str | None:
    """Which way of joining makes a complete line: without or with a blank; None if neither.

    A line that is complete alone is only ever continued without a blank.
    """
    if _complete(glued) and not (alone and glued == spaced):
        return glued
    return spaced if not alone and _complete(spaced) else None


@functools.lru_cache(CACHED)
def _complete(line: str) -> bool:
    if line.endswith(")"):
        if line[0] == "#":
            return line.count("(") <= line.count(")")
        return _frame(line) is not None
    if line[:1] == "#":
        return GDB_FRAME.match(line) is not None and line.count("(") <= line.count(")")
    return any(unit.match(line) for unit in UNITS)


@functools.lru_cache(CACHED)
def _frame(line: str) -> Frame | None:
    """The frame in a line of py-spy or of `stacks dump`; None if the line has none."""
    found = FRAME.match(line)
    if not found or line.startswith(("Python v", "Process ")):
        return None
    function, file, number = found["function"], found["file"], found["line"]
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


class _Reader:
    """Reads line by line; keeps the process, the thread and the crash that a line belongs to."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.crashes: list[_Crash] = []
        self.owner = ""
        self.crash: _Crash | None = None
        self.open = False  # whether the last process may get more threads
        self.first = False  # whether quoted frames are innermost first, as gdb's py-bt has them

    def stream(self, title: str, pid: int) -> None:
        """The next lines are of this process, unless a header among them names another one."""
        self.crash = None
        self.open = False
        self.owner = f"{title} pid {pid}" if title else ""
        if title:
            self.process(pid, title)

    def process(self, pid: int, title: str) -> None:
        self.crash = None
        last = self.processes[-1] if self.processes else None
        if last and self.open and not last.threads and (not last.pid or last.pid == pid or not pid):
            last.pid, last.title = pid or last.pid, title or last.title
            return
        self.processes.append(_Process(pid, title))
        self.open = True

    def again(self) -> None:
        """Another dump of the same process begins."""
        if self.processes and self.processes[-1].threads:
            last = self.processes[-1]
            self.process(last.pid, last.title)

    def thread(self, made: _Thread) -> None:
        self.crash = None
        if not self.processes or not self.open:
            self.process(0, "")
        threads = self.processes[-1].threads
        second = made.name == "MainThread" and any(t.name == "MainThread" for t in threads)
        if second or (made.fault and threads and threads[-1].fault and _is_main(threads[-1])):
            self.process(0, "")
            threads = self.processes[-1].threads
        threads.append(made)

    def frame(self, frame: Frame) -> None:
        if self.crash:
            self.crash.frames.append(frame)
            return
        if not self.processes or not self.open or not self.processes[-1].threads:
            self.thread(_Thread())
        self.processes[-1].threads[-1].frames.append(frame)

    def line(self, line: str) -> None:
        if not line:
            return
        if line[-1] == ")" and line[0] != "#" and (frame := _frame(line)):
            self.crash = None
            self.frame(frame)
            return
        if self._header(line):
            return
        if line[0] == "#" and (found := GDB_PYTHON.match(line)):
            self.crash = None
            self._python(found)
        elif line[0] == "#" and (found := GDB_FRAME.match(line)):
            file = found["library"] or found["file"] or ""
            number = found["line"]
            self.crash = None
            self.frame(Frame(found["function"], file, file, int(number) if number else None))
        elif 'File "' in line and (found := QUOTED.match(line)):
            if found["comma"] and not self.crash and not self.first:
                # The first line of the traceback was not pasted.
                self._crash("")
            self._python(found)
            if self.crash and (error := ERROR.search(line[found.end() :])):
                self.crash.error = error[0]
        elif self.crash and self.crash.frames and ERROR.match(line):
            self.crash.error = line
            self.crash = None

    def _header(self, line: str) -> bool:
        """Take a line that begins a process, a thread or a traceback; False if it is none."""
        for pattern, take in HEADERS:
            if found := pattern.match(line):
                take(self, found)
                return True
        return False

    def _faulthandler_thread(self, found: re.Match[str]) -> None:
        self.thread(_Thread(found["name"] or "", int(found["tid"], 16), fault=True))

    def _gdb_thread(self, found: re.Match[str]) -> None:
        self.thread(_Thread(found["name"] or "", int(found["tid"])))

    def _state_thread(self, found: re.Match[str]) -> None:
        self.thread(_thread(found))

    def _process(self, found: re.Match[str]) -> None:
        self.process(int(found["pid"] or 0), found["title"] or "")

    def _command(self, found: re.Match[str]) -> None:
        self.process(int(found["pid"] or found["gdb"]), "")

    def _outermost_first(self, _found: re.Match[str]) -> None:
        self.first = False
        self._crash("")

    def _innermost_first(self, _found: re.Match[str]) -> None:
        self.crash, self.first = None, True

    def _fatal(self, found: re.Match[str]) -> None:
        self.process(0, "")
        self.crashes.append(_Crash(self.owner, found.string))

    def _again(self, _found: re.Match[str]) -> None:
        self.again()

    def _crash(self, error: str) -> None:
        self.crash = _Crash(self.owner, error)
        self.crashes.append(self.crash)

    def _python(self, found: re.Match[str]) -> None:
        line = found["line"]
        number = int(line) if line.isdigit() else None
        self.frame(Frame(found["function"], found["file"], _short(found["file"]), number))


# What begins a process, a thread or a traceback; the first pattern that matches counts.
HEADERS: tuple[tuple[re.Pattern[str], Callable[[_Reader, re.Match[str]], None]], ...] = (
    (THREAD, _Reader._state_thread),
    (FAULT, _Reader._faulthandler_thread),
    (GDB_THREAD, _Reader._gdb_thread),
    (PROCESS, _Reader._process),
    (LAST, _Reader._outermost_first),
    (FIRST, _Reader._innermost_first),
    (FATAL, _Reader._fatal),
    (AGAIN, _Reader._again),
    (OUR_PROCESS, _Reader._process),
    (FILE, _Reader._process),
    (COMMAND, _Reader._command),
    (LABEL, _Reader._process),
    (OURS, _Reader._state_thread),
)


def _thread(found: re.Match[str]) -> _Thread:
    number = found.groupdict().get("tid")
    tid = None if number in {None, "None"} else int(str(number), 0)
    return _Thread(found["name"] or "", tid, found["state"], bool(found["gil"]))


def _short(file: str) -> str:
    """A path from the package down, as py-spy shortens it."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    if found := re.search(r"/lib/python3\.\d+/(.+)$", file):
        return found[1]
    at = file.find("/vllm/")
    return file[at + 1 :] if at >= 0 else file


def _is_main(thread: _Thread) -> bool:
    outermost = thread.frames[-1].function if thread.frames else ""
    return outermost in {"<module>", "_run_module_as_main", "_main", "spawn_main"}


def _samples(processes: list[_Process]) -> tuple[StacksSnapshot, ...]:
    """Samples of the processes: a process that occurs again belongs to the next sample."""
    samples: list[list[ProcessStacks]] = []
    seen: dict[object, int] = {}
    for process in processes:
        threads = process.parsed or tuple(_finished(thread) for thread in process.threads)
        if not threads:
            continue
        key: object = process.pid or process.title or object()
        index = seen.get(key, 0)
        seen[key] = index + 1
        if index == len(samples):
            samples.append([])
        known = bool(process.parsed) or any(thread.state for thread in process.threads)
        samples[index].append(
            ProcessStacks(
                role=str(_role(process.title, threads)),
                pid=process.pid,
                create_time=0.0,
                title=_title(process.title),
                note="" if known else GUESSED,
                threads=threads,
            )
        )
    _drop_cut(samples)
    return tuple(
        StacksSnapshot(captured_at=0.0, seconds=0.0, options=Options(), processes=tuple(sample))
        for sample in samples
    )


def _drop_cut(samples: list[list[ProcessStacks]]) -> None:
    """Remove the last sample if its stacks break off: it shows less than the others."""
    if len(samples) < 2:
        return
    last = samples[-1][-1]
    before = next((p for p in samples[-2] if (p.pid, p.title) == (last.pid, last.title)), None)
    if before and len(last.threads) < len(before.threads):
        samples.pop()


def _finished(thread: _Thread) -> Thread:
    state: Literal["active", "idle"] = "idle" if _waits(thread.frames) else "active"
    if thread.state:
        state = "active" if thread.state == "active" else "idle"
    name = thread.name or (f"thread {thread.tid}" if thread.tid is not None else "thread")
    return Thread(name, state, thread.gil, thread.tid, tuple(thread.frames))


def _waits(frames: list[Frame]) -> bool:
    if not frames:
        return True
    first = frames[0]
    bare = first.function.rsplit(".", 1)[-1]
    if first.short_file.endswith(".py"):
        return bare in WAITS and first.short_file.rsplit("/", 1)[-1] in STDLIB
    return NATIVE_WAITS.search(bare) is not None


def _title(title: str) -> str:
    """The title that vLLM gives the process; empty if it can't be known."""
    word = next((word for word in title.split() if word.startswith("VLLM::")), "")
    if word or " " in title or "/" in title:
        return word
    return f"VLLM::{title}" if titled([f"VLLM::{title}"]) else ""


def _role(title: str, threads: tuple[Thread, ...]) -> Role:
    for words in (title.split(), [f"VLLM::{title}"]):
        if role := titled(words):
            return role
    if title == "API server":
        return Role.API
    functions = {frame.function.rsplit(".", 1)[-1] for thread in threads for frame in thread.frames}
    return next((role for role, names in ROLES if names & functions), Role.OTHER)
