"""Reads what ``py-spy dump --json`` prints."""

from __future__ import annotations

import sys

import msgspec

from ...model.snapshot_files import DAMAGE
from ...model.stacks import Frame, LocalVariable, ThreadStack
from ...support.errors import VllmopsError


class _PyspyLocal(msgspec.Struct):
    name: str
    arg: bool = False
    repr: str | None = None


class _PyspyFrame(msgspec.Struct):
    name: str
    filename: str
    short_filename: str | None = None
    line: int = 0
    locals: list[_PyspyLocal] | None = None


class _PyspyThread(msgspec.Struct):
    frames: list[_PyspyFrame]
    active: bool
    owns_gil: bool
    thread_name: str | None = None
    os_thread_id: int | None = None


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
THREADS = msgspec.json.Decoder(list[_PyspyThread])


def parse_dump(output: bytes, *, with_locals: bool = False) -> tuple[ThreadStack, ...]:
    """The threads in the output of ``py-spy dump --json``: holder of the GIL, active, idle.

    Raises:
        VllmopsError: ``stacks.unreadable`` if py-spy 0.4 does not print such output.
    """
    try:
        threads = THREADS.decode(output)
    except DAMAGE as error:
        raise VllmopsError(
            "stacks.unreadable",
            f"the output of py-spy has an unknown format: {error}",
            f"{sys.executable} -m pip install 'py-spy>=0.4.1,<0.5'",
        ) from error
    threads.sort(key=lambda t: (not t.owns_gil, not t.active, t.os_thread_id or 0))
    return tuple(
        ThreadStack(
            name=thread.thread_name or f"thread {thread.os_thread_id}",
            state="active" if thread.active else "idle",
            owns_gil=thread.owns_gil,
            tid=thread.os_thread_id,
            frames=tuple(_make_frame(frame, with_locals=with_locals) for frame in thread.frames),
        )
        for thread in threads
    )


def _make_frame(frame: _PyspyFrame, *, with_locals: bool) -> Frame:
    locals_ = (LocalVariable(local.name, local.repr, local.arg) for local in frame.locals or ())
    return Frame(
        function=frame.name,
        file=frame.filename,
        short_file=frame.short_filename or frame.filename,
        line=frame.line or None,
        locals=tuple(locals_) if with_locals else None,
    )
