"""The stacks of all Python threads of this process, for where py-spy can't read them.

Nothing is stopped and nothing is imported: the interpreter itself lists the current frames. A
thread that holds the GIL for good keeps this from answering, as it keeps every agent.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Literal

from ...model import process_identity
from ...model.stacks import AgentStacks, Frame, ProcessStacks, ThreadStack
from ..identity import create_time, detect_role, read_own_identity

MOST_THREADS, MOST_FRAMES = 2000, 1000  # Python's own limit of a recursion is 1000


def observe_stacks() -> AgentStacks:
    """The answer to ``GET /stacks``, without the thread that makes it."""
    known = {thread.ident: thread for thread in threading.enumerate()}
    me = threading.get_ident()
    threads = []
    for ident, frame in islice(sys._current_frames().items(), MOST_THREADS):
        if ident != me:
            thread = known.get(ident)
            tid = thread.native_id if thread else None
            name = thread.name if thread else f"thread {ident}"
            threads.append(
                ThreadStack(name, read_thread_state(tid), False, tid, list_frames(frame))
            )
    threads.sort(key=lambda thread: (thread.state, thread.tid or 0))
    return AgentStacks(
        stacks=ProcessStacks(
            role=detect_role(),
            pid=read_own_identity().pid,
            create_time=create_time(),
            title=read_process_title(),
            source="agent",
            threads=tuple(threads),
        )
    )


def list_frames(frame: FrameType | None) -> tuple[Frame, ...]:
    """The calls of a thread, innermost first."""
    stack: list[Frame] = []
    while frame is not None and len(stack) < MOST_FRAMES:
        code = frame.f_code
        name = code.co_filename
        stack.append(Frame(code.co_qualname, name, shorten_path(name, frame), frame.f_lineno))
        frame = frame.f_back
    return tuple(stack)


def shorten_path(path: str, frame: FrameType) -> str:
    """A file's path from its package down; no look at the disk, which may hang."""
    module = frame.f_globals.get("__name__")
    depth = module.count(".") + 1 if isinstance(module, str) else 1
    parts = path.split("/")
    return "/".join(parts[-depth - (parts[-1] == "__init__.py") :])


def read_thread_state(tid: int | None) -> Literal["active", "idle"]:
    """Whether the kernel runs a thread, or is about to."""
    with suppress(OSError, LookupError):
        if tid is not None and process_identity.read_stat_fields(f"self/task/{tid}")[0] == "R":
            return "active"
    return "idle"


def read_process_title() -> str:
    """The title that vLLM has given this process; empty without one."""
    with suppress(OSError):
        word = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].split(b" ")[0]
        return word.decode(errors="replace") if word.startswith(b"VLLM::") else ""
    return ""
