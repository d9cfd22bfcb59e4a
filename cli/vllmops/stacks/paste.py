"""Reads stacks as people paste them: any tool's form, through any log, terminal or mail program.

First lines are cleaned: prefixes of logs go, lines that a terminal wrapped are joined, lines that
were run together are split. Then each line is a header, a frame, or of no interest. No text makes
it fail: a text without stacks gives no samples.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import msgspec

from ..errors import VllmopsError
from ..host.roles import Role, titled
from ..patterns import pattern
from ..protocol.pasted import Crash, Pasted
from ..protocol.place import MOST_WRITTEN, numbers
from ..protocol.stacks import Frame, Options, ProcessStacks, StacksSnapshot, Thread
from . import pyspyjson
from .cleaning import joined, streams
from .headings import Heading, heading, owned, same
from .issues import sections
from .lines import (
    AGAIN,
    CACHED,
    CALLS,
    COMMAND,
    ERROR,
    FATAL,
    FAULT,
    FILE,
    FIRST,
    GDB_FRAME,
    GDB_MIXED,
    GDB_PYTHON,
    GDB_THREAD,
    LABEL,
    LAST,
    NAMED,
    OUR_PROCESS,
    OURS,
    PROCESS,
    QUOTED,
    RANK,
    SAID,
    STACK_OF,
    THREAD,
    TRACED,
    frame_in,
    frames_in,
    is_profile,
)

GUESSED = "thread states are guessed: this dump format does not show them"

WAITS = {
    "wait", "_wait_for_tstate_lock", "get", "poll", "_poll", "select", "recv", "recv_into",
    "accept", "sleep", "acquire", "_worker", "_recv", "_recv_bytes", "recv_bytes", "join",
    "readline", "read", "_run_event_loop",
}  # fmt: skip
NATIVE_WAITS = pattern(
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


# Titles of SGLang's processes, which people paste, too. Its scheduler runs the model, as a worker.
SGLANG = {
    "sglang::scheduler": Role.WORKER,
    "sglang::data_parallel_controller": Role.COORDINATOR,
    "sglang::tokenizer": Role.API,
    "sglang::detokenizer": Role.API,
    "sglang::http_server": Role.API,
}

# The command line of a server; its engine has a title of its own.
SERVES = pattern(
    r"(?:^|[/ ])vllm serve\b|vllm\.entrypoints\.[\w.]*api_server\b|sglang\.launch_server\b"
)

# What every frame among words has one of: a file, or an arrow.
MARKS = pattern(r"\.(?:py|pyx|cu|cpp|so)\b|\(<|frame #|\[<|[←→⟵⟶⇐⇒]|<-|->|=>| < ")
# How far inside some functions are, to see which end of a stack stands first in a text.
LEVELS = {
    name: level
    for level, names in enumerate(
        (
            "_bootstrap spawn_main _main",
            "_bootstrap_inner run_engine_core worker_main run_server run_scheduler_process",
            "run_busy_loop worker_busy_loop async_output_busy_loop event_loop_normal "
            "event_loop_overlap serve_http process_input_sockets process_output_sockets",
            "_process_engine_step _process_input_queue generate",
            "step step_with_batch_queue enqueue_output init_device compile_or_warm_up_model "
            "execute_dummy_batch determine_available_memory get_next_batch_to_run run_batch",
            "execute_model sample_tokens load_model schedule capture_model profile_run "
            "get_response",
            "_dummy_run propose forward load_weights publish dequeue get_output",
            "acquire_read acquire_write put get all_reduce synchronize",
            "wait poll select acquire",
        )
    )
    for name in names.split()
}


# Python neither reads nor writes a number of thousands of digits, and nothing has one.
LONGEST = 128
ENDLESS = pattern(rf"(?<![\da-fA-F])[\da-fA-F]{{{LONGEST},}}")


@dataclass
class _Thread:
    name: str = ""
    tid: int | None = None
    state: str = ""
    gil: bool = False
    frames: list[Frame] = field(default_factory=list)
    fault: bool = False  # from faulthandler, which prints the main thread last
    outermost: bool = False  # whether arrows show that the outermost frame stands first


@dataclass
class _Process:
    pid: int = 0
    title: str = ""
    threads: list[_Thread] = field(default_factory=list)
    parsed: tuple[Thread, ...] = ()
    alike: list[str] = field(default_factory=list)  # titles of others with the same stacks


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
    text = ENDLESS.sub(lambda match: match[0][:LONGEST], text)
    # JSON can have any shape and any depth.
    with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
        if pasted := _json(text):
            return pasted
    parts = [_read(part, name) for part in sections(text)]
    if len(parts) == 1:
        return parts[0]
    return Pasted(
        samples=tuple(sample for part in parts for sample in part.samples),
        crashes=tuple(crash for part in parts for crash in part.crashes),
        text="\n".join(part.text for part in parts),
        sections=tuple(parts),
    )


def _read(text: str, name: str) -> Pasted:
    """Find the stacks in what one person wrote."""
    cleaned: list[str] = []
    unmixed = streams(text, cleaned)
    reader = _Reader()
    for (title, pid), lines in unmixed.items():
        reader.stream(title, pid)
        if not title and (dump := FILE.match(name)):
            reader.process(int(dump["pid"]), dump["title"])
        for line in joined(lines):
            reader.line(line)
    crashes = [crash for crash in reader.crashes if crash.frames or crash.error]
    for crash in [crash for crash in crashes if _is_stack(crash)]:
        crashes.remove(crash)
        reader.processes.append(_Process(threads=[_Thread(frames=crash.frames[::-1])]))
    _name(reader.processes, cleaned)
    processes = [
        _Process(process.pid if not number else 0, title, process.threads)
        for process in reader.processes
        for number, title in enumerate((process.title, *process.alike))
    ]
    return Pasted(
        samples=_samples(processes),
        crashes=tuple(
            Crash(crash.process, crash.error, tuple(reversed(crash.frames))) for crash in crashes
        ),
        text="\n".join(cleaned),
    )


# A row of ps or top.
ROW = pattern(r"[^()\"]{0,40}?\b(?P<pid>\d+)\b[^()\"]*\b(?P<title>(?:VLLM|sglang)::\w+)")


def _name(processes: Sequence[_Process], lines: Sequence[str]) -> None:
    """Give the processes without a title the one that another dump or a table of processes has.

    A main thread has its process's id: it tells one process from another, too.
    """
    rows = (ROW.match(line) for line in lines if "VLLM::" in line or "sglang::" in line)
    titles = {int(row["pid"]): row["title"] for row in rows if row}
    titles |= {process.pid: process.title for process in processes if process.title}
    for process in processes:
        main = next((t.tid for t in process.threads if t.name == "MainThread" and t.tid), 0)
        process.pid = process.pid or main
        process.title = process.title or titles.get(process.pid, "")


def _is_stack(crash: _Crash) -> bool:
    """Whether a traceback is one of a live thread.

    It has no exception and ends in a wait; or somebody pressed Ctrl-C because nothing moved.
    """
    if crash.error.startswith("KeyboardInterrupt"):
        return bool(crash.frames)
    return not crash.error and waits(crash.frames[::-1][:1])


def _json(text: str) -> Pasted | None:
    """The stacks in our own snapshot or in py-spy's JSON, one or more documents in a row."""
    processes: list[_Process] = []
    snapshots: list[StacksSnapshot] = []
    start = text.lstrip("\ufeff \r\n\t`")
    if start[:1] not in {"[", "{"}:
        return None
    for document in list(_documents(start.rstrip("` \r\n\t"))):
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
                parsed = pyspyjson.parse(msgspec.json.encode(threads))
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


class _Reader:
    """Reads line by line; keeps the process, the thread and the crash that a line belongs to."""

    def __init__(self) -> None:
        self.processes: list[_Process] = []
        self.crashes: list[_Crash] = []
        self.owner = ""
        self.crash: _Crash | None = None
        self.open = False  # whether the last process may get more threads
        self.calls: list[Frame] = []  # of a trace of calls, innermost first
        self.first = False  # whether quoted frames are innermost first, as gdb's py-bt has them
        self.above: Heading | None = None  # what the last line says of the stack that may follow

    def stream(self, title: str, pid: int) -> None:
        """The next lines are of this process, unless a header among them names another one."""
        self.crash = None
        self.open = False
        self.owner = f"{title} pid {pid}" if title else ""
        if title:
            self.process(pid, title)

    def process(self, pid: int, title: str) -> None:
        self.crash = self.above = None
        last = self.processes[-1] if self.processes else None
        if last and self.open and not last.threads and (not last.pid or last.pid == pid or not pid):
            last.pid, last.title, last.alike = pid or last.pid, title or last.title, []
            return
        self.processes.append(_Process(pid, title))
        self.open = True

    def again(self) -> None:
        """Another dump of the same process begins."""
        if self.processes and self.processes[-1].threads:
            last = self.processes[-1]
            self.process(last.pid, last.title)

    def headed(self, found: Heading) -> None:
        """A stack of these processes begins."""
        self.process(found.pid, found.titles[0])
        self.processes[-1].alike = list(found.titles[1:])

    def alike(self, found: Heading) -> None:
        """These processes have the stack of another one."""
        named = [process for process in self.processes if found.like in {"", process.title}]
        if named:
            named[-1].alike += found.titles

    def thread(self, made: _Thread) -> None:
        self.crash = None
        if self.above:
            self.headed(self.above)
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
        opens = self.above is not None and self.above.opens
        if opens or not self.processes or not self.open or not self.processes[-1].threads:
            self.thread(_Thread())
        self.above = None
        self.processes[-1].threads[-1].frames.append(frame)

    def line(self, line: str) -> None:
        if not line or (("%" in line or line[0].isdigit()) and is_profile(line)):
            return
        if line[-1] == ")" and line[0] != "#" and (frame := frame_in(line)):
            self.crash = None
            self.frame(frame)
            return
        if self._header(line):
            return
        if line[0] == "#" and (match := GDB_PYTHON.match(line)):
            self.crash = None
            self._python(match)
        elif line[0] == "#" and (match := GDB_FRAME.match(line)):
            file = match["library"] or match["file"] or ""
            number = match["line"]
            self.crash = None
            self.frame(Frame(match["function"], file, file, int(number) if number else None))
        elif 'File "' in line and (match := QUOTED.match(line)):
            if match["comma"] and not self.crash and not self.first:
                # The first line of the traceback was not pasted.
                self._crash("")
            self._python(match)
            if self.crash and (error := ERROR.search(line[match.end() :])):
                self.crash.error = error[0]
        elif self.crash and self.crash.frames and ERROR.match(line):
            self.crash.error = line
            self.crash = None
        elif not self.crash and MARKS.search(line):
            self._words(line)
        elif self.processes and (found := same(line)):
            self.alike(found)
        else:
            self.above = heading(line)

    def _words(self, line: str) -> None:
        """Take the frames among other words, and the rank before them."""
        if known := owned(line):
            found, line = known
            self.headed(found)
        if frames := frames_in(line):
            for frame in frames:
                self.frame(frame)
            self.processes[-1].threads[-1].outermost |= CALLS.search(line) is not None

    def _mixed(self, match: re.Match[str]) -> None:
        """Take a Python frame among the native ones of gdb."""
        if quoted := QUOTED.match(match.string, match.end()):
            self.crash = None
            self._python(quoted)

    def _said(self, match: re.Match[str]) -> None:
        """The next stack is that of several ranks."""
        if match["numbers"]:
            titles = [f"{match['kind']} {number}" for number in numbers(match["numbers"])]
        else:
            count = min(int(match["count"] or 2), MOST_WRITTEN)
            titles = [f"Rank {number}" for number in range(count)]
        self.headed(Heading(tuple(titles)))

    def _traced(self, match: re.Match[str]) -> None:
        """Follow a trace of calls: at its end, the calls without a return are the stack."""
        called = _frame(match["function"], match["file"], match["line"])
        caller = _frame(match["caller"], match["caller_file"], match["caller_line"])
        if not self.calls:
            self.thread(_Thread("traced"))
            self.calls = self.processes[-1].threads[-1].frames
        while self.calls and not _same(self.calls[0], caller):
            self.calls.pop(0)
        if not self.calls:
            self.calls.append(caller)
        if match["way"] == "Call to":
            self.calls.insert(0, called)

    def _header(self, line: str) -> bool:
        """Take a line that begins a process, a thread or a traceback; False if it is none."""
        if heading := _heading(line):
            take, match = heading
            take(self, match)
        return heading is not None

    def _faulthandler_thread(self, match: re.Match[str]) -> None:
        self.thread(_Thread(match["name"] or "", int(match["tid"], 16), fault=True))

    def _gdb_thread(self, match: re.Match[str]) -> None:
        self.thread(_Thread(match["name"] or "", int(match["tid"])))

    def _state_thread(self, match: re.Match[str]) -> None:
        self.thread(_thread(match))

    def _process(self, match: re.Match[str]) -> None:
        self.process(int(match["pid"] or 0), (match["title"] or "").strip())

    def _command(self, match: re.Match[str]) -> None:
        self.process(int(match["pid"] or match["gdb"]), "")

    def _outermost_first(self, _found: re.Match[str]) -> None:
        self.first = False
        self._crash("")

    def _stack(self, match: re.Match[str]) -> None:
        self.first = True
        self.thread(_Thread(match["name"]))

    def _innermost_first(self, _found: re.Match[str]) -> None:
        self.crash, self.first = None, True

    def _fatal(self, match: re.Match[str]) -> None:
        self.process(0, "")
        self.crashes.append(_Crash(self.owner, match.string))

    def _again(self, _found: re.Match[str]) -> None:
        self.again()

    def _crash(self, error: str) -> None:
        self.crash = _Crash(self.owner, error)
        self.crashes.append(self.crash)

    def _python(self, match: re.Match[str]) -> None:
        self.frame(_frame(match["function"], match["file"], match["line"]))


# What begins a process, a thread or a traceback: the pattern that matches first counts, and it is
# tried where the words before it are in the line.
HEADERS: tuple[tuple[str, re.Pattern[str], Callable[[_Reader, re.Match[str]], None]], ...] = (
    ("Thread", THREAD, _Reader._state_thread),
    ("hread 0x", FAULT, _Reader._faulthandler_thread),
    ("Thread", GDB_THREAD, _Reader._gdb_thread),
    ("Process", PROCESS, _Reader._process),
    ("Traceback", LAST, _Reader._outermost_first),
    ("Traceback", FIRST, _Reader._innermost_first),
    ("Fatal", FATAL, _Reader._fatal),
    ("stack dump", AGAIN, _Reader._again),
    ("Timeout", AGAIN, _Reader._again),
    (" pid ", OUR_PROCESS, _Reader._process),
    ("VLLM_STACK", FILE, _Reader._process),
    ("py-spy", COMMAND, _Reader._command),
    ("gdb", COMMAND, _Reader._command),
    ("Attaching", COMMAND, _Reader._command),
    ("Worker", LABEL, _Reader._process),
    ("EngineCore", LABEL, _Reader._process),
    ("APIServer", LABEL, _Reader._process),
    ("DPCoordinator", LABEL, _Reader._process),
    ("Worker", NAMED, _Reader._process),
    ("EngineCore", NAMED, _Reader._process),
    ("APIServer", NAMED, _Reader._process),
    ("DPCoordinator", NAMED, _Reader._process),
    ("", RANK, _Reader._process),
    ("Stack of", STACK_OF, _Reader._stack),
    (": ", OURS, _Reader._state_thread),
    ("File", GDB_MIXED, _Reader._mixed),
    (" in ", TRACED, _Reader._traced),
    (":", SAID, _Reader._said),
)


@lru_cache(CACHED)
def _heading(line: str) -> tuple[Callable[[_Reader, re.Match[str]], None], re.Match[str]] | None:
    """What takes a line that begins something, and its match."""
    for words, known, take in HEADERS:
        if words in line and (match := known.match(line)):
            return take, match
    return None


def _frame(function: str, file: str, line: str) -> Frame:
    return Frame(function, file, shortened(file), int(line) if line.isdigit() else None)


def _same(one: Frame, other: Frame) -> bool:
    """Whether two frames of a trace are one call; its line moves on."""
    return (one.function, one.file) == (other.function, other.file)


def _thread(match: re.Match[str]) -> _Thread:
    number = match.groupdict().get("tid")
    tid = None if number in {None, "None"} else int(str(number), 0)
    return _Thread(match["name"] or "", tid, match["state"], bool(match["gil"]))


def shortened(file: str) -> str:
    """A path from the package down, as py-spy shortens it."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    if match := re.search(r"/lib/python3\.\d+/(.+)$", file):
        return match[1]
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
        role = str(role_of(process.title, threads))
        # Containers have the same pids.
        key = (process.pid, process.title or role) if process.pid or process.title else object()
        index = seen.get(key, 0)
        seen[key] = index + 1
        if index == len(samples):
            samples.append([])
        known = bool(process.parsed) or any(thread.state for thread in process.threads)
        samples[index].append(
            ProcessStacks(
                role=role,
                pid=process.pid,
                create_time=0.0,
                title=title_of(process.title),
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
    state: Literal["active", "idle"] = "idle" if waits(thread.frames) else "active"
    if thread.state:
        state = "active" if thread.state == "active" else "idle"
    name = thread.name or (f"thread {thread.tid}" if thread.tid is not None else "thread")
    return Thread(name, state, thread.gil, thread.tid, tuple(_innermost_first(thread)))


def _innermost_first(thread: _Thread) -> list[Frame]:
    """The frames, reversed if known functions, or else arrows, show that the outermost is first."""
    frames = thread.frames
    known = [LEVELS[name] for f in frames if (name := f.function.rpartition(".")[2]) in LEVELS]
    outermost = known[0] < known[-1] if len(known) > 1 else thread.outermost
    return frames[::-1] if outermost else frames


def waits(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frames are those of a thread that waits."""
    if not frames:
        return True
    first = frames[0]
    bare = first.function.rsplit(".", 1)[-1]
    if first.short_file.endswith(".py"):
        return bare in WAITS and first.short_file.rsplit("/", 1)[-1] in STDLIB
    return NATIVE_WAITS.search(bare) is not None


def title_of(title: str) -> str:
    """The title that vLLM gives the process; empty if it can't be known."""
    named = ("VLLM::", *SGLANG)
    word = next((word for word in title.split() if word.startswith(named)), "")
    if match := RANK.match(title):
        return match["title"]
    if word or " " in title or "/" in title:
        return word
    return f"VLLM::{title}" if titled([f"VLLM::{title}"]) else ""


def role_of(title: str, threads: tuple[Thread, ...]) -> Role:
    """What a process does in a server, by its title or else by the functions of its threads."""
    for words in (title.split(), [f"VLLM::{title}"]):
        if role := titled(words):
            return role
    if found := next((role for name, role in SGLANG.items() if title.startswith(name)), None):
        return found
    if title == "API server":
        return Role.API
    functions = {frame.function.rsplit(".", 1)[-1] for thread in threads for frame in thread.frames}
    other = Role.API if SERVES.search(title) else Role.OTHER
    return next((role for role, names in ROLES if names & functions), other)
