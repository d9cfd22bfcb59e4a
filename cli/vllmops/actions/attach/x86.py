"""What `inject` has to know of x86-64: asm/ptrace.h, asm/ucontext.h, asm/sigcontext.h."""

from __future__ import annotations

import ctypes
import errno
import struct

from . import ptrace
from .ptrace import BusyError

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

# poll, select, nanosleep, clock_nanosleep, epoll_wait, pselect6, ppoll, epoll_pwait
WAITS = frozenset({7, 23, 35, 230, 232, 270, 271, 281})
FUTEX = 202

# call *%r12; mov %eax,%ebp; mov %rbx,%rdi; call *%r13; mov %ebp,%edi; call *%r14;
# mov $15 (rt_sigreturn),%eax; syscall
STUB = bytes.fromhex("41ffd4 89c5 4889df 41ffd5 89ef 41ffd6 b80f000000 0f05")
# How a program's entry begins: endbr64, or xor %ebp,%ebp, or xor %rbp,%rbp; or, after an earlier
# attach, our stub.
ENTRIES: tuple[bytes, ...] = (
    bytes.fromhex("f30f1efa"),
    bytes.fromhex("31ed"),
    bytes.fromhex("4831ed"),
    STUB,
)


class Registers(ctypes.Structure):
    """``struct user_regs_struct``; fields take and give them as unsigned."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in REGISTERS)


def read_stack_pointer(register_bytes: bytes) -> int:
    return int(Registers.from_buffer_copy(register_bytes).rsp)


def read_system_call(register_bytes: bytes, memory: int) -> tuple[int, int, int]:  # noqa: ARG001
    """The system call that a stopped thread is in: its number, its second and third argument."""
    registers = Registers.from_buffer_copy(register_bytes)
    return registers.orig_rax, registers.rsi, registers.rdx


def build_stub_registers(
    register_bytes: bytes, entry: int, stack: int, argument: int, functions: tuple[int, ...]
) -> bytes:
    """The registers with which a thread runs `STUB`."""
    stub = Registers.from_buffer_copy(register_bytes)
    stub.rip, stub.rsp, stub.eflags = entry, stack, INTERRUPTS
    stub.orig_rax = -1  # nothing is to be restarted
    stub.rbx, (stub.r12, stub.r13, stub.r14) = argument, functions
    return bytes(stub)


def build_signal_frame(
    tid: int,
    register_bytes: bytes,
    argument: bytes,
    memory: int,  # noqa: ARG001 - arm64 needs it
) -> tuple[int, bytes, int]:
    """The signal frame, with the argument above it.

    Returns:
        Its address (where the stub's stack begins), its content, and the argument's address.
    """
    registers = Registers.from_buffer_copy(register_bytes)
    state = build_extended_state(ptrace.read_registers(tid, NT_X86_XSTATE, XSTATE_BYTES))
    top = registers.rsp - RED_ZONE - len(argument)
    state_at = (top - len(state)) & ~63
    header = struct.calcsize("<QQQiiQ")
    size = header + 8 * len(SAVED) + struct.calcsize("<4H5Q8QQ")
    place = (state_at - size) & ~15
    back = build_resume_registers(registers)
    content = b"".join(
        (
            struct.pack("<QQQiiQ", UC_FLAGS, 0, 0, NO_SUCH_STACK, 0, 0),
            struct.pack(f"<{len(SAVED)}Q", *(getattr(back, name) for name in SAVED)),
            struct.pack("<4H", registers.cs, 0, 0, registers.ss),
            struct.pack("<5Q8Q", 0, 0, 0, 0, state_at, *[0] * 8),
            ptrace.read_signal_mask(tid),
        )
    )
    content = content.ljust(state_at - place, b"\0") + state
    return place, content.ljust(top - place, b"\0") + argument, top


def build_resume_registers(registers: Registers) -> Registers:
    """The registers with which the thread goes on: in its system call anew, or with EINTR."""
    back = Registers.from_buffer_copy(registers)
    left = ctypes.c_int64(registers.rax).value
    if left in RESTARTED:
        back.rax, back.rip = registers.orig_rax, registers.rip - SYSCALL_BYTES
    elif left in INTERRUPTED:
        back.rax = -errno.EINTR
    return back


def build_extended_state(state_bytes: bytes) -> bytes:
    """An extended state with what the kernel wants to find in a signal frame.

    Where the processor has AMX, ptrace(2) gives everybody's tiles, but a frame that has them is too
    large for a thread that has not asked for AMX: of such a frame sigreturn(2) takes nothing beyond
    the SSE registers. A thread that uses no tiles needs none, whether it has asked or not.

    Raises:
        BusyError: the tiles don't lie where they are known to.
    """
    state = bytearray(state_bytes)
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
