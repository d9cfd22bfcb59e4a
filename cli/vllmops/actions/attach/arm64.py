"""What `inject` has to know of aarch64: asm/ptrace.h, asm/ucontext.h, asm/sigcontext.h.

A thread that waits in a system call has no vector registers beyond those of Advanced SIMD: the
kernel discards what SVE and SME add when a system call begins.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from contextlib import suppress

from . import ptrace
from .ptrace import BusyError

NT_FPREGSET, NT_ARM_GCS = 2, 0x410
NO_SUCH_STACK = 3  # an invalid ss_flags: sigreturn leaves the alternate signal stack as it is
# Of a signal frame: siginfo, then ucontext; in that the signal mask and the machine's context; in
# that the records of further registers. All as offsets.
CONTEXT, MASK, MACHINE, RECORDS, FRAME_BYTES = 128, 40, 176, 176 + 288, 128 + 176 + 288 + 4096
FPSIMD_MAGIC, VECTORS_BYTES = 0x46508001, 512
BRANCH_TYPE = 0b11 << 10  # of pstate: how the last branch was made
SVC = bytes.fromhex("010000d4")

# pselect6, ppoll, epoll_pwait, nanosleep, clock_nanosleep, epoll_pwait2
WAITS = frozenset({72, 73, 22, 101, 115, 441})
FUTEX = 98

# blr x20; mov w23,w0; mov x0,x19; blr x21; mov w0,w23; blr x22; mov x8,#139 (rt_sigreturn); svc #0
STUB = bytes.fromhex("80023fd6 f703002a e00313aa a0023fd6 e003172a c0023fd6 681180d2 010000d4")
# How a program's entry begins: bti c, nop, or mov x29,#0; or, after an earlier attach, our stub.
ENTRIES: tuple[bytes, ...] = (*map(bytes.fromhex, ("5f2403d5", "1f2003d5", "1d0080d2")), STUB)


class Registers(ctypes.Structure):
    """``struct user_pt_regs``; fields take and give them as unsigned."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 31),
        ("sp", ctypes.c_uint64),
        ("pc", ctypes.c_uint64),
        ("pstate", ctypes.c_uint64),
    )


def read_stack_pointer(register_bytes: bytes) -> int:
    return int(Registers.from_buffer_copy(register_bytes).sp)


def read_system_call(register_bytes: bytes, memory: int) -> tuple[int, int, int]:
    """The system call that a stopped thread is in: its number, its second and third argument.

    The kernel does not say. But the thread stands at the instruction that makes the call, which
    the kernel is about to repeat, or right behind it.

    Args:
        register_bytes: the thread's registers.
        memory: a descriptor of its memory.
    """
    registers = Registers.from_buffer_copy(register_bytes)
    if SVC not in (os.pread(memory, 4, registers.pc), os.pread(memory, 4, registers.pc - 4)):
        return -1, 0, 0
    return registers.x[8], registers.x[1], registers.x[2]


def build_stub_registers(
    register_bytes: bytes, entry: int, stack: int, argument: int, functions: tuple[int, ...]
) -> bytes:
    """The registers with which a thread runs `STUB`; with another pc, nothing is restarted."""
    stub = Registers.from_buffer_copy(register_bytes)
    stub.pc, stub.sp, stub.pstate = entry, stack, stub.pstate & ~BRANCH_TYPE
    stub.x[19], (stub.x[20], stub.x[21], stub.x[22]) = argument, functions
    stub.x[29] = stub.x[30] = 0  # nobody called it
    return bytes(stub)


def build_signal_frame(
    tid: int, register_bytes: bytes, argument: bytes, memory: int
) -> tuple[int, bytes, int]:
    """The signal frame, with the argument above it.

    Returns:
        Its address (where the stub's stack begins), its content, and the argument's address.

    Raises:
        BusyError: the thread has a second stack, of return addresses, that would not fit.
    """
    with suppress(OSError):
        if int.from_bytes(ptrace.read_registers(tid, NT_ARM_GCS)[:8], "little") & 1:
            raise BusyError(f"thread {tid} has a guarded control stack")
    top = Registers.from_buffer_copy(register_bytes).sp - len(argument)
    place = (top - FRAME_BYTES) & ~15
    content = bytearray(top - place)
    struct.pack_into("<QQQiiQ", content, CONTEXT, 0, 0, 0, NO_SUCH_STACK, 0, 0)
    content[CONTEXT + MASK : CONTEXT + MASK + 8] = ptrace.read_signal_mask(tid)
    back = build_resume_registers(register_bytes, memory)
    at = CONTEXT + MACHINE + 8  # behind the address of a fault
    content[at : at + len(back)] = back
    vectors = ptrace.read_registers(tid, NT_FPREGSET)
    status = vectors[VECTORS_BYTES : VECTORS_BYTES + 8]
    record = struct.pack("<II", FPSIMD_MAGIC, 16 + VECTORS_BYTES) + status
    at = CONTEXT + RECORDS
    content[at : at + 16 + VECTORS_BYTES] = record + vectors[:VECTORS_BYTES]
    return place, bytes(content) + argument, top


def build_resume_registers(register_bytes: bytes, memory: int) -> bytes:
    """The registers with which the thread goes on: in its system call anew, or with EINTR.

    The kernel has already set it back to repeat the call. A signal handler would end a wait that
    has a time, as it would begin again; a futex without one is waited for again.
    """
    back = Registers.from_buffer_copy(register_bytes)
    repeats = os.pread(memory, 4, back.pc) == SVC
    if repeats and (back.x[8] in WAITS or back.x[3]):
        back.pc += len(SVC)
        back.x[0] = -errno.EINTR
    return bytes(back)
