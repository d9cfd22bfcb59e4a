"""The stacks of every process of a server at one moment."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from .agent_state import AgentAnswer
from .ranks import Placement

SCHEMA = 1


class LocalVariable(msgspec.Struct, frozen=True):
    """A local variable, as py-spy prints it (cut to some 100 characters).

    Args:
        name: the variable.
        value: its repr, None if py-spy makes none.
        argument: whether it is one of the function's parameters.
    """

    name: str
    value: str | None
    argument: bool


class Frame(msgspec.Struct, frozen=True):
    """One call, Python or native.

    Args:
        function: qualified name where the Python version tells it.
        file: full path in the process's own file system; the library for a native frame.
        short_file: the path from the package down, such as ``vllm/v1/engine/core.py``.
        line: line number, None if unknown, as in native code without debug information.
        locals: None unless they were asked for.
    """

    function: str
    file: str
    short_file: str
    line: int | None = None
    locals: tuple[LocalVariable, ...] | None = None


class ThreadStack(msgspec.Struct, frozen=True):
    """One Python thread.

    Args:
        name: as the program set it, ``thread TID`` where it has none.
        state: ``active`` if it was on a processor, or about to be.
        owns_gil: whether it held the global interpreter lock.
        tid: the kernel's thread id; the main thread's is the pid.
        frames: innermost first.
    """

    name: str
    state: Literal["active", "idle"]
    owns_gil: bool
    tid: int | None
    frames: tuple[Frame, ...]


class StacksGap(msgspec.Struct, frozen=True):
    """Why a process has no stacks: a stable code, what is wrong, and a hint."""

    code: str
    message: str
    hint: str = ""


class ProcessStacks(Placement, frozen=True, kw_only=True, dict=True):
    """The threads of one process, or why they could not be read.

    Args:
        role: as `vllmops.model.roles.Role`.
        pid: process id.
        create_time: seconds since the epoch; with the pid it is the process's identity.
        title: the title vLLM gave it, such as ``VLLM::Worker_TP1``; empty for a plain command
            line, which may hold keys.
        seconds: how long it took.
        note: what a reader must know about the capture; empty if all went as requested.
        source: what read the stacks: ``py-spy`` from outside, or the process's own ``agent``,
            which sees Python frames alone and does not know who holds the GIL, or ``pystack``
            from a core file.
        instead: why py-spy did not read them, if the agent did in its place.
        threads: the most informative first: holder of the GIL, active, idle.
        stopped: whether a signal had stopped it.
        error: None if the process was dumped.
    """

    role: str
    pid: int
    create_time: float
    title: str = ""
    seconds: float = 0.0
    note: str = ""
    source: Literal["py-spy", "agent", "pystack"] = "py-spy"
    instead: StacksGap | None = None
    threads: tuple[ThreadStack, ...] = ()
    stopped: bool = False
    error: StacksGap | None = None

    @cached_property
    def has_main_thread(self) -> bool:
        """Whether a thread has the name of Python's main one."""
        return any(thread.name == "MainThread" for thread in self.threads)


class AgentStacks(AgentAnswer, frozen=True, kw_only=True):
    """An agent's own view of its process."""

    stacks: ProcessStacks


class DumpOptions(msgspec.Struct, frozen=True):
    """How to dump.

    Args:
        locals: with local variables, which may be prompts and keys.
        native: with the frames of C, C++ and Cython.
        nonblocking: without stopping the process.
    """

    locals: bool = False
    native: bool = False
    nonblocking: bool = False


class StacksSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of all processes of a server.

    Args:
        schema: of this type.
        captured_at: seconds since the epoch, at the start.
        seconds: how long it took.
        server: the instance's name, None for one that vllmops did not start.
    """

    kind: Literal["stacks"] = "stacks"
    schema: int = SCHEMA
    captured_at: float
    seconds: float
    server: str | None = None
    options: DumpOptions
    processes: tuple[ProcessStacks, ...]
