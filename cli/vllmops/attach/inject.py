"""Makes another process run a line of Python, by way of one thread of it that waits in the kernel.

A debugger's way (gdb, as memray and debugpy use it) stops the whole process while it loads symbols,
for seconds, calls functions on a thread that may hold malloc's lock, and leaves a breakpoint behind
when it is killed in between: the process dies of it. Here one idle thread alone is stopped, for a
millisecond, and made to look as if a signal had come, with a stub as its handler: what it was doing
lies on its stack in a signal frame, the stub takes the GIL, runs the line, gives the GIL back, and
returns through sigreturn(2), which lets the thread go on as it was. All that counts is one
PTRACE_SETREGS: a crash before or after it leaves nothing half-done.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import VllmopsError
from ..host import proc

MACHINE = "x86_64"
STOP_S = 1.0  # a thread that waits in the kernel stops at once

# linux/ptrace.h, linux/elf.h, asm/ucontext.h, asm/sigcontext.h
PTRACE_SETREGS, PTRACE_DETACH = 13, 17
PTRACE_GETREGS, PTRACE_GETREGSET, PTRACE_SEIZE, PTRACE_INTERRUPT = 12, 0x4204, 0x4206, 0x4207
PTRACE_GETSIGMASK = 0x420A
PTRACE_EVENT_STOP = 128
WALL = 0x40000000
NT_X86_XSTATE = 0x202
UC_FLAGS = 1 | 2 | 4  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
NO_SUCH_STACK = 3  # an invalid ss_flags: sigreturn leaves the alternate signal stack as it is
FP_XSTATE_MAGIC1, FP_XSTATE_MAGIC2 = 0x46505853, 0x46505845
FP_SOFTWARE = 464  # where in the state the kernel keeps its own fields
XSTATE_HEADER = 512  # begins with the features that are in use
XSTATE_BYTES = 1 << 16  # to begin with: some 2.7 KB with AVX-512, 11 KB with AMX
# The tiles of AMX, a feature that a process has to ask for. Where it lies is last.
TILES, TILE_BYTES = 1 << 18, 8192
RED_ZONE = 128
INTERRUPTS = 0x202  # eflags as a function finds them
SYSCALL_BYTES = 2
STACK_BYTES = 128 << 10  # what compiling and running a line of Python may take

REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx"),
    *("rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base"),
    *("ds", "es", "fs", "gs"),
)
SAVED = (
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx"),
    *("rax", "rcx", "rsp", "rip", "eflags"),
)

# What a restarted system call leaves in rax, and the two calls that restart invisibly.
ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK = -512, -513, -514, -516
RESTARTED = (ERESTARTSYS, ERESTARTNOINTR)
INTERRUPTED = (ERESTARTNOHAND, ERESTART_RESTARTBLOCK)

# System calls in which a thread waits for something to happen, and holds no lock of malloc's or
# the loader's: poll, select, nanosleep, clock_nanosleep, epoll_wait, pselect6, ppoll, epoll_pwait.
FUTEX = 202
WAITS = frozenset({7, 23, 35, 230, 232, 270, 271, 281})
FUTEX_WAIT, FUTEX_WAIT_BITSET, FUTEX_COMMAND = 0, 9, 0x7F
LOCKED_AND_WAITED_FOR = 2  # how glibc's own locks wait: whoever does may be inside malloc

SYMBOLS = ("PyGILState_Ensure", "PyRun_SimpleString", "PyGILState_Release")
# call *%r12; mov %eax,%ebp; mov %rbx,%rdi; call *%r13; mov %ebp,%edi; call *%r14;
# mov $15 (rt_sigreturn),%eax; syscall
STUB = bytes.fromhex("41ffd4 89c5 4889df 41ffd5 89ef 41ffd6 b80f000000 0f05")
# How a program's entry begins: endbr64, or xor %ebp,%ebp, or xor %rbp,%rbp; or, after an earlier
# attach, our stub.
ENTRIES = (bytes.fromhex("f30f1efa"), bytes.fromhex("31ed"), bytes.fromhex("4831ed"), STUB)


class Registers(ctypes.Structure):
    """``struct user_regs_struct``; fields take and give them as unsigned."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in REGISTERS)


class BusyError(Exception):
    """The thread does not wait in the kernel, at least not any more."""


@dataclass(frozen=True)
class Mapping:
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    offset: int
    path: str


@dataclass(frozen=True)
class Target:
    """A process that runs Python.

    Args:
        pid: process id.
    """

    pid: int

    def maps(self) -> Iterator[Mapping]:
        """Its mappings, lowest first."""
        for line in proc.text(proc.folder(self.pid) / "maps").splitlines():
            span, _, offset, _, _, *path = line.split(maxsplit=5)
            start, _, end = span.partition("-")
            yield Mapping(int(start, 16), int(end, 16), int(offset, 16), "".join(path))

    @cached_property
    def entry(self) -> int:
        """Its program's entry point: code that never runs again, so the stub can replace it."""
        program = os.readlink(f"/proc/{self.pid}/exe")
        with Elf(Path(f"/proc/{self.pid}/exe")) as elf:
            return elf.entry + self.bias(program, elf)

    @cached_property
    def functions(self) -> tuple[int, ...]:
        """The addresses of `SYMBOLS`.

        Raises:
            VllmopsError: ``attach.not-python``.
        """
        program = os.readlink(f"/proc/{self.pid}/exe")
        libraries = dict.fromkeys(
            part.path for part in self.maps() if Path(part.path).name.startswith("libpython")
        )
        for path in (*libraries, program):
            inside = Path(f"/proc/{self.pid}/exe" if path == program else self.seen(path))
            with suppress(OSError), Elf(inside) as elf:
                found = [elf.symbol(name) for name in SYMBOLS]
                if None not in found:
                    bias = self.bias(path, elf)
                    return tuple(address + bias for address in found if address is not None)
        raise VllmopsError(
            "attach.not-python",
            f"no usable Python symbols in pid {self.pid}: it runs no Python, or its files were "
            "replaced after it started",
            "vllmops restart, when the server can be interrupted",
        )

    def seen(self, path: str) -> str:
        """A path as the process sees it, which may be in a container."""
        return f"/proc/{self.pid}/root{path}"

    def bias(self, path: str, elf: Elf) -> int:
        """How far from its own addresses a file was loaded."""
        return next(m.start for m in self.maps() if m.path == path and not m.offset) - elf.base

    def room(self, stack_pointer: int) -> int:
        """Bytes below a stack pointer that belong to the stack."""
        for part in self.maps():
            if part.start <= stack_pointer < part.end:
                # The main thread's grows as it is used.
                return stack_pointer - part.start + (STACK_BYTES if part.path == "[stack]" else 0)
        return 0

    def idle(self, tid: int) -> bool:
        """Whether a thread waits in a system call in which it holds no lock of the C library's.

        Raises:
            PermissionError: the kernel does not allow it.
        """
        try:
            words = proc.text(proc.folder(self.pid) / f"task/{tid}/syscall").split()
        except PermissionError:
            raise
        except OSError:
            return False  # gone meanwhile
        if not words or not words[0].isdecimal():
            return False
        return _harmless(int(words[0]), int(words[2], 16), int(words[3], 16))

    def tids(self) -> list[int]:
        """The ids of its threads, the main one first."""
        return sorted(int(name) for name in os.listdir(f"/proc/{self.pid}/task"))


class Elf:
    """The parts of an ELF file that are needed."""

    def __init__(self, path: Path) -> None:
        from elftools.elf.elffile import ELFFile  # noqa: PLC0415

        self.file = path.open("rb")
        self.elf = ELFFile(self.file)

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def entry(self) -> int:
        return int(self.elf.header["e_entry"])

    @property
    def base(self) -> int:
        """The address of its first byte, as it was linked."""
        first = next(self.elf.iter_segments("PT_LOAD"))
        return int(first["p_vaddr"]) - int(first["p_offset"])

    def symbol(self, name: str) -> int | None:
        """The address of a symbol that it offers to others, by their hash table: they are many."""
        from elftools.elf.hash import ELFHashSection, GNUHashSection  # noqa: PLC0415

        for section in map(self.elf.get_section_by_name, (".gnu.hash", ".hash")):
            if isinstance(section, (GNUHashSection, ELFHashSection)):
                found = section.get_symbol(name)
                return (int(found["st_value"]) or None) if found else None
        return None


def supported() -> bool:
    """Whether this method works on this machine's processor."""
    return platform.machine() == MACHINE


def inject(target: Target, tid: int, code: str) -> float:
    """Make a waiting thread run a line of Python as soon as it has the GIL; does not wait for it.

    Call it in a thread of its own: the kernel lets go of what a thread traces once that ends.

    Args:
        target: the process.
        tid: one of its threads, `Target.idle`.
        code: Python source; what it raises is printed on the process's stderr.

    Returns:
        Seconds for which the thread was stopped.

    Raises:
        BusyError: the thread does not wait in the kernel, or waits for what may be a lock of the C
            library's, or has no free stack, or is gone.
        PermissionError: the kernel does not allow it.
        VllmopsError: ``attach.not-python`` or ``attach.unknown-program``.
    """
    entry, functions = target.entry, target.functions
    _check(target)
    try:
        return _inject(target, tid, code, entry, functions)
    except (ProcessLookupError, FileNotFoundError) as error:
        # The stopped thread ended with it.
        raise BusyError(f"thread {tid} is gone") from error


def _inject(target: Target, tid: int, code: str, entry: int, functions: tuple[int, ...]) -> float:
    _ptrace(PTRACE_SEIZE, tid)
    began = time.monotonic()
    _ptrace(PTRACE_INTERRUPT, tid)
    _stopped(tid)
    try:
        registers = Registers()
        _ptrace(PTRACE_GETREGS, tid, ctypes.byref(registers))
        # Only now does it stay as it is: since somebody looked it may have gone on to wait for
        # something else.
        if not _harmless(registers.orig_rax, registers.rsi, registers.rdx):
            raise BusyError(f"thread {tid} no longer waits, or waits for a lock")
        if target.room(registers.rsp) < STACK_BYTES:
            raise BusyError(f"the stack of thread {tid} is too small")
        place, frame, argument = _frame(tid, registers, code.encode() + b"\0")
        with open(f"/proc/{target.pid}/task/{tid}/mem", "r+b", buffering=0) as memory:
            for content, address in ((frame, place), (STUB, entry)):
                if os.pwrite(memory.fileno(), content, address) != len(content):
                    raise BusyError(f"the stack of thread {tid} has no free space")
        stub = Registers.from_buffer_copy(registers)
        stub.rip, stub.rsp, stub.eflags = entry, place, INTERRUPTS
        stub.orig_rax = -1  # nothing is to be restarted
        stub.rbx, (stub.r12, stub.r13, stub.r14) = argument, functions
        _ptrace(PTRACE_SETREGS, tid, ctypes.byref(stub))
    finally:
        with suppress(OSError):
            _ptrace(PTRACE_DETACH, tid)
    return time.monotonic() - began


def _harmless(number: int, operation: int, value: int) -> bool:
    """Whether a thread in a system call holds no lock of the C library's.

    Args:
        number: of the system call.
        operation: its second argument.
        value: its third argument, of which a futex has 32 bits.
    """
    if number != FUTEX:
        return number in WAITS
    command = operation & FUTEX_COMMAND
    return command in (FUTEX_WAIT, FUTEX_WAIT_BITSET) and value & 0xFFFFFFFF != (
        LOCKED_AND_WAITED_FOR
    )


def _check(target: Target) -> None:
    """Raise unless the program begins as programs do, and signal frames are taken as they are."""
    with open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory:
        there = os.pread(memory.fileno(), len(STUB), target.entry)
    status = proc.text(proc.folder(target.pid) / "status")
    if not there.startswith(ENTRIES) or "shstk" in status:
        raise VllmopsError(
            "attach.unknown-program",
            f"the program of pid {target.pid} starts in an unknown way or uses a shadow stack: "
            "a change would not be safe",
            "vllmops restart, when the server can be interrupted",
        )


def _stopped(tid: int) -> None:
    """Wait until a traced thread has stopped."""
    deadline = time.monotonic() + STOP_S
    while True:
        pid, status = os.waitpid(tid, WALL | os.WNOHANG)
        if pid and not os.WIFSTOPPED(status):
            raise BusyError(f"thread {tid} is gone")
        if pid and status >> 16 == PTRACE_EVENT_STOP:
            return
        if pid:  # a signal for the thread came first: deliver it
            _ptrace(PTRACE_DETACH, tid, os.WSTOPSIG(status))
            raise BusyError(f"thread {tid} got a signal")
        if time.monotonic() > deadline:
            # The tracing ends with this thread.
            raise BusyError(f"thread {tid} did not stop within {STOP_S:g} s")
        time.sleep(0.0002)


def _frame(tid: int, registers: Registers, argument: bytes) -> tuple[int, bytes, int]:
    """The signal frame, with the argument above it.

    Returns:
        Its address (where the stub's stack begins), its content, and the argument's address.
    """
    state = _float_state(tid)
    top = registers.rsp - RED_ZONE - len(argument)
    state_at = (top - len(state)) & ~63
    header = struct.calcsize("<QQQiiQ")
    size = header + 8 * len(SAVED) + struct.calcsize("<4H5Q8QQ")
    place = (state_at - size) & ~15
    back = _resumed(registers)
    content = b"".join(
        (
            struct.pack("<QQQiiQ", UC_FLAGS, 0, 0, NO_SUCH_STACK, 0, 0),
            struct.pack(f"<{len(SAVED)}Q", *(getattr(back, name) for name in SAVED)),
            struct.pack("<4H", registers.cs, 0, 0, registers.ss),
            struct.pack("<5Q8Q", 0, 0, 0, 0, state_at, *[0] * 8),
            _mask(tid),
        )
    )
    content = content.ljust(state_at - place, b"\0") + state
    return place, content.ljust(top - place, b"\0") + argument, top


def _resumed(registers: Registers) -> Registers:
    """The registers with which the thread goes on: in its system call anew, or with EINTR."""
    back = Registers.from_buffer_copy(registers)
    left = ctypes.c_int64(registers.rax).value
    if left in RESTARTED:
        back.rax, back.rip = registers.orig_rax, registers.rip - SYSCALL_BYTES
    elif left in INTERRUPTED:
        back.rax = -errno.EINTR
    return back


def _float_state(tid: int) -> bytes:
    """The floating-point and vector registers, as they lie in a signal frame."""
    return _framed(_extended_state(tid))


def _extended_state(tid: int, room: int = XSTATE_BYTES) -> bytes:
    """The same registers in full, as ptrace(2) gives them.

    Args:
        tid: the thread.
        room: bytes to begin with.
    """
    while True:
        buffer = ctypes.create_string_buffer(room)
        vector = _Iovec(ctypes.cast(buffer, ctypes.c_void_p), room)
        _ptrace(PTRACE_GETREGSET, tid, ctypes.byref(vector), address=NT_X86_XSTATE)
        if vector.length < room:
            return buffer.raw[: vector.length]
        room *= 2  # it may have been cut off


def _framed(given: bytes) -> bytes:
    """An extended state with what the kernel wants to find in a signal frame.

    Where the processor has AMX, ptrace(2) gives everybody's tiles, but a frame that has them is too
    large for a thread that has not asked for AMX: of such a frame sigreturn(2) takes nothing beyond
    the SSE registers. A thread that uses no tiles needs none, whether it has asked or not.

    Raises:
        BusyError: the tiles don't lie where they are known to.
    """
    state = bytearray(given)
    (features,) = struct.unpack_from("<Q", state, FP_SOFTWARE)
    (used,) = struct.unpack_from("<Q", state, XSTATE_HEADER)
    if features & TILES and not used & TILES:
        if any(state[-TILE_BYTES:]):
            raise BusyError("the layout of its registers is unknown")
        del state[-TILE_BYTES:]
        features &= ~TILES
    size = len(state)
    struct.pack_into(
        "<IIQI7I", state, FP_SOFTWARE, FP_XSTATE_MAGIC1, size + 4, features, size, *[0] * 7
    )
    return bytes(state) + struct.pack("<I", FP_XSTATE_MAGIC2)


def _mask(tid: int) -> bytes:
    """The signals that a thread has blocked."""
    buffer = ctypes.create_string_buffer(8)
    _ptrace(PTRACE_GETSIGMASK, tid, buffer, address=8)
    return buffer.raw


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int, data: Any = None, *, address: int = 0) -> None:
    """ptrace(2); raises OSError."""
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
