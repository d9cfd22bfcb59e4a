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

from ...model.pasted_stacks import CrashTraceback, PastedStacks
from ...model.ranks import MOST_WRITTEN, parse_ranks
from ...model.roles import Role, find_title_role
from ...model.stacks import DumpOptions, Frame, ProcessStacks, StacksSnapshot, ThreadStack
from ...support.errors import VllmopsError
from ...support.lazy_patterns import compile_lazily
from . import pyspy_json
from .headings import Heading, parse_heading, parse_inline_heading, parse_same_stack
from .issue_sections import split_issue_text
from .stack_lines import (
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
    is_profile_row,
    parse_frame,
    parse_inline_frames,
)
from .text_cleaning import group_lines_by_process, restore_lines

GUESSED = "thread states are guessed: this dump format does not show them"

WAITS = {
    "wait", "_wait_for_tstate_lock", "get", "poll", "_poll", "select", "recv", "recv_into",
    "accept", "sleep", "acquire", "_worker", "_recv", "_recv_bytes", "recv_bytes", "join",
    "readline", "read", "_run_event_loop",
}  # fmt: skip
NATIVE_WAITS = compile_lazily(
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
SERVES = compile_lazily(
    r"(?:^|[/ ])vllm serve\b|vllm\.entrypoints\.[\w.]*api_server\b|sglang\.launch_server\b"
)

# What every frame among words has one of: a file, or an arrow.
MARKS = compile_lazily(r"\.(?:py|pyx|cu|cpp|so)\b|\(<|frame #|\[<|[←→⟵⟶⇐⇒]|<-|->|=>| < ")
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
ENDLESS = compile_lazily(rf"(?<![\da-fA-F])[\da-fA-F]{{{LONGEST},}}")


@dataclass
class _ThreadDraft:
    name: str = ""
    tid: int | None = None
    state: str = ""
    gil: bool = False
    frames: list[Frame] = field(default_factory=list)
    is_faulthandler: bool = False  # from faulthandler, which prints the main thread last
    outermost: bool = False  # whether arrows show that the outermost frame stands first


@dataclass
class _ProcessDraft:
    pid: int = 0
    title: str = ""
    threads: list[_ThreadDraft] = field(default_factory=list)
    parsed_threads: tuple[ThreadStack, ...] = ()
    same_stack_titles: list[str] = field(
        default_factory=list
    )  # titles of others with the same stacks


@dataclass
class _CrashDraft:
    process: str
    error: str = ""
    frames: list[Frame] = field(default_factory=list)


def parse_stacks(text: str, name: str = "") -> PastedStacks:
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
        if pasted := _parse_json(text):
            return pasted
    parts = [_parse_section(part, name) for part in split_issue_text(text)]
    if len(parts) == 1:
        return parts[0]
    return PastedStacks(
        samples=tuple(sample for part in parts for sample in part.samples),
        crashes=tuple(crash for part in parts for crash in part.crashes),
        text="\n".join(part.text for part in parts),
        sections=tuple(parts),
    )


def _parse_section(text: str, name: str) -> PastedStacks:
    """Find the stacks in what one person wrote."""
    cleaned: list[str] = []
    unmixed = group_lines_by_process(text, cleaned)
    reader = _StackParser()
    for (title, pid), lines in unmixed.items():
        reader.begin_stream(title, pid)
        if not title and (dump := FILE.match(name)):
            reader.begin_process(int(dump["pid"]), dump["title"])
        for line in restore_lines(lines):
            reader.parse_line(line)
    crashes = [crash for crash in reader.crashes if crash.frames or crash.error]
    for crash in [crash for crash in crashes if _is_live_stack(crash)]:
        crashes.remove(crash)
        reader.processes.append(_ProcessDraft(threads=[_ThreadDraft(frames=crash.frames[::-1])]))
    _assign_titles(reader.processes, cleaned)
    processes = [
        _ProcessDraft(process.pid if not number else 0, title, process.threads)
        for process in reader.processes
        for number, title in enumerate((process.title, *process.same_stack_titles))
    ]
    return PastedStacks(
        samples=_group_into_samples(processes),
        crashes=tuple(
            CrashTraceback(crash.process, crash.error, tuple(reversed(crash.frames)))
            for crash in crashes
        ),
        text="\n".join(cleaned),
    )


# A row of ps or top.
ROW = compile_lazily(r"[^()\"]{0,40}?\b(?P<pid>\d+)\b[^()\"]*\b(?P<title>(?:VLLM|sglang)::\w+)")


def _assign_titles(processes: Sequence[_ProcessDraft], lines: Sequence[str]) -> None:
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


def _is_live_stack(crash: _CrashDraft) -> bool:
    """Whether a traceback is one of a live thread.

    It has no exception and ends in a wait; or somebody pressed Ctrl-C because nothing moved.
    """
    if crash.error.startswith("KeyboardInterrupt"):
        return bool(crash.frames)
    return not crash.error and is_waiting(crash.frames[::-1][:1])


def _parse_json(text: str) -> PastedStacks | None:
    """The stacks in our own snapshot or in py-spy's JSON, one or more documents in a row."""
    processes: list[_ProcessDraft] = []
    snapshots: list[StacksSnapshot] = []
    start = text.lstrip("\ufeff \r\n\t`")
    if start[:1] not in {"[", "{"}:
        return None
    for document in list(_parse_json_documents(start.rstrip("` \r\n\t"))):
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
                parsed = pyspy_json.parse_dump(msgspec.json.encode(threads))
            except VllmopsError:
                continue
            info = next((t["process_info"] for t in threads if t.get("process_info")), None)
            title = str(info.get("command_line", "")) if isinstance(info, dict) else ""
            processes.append(_ProcessDraft(pid, title, parsed_threads=parsed))
    if snapshots:
        return PastedStacks(tuple(snapshots), complete=True)
    return PastedStacks(_group_into_samples(processes)) if processes else None


def _parse_json_documents(content: str) -> Iterator[Any]:
    import json  # noqa: PLC0415 - msgspec can't read one document after the other

    decoder, at = json.JSONDecoder(), 0
    while at < len(content):
        document, at = decoder.raw_decode(content, at)
        yield document
        while at < len(content) and content[at].isspace():
            at += 1


class _StackParser:
    """Reads line by line; keeps the process, the thread and the crash that a line belongs to."""

    def __init__(self) -> None:
        self.processes: list[_ProcessDraft] = []
        self.crashes: list[_CrashDraft] = []
        self.owner = ""
        self.crash: _CrashDraft | None = None
        self.can_add_threads = False  # whether the last process may get more threads
        self.calls: list[Frame] = []  # of a trace of calls, innermost first
        self.innermost_first = (
            False  # whether quoted frames are innermost first, as gdb's py-bt has them
        )
        self.pending_heading: Heading | None = (
            None  # what the last line says of the stack that may follow
        )

    def begin_stream(self, title: str, pid: int) -> None:
        """The next lines are of this process, unless a header among them names another one."""
        self.crash = None
        self.can_add_threads = False
        self.owner = f"{title} pid {pid}" if title else ""
        if title:
            self.begin_process(pid, title)

    def begin_process(self, pid: int, title: str) -> None:
        self.crash = self.pending_heading = None
        last = self.processes[-1] if self.processes else None
        if (
            last
            and self.can_add_threads
            and not last.threads
            and (not last.pid or last.pid == pid or not pid)
        ):
            last.pid, last.title, last.same_stack_titles = pid or last.pid, title or last.title, []
            return
        self.processes.append(_ProcessDraft(pid, title))
        self.can_add_threads = True

    def begin_next_dump(self) -> None:
        """Another dump of the same process begins."""
        if self.processes and self.processes[-1].threads:
            last = self.processes[-1]
            self.begin_process(last.pid, last.title)

    def begin_stack(self, heading: Heading) -> None:
        """A stack of these processes begins."""
        self.begin_process(heading.pid, heading.titles[0])
        self.processes[-1].same_stack_titles = list(heading.titles[1:])

    def share_stack(self, heading: Heading) -> None:
        """These processes have the stack of another one."""
        named = [process for process in self.processes if heading.like in {"", process.title}]
        if named:
            named[-1].same_stack_titles += heading.titles

    def add_thread(self, thread: _ThreadDraft) -> None:
        self.crash = None
        if self.pending_heading:
            self.begin_stack(self.pending_heading)
        if not self.processes or not self.can_add_threads:
            self.begin_process(0, "")
        threads = self.processes[-1].threads
        second = thread.name == "MainThread" and any(t.name == "MainThread" for t in threads)
        if second or (
            thread.is_faulthandler
            and threads
            and threads[-1].is_faulthandler
            and _is_main_thread(threads[-1])
        ):
            self.begin_process(0, "")
            threads = self.processes[-1].threads
        threads.append(thread)

    def add_frame(self, frame: Frame) -> None:
        if self.crash:
            self.crash.frames.append(frame)
            return
        opens = self.pending_heading is not None and self.pending_heading.opens
        if (
            opens
            or not self.processes
            or not self.can_add_threads
            or not self.processes[-1].threads
        ):
            self.add_thread(_ThreadDraft())
        self.pending_heading = None
        self.processes[-1].threads[-1].frames.append(frame)

    def parse_line(self, line: str) -> None:
        if not line or (("%" in line or line[0].isdigit()) and is_profile_row(line)):
            return
        if line[-1] == ")" and line[0] != "#" and (frame := parse_frame(line)):
            self.crash = None
            self.add_frame(frame)
            return
        if self._handle_header(line):
            return
        if line[0] == "#" and (match := GDB_PYTHON.match(line)):
            self.crash = None
            self._add_python_frame(match)
        elif line[0] == "#" and (match := GDB_FRAME.match(line)):
            file = match["library"] or match["file"] or ""
            number = match["line"]
            self.crash = None
            self.add_frame(Frame(match["function"], file, file, int(number) if number else None))
        elif 'File "' in line and (match := QUOTED.match(line)):
            if match["comma"] and not self.crash and not self.innermost_first:
                # The first line of the traceback was not pasted.
                self._begin_crash("")
            self._add_python_frame(match)
            if self.crash and (error := ERROR.search(line[match.end() :])):
                self.crash.error = error[0]
        elif self.crash and self.crash.frames and ERROR.match(line):
            self.crash.error = line
            self.crash = None
        elif not self.crash and MARKS.search(line):
            self._handle_inline_frames(line)
        elif self.processes and (found := parse_same_stack(line)):
            self.share_stack(found)
        else:
            self.pending_heading = parse_heading(line)

    def _handle_inline_frames(self, line: str) -> None:
        """Take the frames among other words, and the rank before them."""
        if known := parse_inline_heading(line):
            found, line = known
            self.begin_stack(found)
        if frames := parse_inline_frames(line):
            for frame in frames:
                self.add_frame(frame)
            self.processes[-1].threads[-1].outermost |= CALLS.search(line) is not None

    def _handle_mixed_frame(self, match: re.Match[str]) -> None:
        """Take a Python frame among the native ones of gdb."""
        if quoted := QUOTED.match(match.string, match.end()):
            self.crash = None
            self._add_python_frame(quoted)

    def _handle_rank_sentence(self, match: re.Match[str]) -> None:
        """The next stack is that of several ranks."""
        if match["numbers"]:
            titles = [f"{match['kind']} {number}" for number in parse_ranks(match["numbers"])]
        else:
            count = min(int(match["count"] or 2), MOST_WRITTEN)
            titles = [f"Rank {number}" for number in range(count)]
        self.begin_stack(Heading(tuple(titles)))

    def _handle_call_trace(self, match: re.Match[str]) -> None:
        """Follow a trace of calls: at its end, the calls without a return are the stack."""
        called = _make_frame(match["function"], match["file"], match["line"])
        caller = _make_frame(match["caller"], match["caller_file"], match["caller_line"])
        if not self.calls:
            self.add_thread(_ThreadDraft("traced"))
            self.calls = self.processes[-1].threads[-1].frames
        while self.calls and not _is_same_call(self.calls[0], caller):
            self.calls.pop(0)
        if not self.calls:
            self.calls.append(caller)
        if match["way"] == "Call to":
            self.calls.insert(0, called)

    def _handle_header(self, line: str) -> bool:
        """Take a line that begins a process, a thread or a traceback; False if it is none."""
        if heading := _match_header(line):
            take, match = heading
            take(self, match)
        return heading is not None

    def _handle_faulthandler_thread(self, match: re.Match[str]) -> None:
        self.add_thread(
            _ThreadDraft(match["name"] or "", int(match["tid"], 16), is_faulthandler=True)
        )

    def _handle_gdb_thread(self, match: re.Match[str]) -> None:
        self.add_thread(_ThreadDraft(match["name"] or "", int(match["tid"])))

    def _handle_state_thread(self, match: re.Match[str]) -> None:
        self.add_thread(_make_thread_draft(match))

    def _handle_process(self, match: re.Match[str]) -> None:
        self.begin_process(int(match["pid"] or 0), (match["title"] or "").strip())

    def _handle_command(self, match: re.Match[str]) -> None:
        self.begin_process(int(match["pid"] or match["gdb"]), "")

    def _handle_outermost_first(self, _found: re.Match[str]) -> None:
        self.innermost_first = False
        self._begin_crash("")

    def _handle_named_stack(self, match: re.Match[str]) -> None:
        self.innermost_first = True
        self.add_thread(_ThreadDraft(match["name"]))

    def _handle_innermost_first(self, _found: re.Match[str]) -> None:
        self.crash, self.innermost_first = None, True

    def _handle_fatal_error(self, match: re.Match[str]) -> None:
        self.begin_process(0, "")
        self.crashes.append(_CrashDraft(self.owner, match.string))

    def _handle_next_dump(self, _found: re.Match[str]) -> None:
        self.begin_next_dump()

    def _begin_crash(self, error: str) -> None:
        self.crash = _CrashDraft(self.owner, error)
        self.crashes.append(self.crash)

    def _add_python_frame(self, match: re.Match[str]) -> None:
        self.add_frame(_make_frame(match["function"], match["file"], match["line"]))


# What begins a process, a thread or a traceback: the pattern that matches first counts, and it is
# tried where the words before it are in the line.
HEADERS: tuple[tuple[str, re.Pattern[str], Callable[[_StackParser, re.Match[str]], None]], ...] = (
    ("Thread", THREAD, _StackParser._handle_state_thread),
    ("hread 0x", FAULT, _StackParser._handle_faulthandler_thread),
    ("Thread", GDB_THREAD, _StackParser._handle_gdb_thread),
    ("Process", PROCESS, _StackParser._handle_process),
    ("Traceback", LAST, _StackParser._handle_outermost_first),
    ("Traceback", FIRST, _StackParser._handle_innermost_first),
    ("Fatal", FATAL, _StackParser._handle_fatal_error),
    ("stack dump", AGAIN, _StackParser._handle_next_dump),
    ("Timeout", AGAIN, _StackParser._handle_next_dump),
    (" pid ", OUR_PROCESS, _StackParser._handle_process),
    ("VLLM_STACK", FILE, _StackParser._handle_process),
    ("py-spy", COMMAND, _StackParser._handle_command),
    ("gdb", COMMAND, _StackParser._handle_command),
    ("Attaching", COMMAND, _StackParser._handle_command),
    ("Worker", LABEL, _StackParser._handle_process),
    ("EngineCore", LABEL, _StackParser._handle_process),
    ("APIServer", LABEL, _StackParser._handle_process),
    ("DPCoordinator", LABEL, _StackParser._handle_process),
    ("Worker", NAMED, _StackParser._handle_process),
    ("EngineCore", NAMED, _StackParser._handle_process),
    ("APIServer", NAMED, _StackParser._handle_process),
    ("DPCoordinator", NAMED, _StackParser._handle_process),
    ("", RANK, _StackParser._handle_process),
    ("Stack of", STACK_OF, _StackParser._handle_named_stack),
    (": ", OURS, _StackParser._handle_state_thread),
    ("File", GDB_MIXED, _StackParser._handle_mixed_frame),
    (" in ", TRACED, _StackParser._handle_call_trace),
    (":", SAID, _StackParser._handle_rank_sentence),
)


@lru_cache(CACHED)
def _match_header(
    line: str,
) -> tuple[Callable[[_StackParser, re.Match[str]], None], re.Match[str]] | None:
    """What takes a line that begins something, and its match."""
    for words, known, take in HEADERS:
        if words in line and (match := known.match(line)):
            return take, match
    return None


def _make_frame(function: str, file: str, line: str) -> Frame:
    return Frame(function, file, shorten_path(file), int(line) if line.isdigit() else None)


def _is_same_call(frame: Frame, other_frame: Frame) -> bool:
    """Whether two frames of a trace are one call; its line moves on."""
    return (frame.function, frame.file) == (other_frame.function, other_frame.file)


def _make_thread_draft(match: re.Match[str]) -> _ThreadDraft:
    number = match.groupdict().get("tid")
    tid = None if number in {None, "None"} else int(str(number), 0)
    return _ThreadDraft(match["name"] or "", tid, match["state"], bool(match["gil"]))


def shorten_path(file: str) -> str:
    """A path from the package down, as py-spy shortens it."""
    for folder in ("site-packages/", "dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    if match := re.search(r"/lib/python3\.\d+/(.+)$", file):
        return match[1]
    at = file.find("/vllm/")
    return file[at + 1 :] if at >= 0 else file


def _is_main_thread(thread: _ThreadDraft) -> bool:
    outermost = thread.frames[-1].function if thread.frames else ""
    return outermost in {"<module>", "_run_module_as_main", "_main", "spawn_main"}


def _group_into_samples(processes: list[_ProcessDraft]) -> tuple[StacksSnapshot, ...]:
    """Samples of the processes: a process that occurs again belongs to the next sample."""
    samples: list[list[ProcessStacks]] = []
    seen: dict[object, int] = {}
    for process in processes:
        threads = process.parsed_threads or tuple(
            _build_thread(thread) for thread in process.threads
        )
        if not threads:
            continue
        role = str(find_process_role(process.title, threads))
        # Containers have the same pids.
        key = (process.pid, process.title or role) if process.pid or process.title else object()
        index = seen.get(key, 0)
        seen[key] = index + 1
        if index == len(samples):
            samples.append([])
        known = bool(process.parsed_threads) or any(thread.state for thread in process.threads)
        samples[index].append(
            ProcessStacks(
                role=role,
                pid=process.pid,
                create_time=0.0,
                title=parse_process_title(process.title),
                note="" if known else GUESSED,
                threads=threads,
            )
        )
    _drop_truncated_sample(samples)
    return tuple(
        StacksSnapshot(captured_at=0.0, seconds=0.0, options=DumpOptions(), processes=tuple(sample))
        for sample in samples
    )


def _drop_truncated_sample(samples: list[list[ProcessStacks]]) -> None:
    """Remove the last sample if its stacks break off: it shows less than the others."""
    if len(samples) < 2:
        return
    last = samples[-1][-1]
    before = next((p for p in samples[-2] if (p.pid, p.title) == (last.pid, last.title)), None)
    if before and len(last.threads) < len(before.threads):
        samples.pop()


def _build_thread(thread: _ThreadDraft) -> ThreadStack:
    state: Literal["active", "idle"] = "idle" if is_waiting(thread.frames) else "active"
    if thread.state:
        state = "active" if thread.state == "active" else "idle"
    name = thread.name or (f"thread {thread.tid}" if thread.tid is not None else "thread")
    return ThreadStack(name, state, thread.gil, thread.tid, tuple(_sort_innermost_first(thread)))


def _sort_innermost_first(thread: _ThreadDraft) -> list[Frame]:
    """The frames, reversed if known functions, or else arrows, show that the outermost is first."""
    frames = thread.frames
    known = [LEVELS[name] for f in frames if (name := f.function.rpartition(".")[2]) in LEVELS]
    outermost = known[0] < known[-1] if len(known) > 1 else thread.outermost
    return frames[::-1] if outermost else frames


def is_waiting(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frames are those of a thread that waits."""
    if not frames:
        return True
    first = frames[0]
    bare = first.function.rsplit(".", 1)[-1]
    if first.short_file.endswith(".py"):
        return bare in WAITS and first.short_file.rsplit("/", 1)[-1] in STDLIB
    return NATIVE_WAITS.search(bare) is not None


def parse_process_title(title: str) -> str:
    """The title that vLLM gives the process; empty if it can't be known."""
    named = ("VLLM::", *SGLANG)
    word = next((word for word in title.split() if word.startswith(named)), "")
    if match := RANK.match(title):
        return match["title"]
    if word or " " in title or "/" in title:
        return word
    return f"VLLM::{title}" if find_title_role([f"VLLM::{title}"]) else ""


def find_process_role(title: str, threads: tuple[ThreadStack, ...]) -> Role:
    """What a process does in a server, by its title or else by the functions of its threads."""
    for words in (title.split(), [f"VLLM::{title}"]):
        if role := find_title_role(words):
            return role
    if found := next((role for name, role in SGLANG.items() if title.startswith(name)), None):
        return found
    if title == "API server":
        return Role.API
    functions = {frame.function.rsplit(".", 1)[-1] for thread in threads for frame in thread.frames}
    other = Role.API if SERVES.search(title) else Role.OTHER
    return next((role for role, names in ROLES if names & functions), other)
