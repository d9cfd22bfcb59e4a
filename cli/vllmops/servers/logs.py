"""A server's log: follow it, rotate it, and read stages and causes from it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..model.roles import Role
from ..support.errors import VllmopsError
from ..support.files import ANYBODY, open_regular_file
from ..support.numbers import parse_whole_number
from .record import Failure

LIMIT = "VLLMOPS_LOG_MAX_BYTES"
LIMIT_BYTES = 64 << 20
FIRST_WAIT_S, LAST_WAIT_S = 5.0, 300.0  # between tries to rotate
CHUNK_BYTES = 1 << 20

STAGES = (
    *("launching", "launched", "loading weights", "compiling", "profiling", "warming up"),
    "ready",
)

LINE = re.compile(
    r"^\((?P<process>[\w.-]+) pid=(?P<pid>\d+)\) (?:(?P<level>[A-Z]+) \S+ \S+ \[[^]]*\] ?)?"
)
# A watch writes to the server's log under this name.
WATCH = "Watch"
UVICORN = re.compile(r"^(INFO|WARNING|ERROR):\s")
NAMES = {
    Role.API: ("APIServer", "ApiServer"),
    Role.ENGINE: ("EngineCore",),
    Role.WORKER: ("Worker", "VllmWorker"),
}

SIGNS = {
    "loading weights": re.compile(
        r"Starting to load model|Loading (model )?(weights|from scratch)|Loading safetensors"
    ),
    "compiling": re.compile(r"for vLLM's torch.compile|Dynamo bytecode transform"),
    "profiling": re.compile(r"KV cache (size|layout|memory)|for KV cache|[Mm]emory profiling"),
    "warming up": re.compile(r"Warming up|Capturing CUDA graph|Graph capturing|init engine \("),
}

RAISED = re.compile(r"^[\w.]*[A-Z]\w*(?:: |$)")
USAGE_ERROR = re.compile(r"^[\w.]+: error: (?P<message>.+)")
# A parent's report of a child's failure, or a survivor's of the engine's: never the cause.
ECHOES = re.compile(
    r"initialization failed|[Rr]oot cause|EngineDeadError|EngineCore encountered an issue"
    r"|Executor failed|CancelledError|RuntimeError: cancelled|KeyboardInterrupt: terminated"
    r"|^SystemExit"
    # vLLM looks for processes that it ends, and some of them have ended.
    r"|^psutil\.(?:NoSuchProcess|ZombieProcess)"
)
# In the line above a traceback: vLLM goes on without a plug-in, and Python ends all the same.
NO_CAUSE = re.compile(r"Failed to load plugin|^Exception ignored in: ")
# In its first frame: the tracker of shared memory misses what another process has removed.
TRACKER = re.compile(r"multiprocessing/resource_tracker\.py\"")
# A signal has no traceback; the executor is the one who sees the worker's exit code.
WORKER_DIED = re.compile(
    r"Worker proc (?P<name>\S+) died unexpectedly \(exit code: -(?P<signal>\d{1,3})\)"
)
# Ray says so in the log of each program that uses it.
NODE_LOST = re.compile(r"and node name: (?P<name>\S+) has been marked dead")
PYDANTIC_TAIL = re.compile(r"\s*\[type=.*$", re.DOTALL)

HINTS = (
    (
        re.compile(r"torchvision::nms|libc10_cuda|libnvrtc|libtorchaudio"),
        "the index's CUDA builds don't go with a CPU torch:"
        " pip uninstall -y torchvision torchaudio torchcodec",
    ),
    (
        re.compile(r"unrecognized arguments|expected one argument|invalid choice|argument -"),
        "arguments after -- go to vLLM: see `vllm serve --help=all`",
    ),
    (
        re.compile(r"out of memory|OutOfMemory", re.IGNORECASE),
        "use less memory: -- --gpu-memory-utilization 0.8, or a smaller --max-model-len",
    ),
    (
        re.compile(r"Free memory on device .* is less than desired"),
        "another process has its memory: nvidia-smi shows which; or use less:"
        " -- --gpu-memory-utilization 0.8",
    ),
    (
        re.compile(r"estimated maximum model length is \d|larger than the available KV cache"),
        "use a smaller -- --max-model-len, or give it more: -- --gpu-memory-utilization 0.95",
    ),
    (re.compile(r"[Aa]ddress already in use"), "use another port: vllmops serve --port N"),
    (
        re.compile(r"Repo id must be|not a valid model identifier|LocalEntryNotFound|OfflineMode"),
        "MODEL is a directory with a config.json, or a hub id such as Qwen/Qwen3-0.6B",
    ),
)


@dataclass(frozen=True)
class LogLine:
    """One line of the log, its prefix taken off.

    Args:
        process: as the prefix names it (``EngineCore``, ``Worker_TP0``), empty if none does.
        level: ``INFO`` …, empty if the line has none.
        text: what is left.
    """

    process: str
    level: str
    text: str


def parse_line(raw: str) -> LogLine:
    raw = raw.rstrip("\r\n")  # vLLM ends all but the last line of a message with both
    match = LINE.match(raw)
    if not match:
        return LogLine("", "", raw)
    return LogLine(match["process"], match["level"] or "", raw[match.end() :])


def parse_line_role(raw: str) -> Role | None:
    """Whose line it is, None if the line does not say (a library's own print)."""
    process = parse_line(raw).process
    for role, names in NAMES.items():
        if process.startswith(names):
            return role
    return Role.API if UVICORN.match(raw) else None


def parse_stage(raw: str) -> str | None:
    """The stage that a line of the log announces, None for most lines."""
    line = parse_line(raw)
    if line.level != "INFO":
        return None
    return next((name for name, sign in SIGNS.items() if sign.search(line.text)), None)


def find_failure(raw_lines: Iterable[str], *, echoes: bool = False) -> Failure | None:
    """Why a server failed, by the log's last lines: the last error that does not repeat another.

    Args:
        raw_lines: the log.
        echoes: whether what parents say of their children ("Engine core initialization failed. See
            root cause above") counts if there is no other error.
    """
    causes = list(find_errors([parse_line(raw) for raw in raw_lines]))
    own = [cause for cause in causes if not ECHOES.search(cause.cause)]
    return next(reversed(own or (causes if echoes else [])), None)


def find_lost_node(raw_lines: Iterable[str]) -> str | None:
    """The name of the node of Ray's cluster that is gone, None if there is none."""
    return next((match["name"] for raw in raw_lines if (match := NODE_LOST.search(raw))), None)


def find_errors(lines: Sequence[LogLine]) -> Iterator[Failure]:
    """Every exception of a traceback, and every complaint of an argument parser, in order."""
    for index, line in enumerate(lines):
        if usage := USAGE_ERROR.match(line.text):
            yield make_failure(usage["message"], line.process)
        if death := WORKER_DIED.search(line.text):
            name = get_signal_name(int(death["signal"]))
            yield make_failure(f"{death['name']} was killed by {name}", death["name"])
        if line.level == "WARNING" or "Traceback (most recent call last)" not in line.text:
            continue
        same = [other for other in lines[index + 1 :] if other.process == line.process]
        if index and NO_CAUSE.search(lines[index - 1].text):
            continue
        if same and TRACKER.search(same[0].text):
            continue
        if any("direct cause of the following" in o.text for o in lines[max(0, index - 2) : index]):
            continue  # what was raised first is the cause
        for number, other in enumerate(same):
            if other.text[:1] not in {" ", "\t", ""}:
                if RAISED.match(other.text):
                    yield make_failure(join_message(other.text, same[number + 1 :]), line.process)
                break


def get_signal_name(number: int) -> str:
    """The name of a signal; most of the real-time ones have none, nor what a client wrote."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def join_message(first_line: str, following: Sequence[LogLine]) -> str:
    """An exception's message with its further lines, as pydantic writes them."""
    text = [first_line]
    for line in following:
        if not line.text.startswith("  ") or line.text.lstrip().startswith(
            ("File ", "For further")
        ):
            break
        text.append(line.text.strip())
    return PYDANTIC_TAIL.sub("", " ".join(text)).strip()


def make_failure(cause: str, process: str) -> Failure:
    hint = next((hint for sign, hint in HINTS if sign.search(cause)), "")
    return Failure(cause=cause, process=process, hint=hint)


class LogTail:
    """Reads what was added to a log since the last time, over rotations."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.partial_line = b""
        self.rotated_inode = read_inode(get_part_path(path, 1))

    def read_new_lines(self, *, ended: bool = False) -> list[str]:
        """Complete lines since the last call; one of more than `CHUNK_BYTES` comes in parts.

        Args:
            ended: whether nobody writes any more: then the last line needs no newline.
        """
        added = b""
        now = read_inode(get_part_path(self.path, 1))
        with contextlib.suppress(OSError):
            if now != self.rotated_inode and now is not None:  # rotated
                with open_log(get_part_path(self.path, 1)) as file:
                    file.seek(self.offset)
                    added = file.read()
            with open_log(self.path) as file:
                if now != self.rotated_inode or os.fstat(file.fileno()).st_size < self.offset:
                    self.offset = 0
                self.rotated_inode = now
                file.seek(self.offset)
                fresh = file.read()
                self.offset += len(fresh)
                added += fresh
        *complete, self.partial_line = (self.partial_line + added).split(b"\n")
        if self.partial_line and (ended or len(self.partial_line) > CHUNK_BYTES):
            complete.append(self.partial_line)
            self.partial_line = b""
        return [line.decode(errors="replace") for line in complete]

    def read_backwards(self, *, ended: bool = False) -> Iterator[str]:
        """Lines up to now, the last one first; `read_new_lines` gives those that follow.

        Args:
            ended: as for `read_new_lines`.
        """
        unfinished, rest = True, b""
        for block in self.read_blocks_backwards():
            rest, *lines = (block + rest).split(b"\n")
            if unfinished and lines:
                unfinished, self.partial_line = False, lines.pop()
                if ended and self.partial_line:
                    lines.append(self.partial_line)
                    self.partial_line = b""
            yield from (line.decode(errors="replace") for line in reversed(lines))
        if not unfinished or (ended and rest):
            yield rest.decode(errors="replace")
        else:
            self.partial_line = rest

    def read_blocks_backwards(self) -> Iterator[bytes]:
        """The log up to now and its rotated parts, in blocks from the end."""
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            parts: list[tuple[IO[bytes], int]] = []
            with contextlib.suppress(OSError):
                while True:
                    place = get_part_path(self.path, len(parts)) if parts else self.path
                    file = stack.enter_context(open_log(place))
                    parts.append((file, file.seek(0, os.SEEK_END)))
            self.offset = parts[0][1] if parts else 0
            for file, size in parts:
                for end in range(size, 0, -CHUNK_BYTES):
                    start = file.seek(max(end - CHUNK_BYTES, 0))
                    yield file.read(end - start)


def open_log(path: Path, process_uid: int | None = None) -> IO[bytes]:
    """A log: this user's own, or what a process writes to, by the kernel's link in ``/proc``.

    Args:
        path: its name.
        process_uid: the uid of that process. A file of another user's than that is not read: root
            would show what the process itself may not read.

    Raises:
        OSError: as `open_regular_file` does.
    """
    if process_uid is None:
        return open(open_regular_file(path), "rb")
    owner = ANYBODY if process_uid == os.geteuid() else process_uid
    return open(open_regular_file(path, owner, follow=True), "rb")


def read_first_lines(
    path: Path, *, lines: int, limit: int, process_uid: int | None = None
) -> list[str]:
    """The first lines of a log, from its oldest part; arguments as for `read_last_lines`."""
    number = 1
    while get_part_path(path, number).exists():
        number += 1
    oldest = get_part_path(path, number - 1) if number > 1 else path
    try:
        with open_log(oldest, process_uid) as file:
            content = file.read(limit)
    except OSError:
        return []
    # Not all of it in lines: there may be a million.
    content = b"\n".join(content.split(b"\n", lines)[:lines])
    return content.decode(errors="replace").splitlines()[:lines]


def read_last_lines(
    path: Path, *, lines: int, limit: int, process_uid: int | None = None
) -> list[str]:
    """The last lines of a log, its rotated parts included.

    Args:
        path: the log; one that is not there has no lines.
        lines: how many, at most.
        limit: bytes to read, at most; a line that is cut off by it is left out.
        process_uid: as for `open_log`.
    """
    content, number, place = b"", 0, path
    while len(content) < limit and content.count(b"\n") <= lines:
        try:
            with open_log(place, process_uid) as file:
                size = file.seek(0, os.SEEK_END)
                start = max(size - (limit - len(content)), 0)
                file.seek(start)
                content = file.read(size - start) + content
        except OSError:
            break
        if start:
            content = content.partition(b"\n")[2]
            break
        number += 1
        place = get_part_path(path, number)
    # Not all of it in lines: there may be a million.
    content = b"\n".join(content.rsplit(b"\n", lines + 1)[-lines - 1 :])
    return content.decode(errors="replace").splitlines()[-lines:]


def read_inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def read_size_limit() -> int:
    """Bytes after which a log is rotated, by the environment.

    Raises:
        VllmopsError: ``usage``.
    """
    text = os.environ.get(LIMIT)
    try:
        return parse_whole_number(text, 1) if text else LIMIT_BYTES
    except ValueError as error:
        raise VllmopsError("usage", f"{LIMIT}: {error}", f"export {LIMIT}={LIMIT_BYTES}") from error


class LogRotation:
    """Keeps a log in bounds; where it can't, on a full disk say, it tries again ever less often.

    Args:
        path: the log.
        limit: bytes that it may have.
        keep: how many parts of that size are kept beside it.
    """

    def __init__(self, path: Path, *, limit: int, keep: int) -> None:
        self.path = path
        self.limit = limit
        self.keep = keep
        self.due = 0.0  # monotonic
        self.wait_s = FIRST_WAIT_S
        repair_rotation(path, keep)

    def rotate_if_due(self) -> str:
        """Rotate if it is time to; returns a new problem as text, or an empty string."""
        now = time.monotonic()
        if now < self.due:
            return ""
        try:
            rotate_log(self.path, limit=self.limit, keep=self.keep)
        except OSError as error:
            first = self.wait_s == FIRST_WAIT_S
            self.due, self.wait_s = now + self.wait_s, min(2 * self.wait_s, LAST_WAIT_S)
            return f"{self.path.name} is not rotated: {error.strerror}" if first else ""
        self.wait_s = FIRST_WAIT_S
        return ""


def rotate_log(path: Path, *, limit: int, keep: int) -> bool:
    """Move a log over ``limit`` bytes aside, to ``.1`` … ``.keep``; returns whether it did.

    The server has the file open for appending, so it is copied and truncated, not renamed: a
    pipe into a supervisor would lose every line, and block the server, once that dies.

    Raises:
        OSError: it can't be done; all is as it was.
    """
    try:
        if path.stat().st_size <= limit:
            return False
    except FileNotFoundError:
        return False
    copy = get_copy_path(path)
    with path.open("rb+") as log:  # what can't be truncated is not copied either
        size = os.fstat(log.fileno()).st_size
        if shutil.disk_usage(path.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            with copy.open("wb") as file:
                shutil.copyfileobj(log, file, CHUNK_BYTES)
            shift_parts(path, keep)
            with copy.open("ab") as file:  # what came meanwhile
                shutil.copyfileobj(log, file, CHUNK_BYTES)
            copy.replace(get_part_path(path, 1))
            os.truncate(log.fileno(), 0)
        except OSError:
            repair_rotation(path, keep)
            raise
    return True


def repair_rotation(path: Path, keep: int) -> None:
    """Clean up after an interrupted rotation: no part twice, no gap in the numbers."""
    with contextlib.suppress(OSError):
        get_copy_path(path).unlink(missing_ok=True)
        if starts_with_part(path, get_part_path(path, 1)):
            get_part_path(path, 1).unlink()
        parts = [
            part for number in range(1, keep + 1) if (part := get_part_path(path, number)).exists()
        ]
        for number, part in enumerate(parts, 1):
            if part != get_part_path(path, number):
                part.replace(get_part_path(path, number))


def starts_with_part(path: Path, part: Path) -> bool:
    """Whether a log still has all of what was copied from it."""
    try:
        with (
            open(open_regular_file(path), "rb") as log,
            open(open_regular_file(part), "rb") as copy,
        ):
            if not 0 < os.fstat(copy.fileno()).st_size <= os.fstat(log.fileno()).st_size:
                return False
            while chunk := copy.read(CHUNK_BYTES):
                if log.read(len(chunk)) != chunk:
                    return False
    except OSError:
        return False
    return True


def start_new_log(path: Path) -> None:
    """Put the log of an earlier run aside, as ``.previous``, before a new one starts."""
    number = 1
    while get_part_path(path, number).exists():
        get_part_path(path, number).unlink()
        number += 1
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"{path.name}.previous"))


def shift_parts(path: Path, keep: int) -> None:
    get_part_path(path, keep).unlink(missing_ok=True)
    for number in range(keep - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            get_part_path(path, number).replace(get_part_path(path, number + 1))


def get_copy_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.copy")


def get_part_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
