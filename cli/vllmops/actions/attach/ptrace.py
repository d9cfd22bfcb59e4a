"""ptrace(2), as far as `inject` needs it."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

STOP_S = 1.0  # a thread that waits in the kernel stops at once

# linux/ptrace.h, linux/elf.h
DETACH, SEIZE, INTERRUPT = 17, 0x4206, 0x4207
GETREGSET, SETREGSET, GETSIGMASK = 0x4204, 0x4205, 0x420A
EVENT_STOP = 128
WALL = 0x40000000
NT_PRSTATUS = 1  # the general registers


class BusyError(Exception):
    """The thread does not wait in the kernel, at least not any more."""


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, tid: int, data: Any = None, *, address: int = 0) -> None:
    """Ask the kernel for one step of tracing; raises OSError."""
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def wait_until_stopped(tid: int) -> None:
    """Wait until a traced thread has stopped.

    Raises:
        BusyError: it does not, or is gone.
    """
    deadline = time.monotonic() + STOP_S
    while True:
        pid, status = os.waitpid(tid, WALL | os.WNOHANG)
        if pid and not os.WIFSTOPPED(status):
            raise BusyError(f"thread {tid} is gone")
        if pid and status >> 16 == EVENT_STOP:
            return
        if pid:  # a signal for the thread came first: deliver it
            ptrace(DETACH, tid, os.WSTOPSIG(status))
            raise BusyError(f"thread {tid} got a signal")
        if time.monotonic() > deadline:
            # The tracing ends with this thread.
            raise BusyError(f"thread {tid} did not stop within {STOP_S:g} s")
        time.sleep(0.0002)


def read_registers(tid: int, kind: int, room: int = 1024) -> bytes:
    """A set of registers of a stopped thread, in full.

    Args:
        tid: the thread.
        kind: which set, such as `NT_PRSTATUS`.
        room: bytes to begin with.

    Raises:
        OSError: the machine has no such registers.
    """
    while True:
        buffer = ctypes.create_string_buffer(room)
        vector = Iovec(ctypes.cast(buffer, ctypes.c_void_p), room)
        ptrace(GETREGSET, tid, ctypes.byref(vector), address=kind)
        if vector.length < room:
            return buffer.raw[: vector.length]
        room *= 2  # it may have been cut off


def write_registers(tid: int, content: bytes) -> None:
    """Set the general registers of a stopped thread; raises OSError."""
    buffer = ctypes.create_string_buffer(content, len(content))
    vector = Iovec(ctypes.cast(buffer, ctypes.c_void_p), len(content))
    ptrace(SETREGSET, tid, ctypes.byref(vector), address=NT_PRSTATUS)


def read_signal_mask(tid: int) -> bytes:
    """The signals that a stopped thread has blocked."""
    buffer = ctypes.create_string_buffer(8)
    ptrace(GETSIGMASK, tid, buffer, address=8)
    return buffer.raw
