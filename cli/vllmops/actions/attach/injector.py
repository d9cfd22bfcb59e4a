"""Makes another process run a line of Python, by way of one thread of it that waits in the kernel.

A debugger's way (gdb, as memray and debugpy use it) stops the whole process while it loads symbols,
for seconds, calls functions on a thread that may hold malloc's lock, and leaves a breakpoint behind
when it is killed in between: the process dies of it. Here one idle thread alone is stopped, for a
millisecond, and made to look as if a signal had come, with a stub as its handler: what it was doing
lies on its stack in a signal frame, the stub takes the GIL, runs the line, gives the GIL back, and
returns through sigreturn(2), which lets the thread go on as it was. All that counts is one
setting of its registers: a crash before or after it leaves nothing half-done.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ...collect.machine import proc
from ...support.errors import VllmopsError
from . import arm64, ptrace, x86
from .ptrace import BusyError

STACK_BYTES = 128 << 10  # what compiling and running a line of Python may take

FUTEX_WAIT, FUTEX_WAIT_BITSET, FUTEX_COMMAND = 0, 9, 0x7F
LOCKED_AND_WAITED_FOR = 2  # how glibc's own locks wait: whoever does may be inside malloc

SYMBOLS = ("PyGILState_Ensure", "PyRun_SimpleString", "PyGILState_Release")


class Architecture(Protocol):
    """What a kind of processor has of its own; general registers are as ptrace(2) gives them.

    Its system calls `WAITS` wait for something to happen, and hold no lock of malloc's or the
    loader's. `STUB` calls the three functions and returns by sigreturn(2); `ENTRIES` are how a
    program's entry may begin.
    """

    WAITS: frozenset[int]
    FUTEX: int
    STUB: bytes
    ENTRIES: tuple[bytes, ...]

    def read_stack_pointer(self, register_bytes: bytes, /) -> int: ...

    def read_system_call(self, register_bytes: bytes, memory: int, /) -> tuple[int, int, int]: ...

    def build_stub_registers(
        self,
        register_bytes: bytes,
        entry: int,
        stack: int,
        argument: int,
        functions: tuple[int, ...],
        /,
    ) -> bytes: ...

    def build_signal_frame(
        self, tid: int, register_bytes: bytes, argument: bytes, memory: int, /
    ) -> tuple[int, bytes, int]: ...


MACHINES: dict[str, Architecture] = {"x86_64": x86, "aarch64": arm64}
MACHINE = MACHINES.get(platform.machine(), x86)


@dataclass(frozen=True)
class MemoryMapping:
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    offset: int
    path: str


@dataclass(frozen=True)
class PythonProcess:
    """A process that runs Python.

    Args:
        pid: process id.
    """

    pid: int

    def list_mappings(self) -> Iterator[MemoryMapping]:
        """Its mappings, lowest first."""
        for line in proc.read_lossy_text(proc.get_process_folder(self.pid) / "maps").splitlines():
            span, _, offset, _, _, *path = line.split(maxsplit=5)
            start, _, end = span.partition("-")
            yield MemoryMapping(int(start, 16), int(end, 16), int(offset, 16), "".join(path))

    @cached_property
    def entry_point(self) -> int:
        """Its program's entry point: code that never runs again, so the stub can replace it."""
        program = os.readlink(f"/proc/{self.pid}/exe")
        with ElfFile(Path(f"/proc/{self.pid}/exe")) as elf:
            return elf.entry_point + self.find_load_bias(program, elf)

    @cached_property
    def function_addresses(self) -> tuple[int, ...]:
        """The addresses of `SYMBOLS`.

        Raises:
            VllmopsError: ``attach.not-python``.
        """
        program = os.readlink(f"/proc/{self.pid}/exe")
        libraries = dict.fromkeys(
            part.path
            for part in self.list_mappings()
            if Path(part.path).name.startswith("libpython")
        )
        for path in (*libraries, program):
            inside = Path(f"/proc/{self.pid}/exe" if path == program else self.resolve_path(path))
            with suppress(OSError), ElfFile(inside) as elf:
                addresses = [elf.find_symbol(name) for name in SYMBOLS]
                if None not in addresses:
                    bias = self.find_load_bias(path, elf)
                    return tuple(address + bias for address in addresses if address is not None)
        raise VllmopsError(
            "attach.not-python",
            f"no usable Python symbols in pid {self.pid}: it runs no Python, or its files were "
            "replaced after it started",
            "vllmops restart, when the server can be interrupted",
        )

    def resolve_path(self, path: str) -> str:
        """A path as the process sees it, which may be in a container."""
        return f"/proc/{self.pid}/root{path}"

    def find_load_bias(self, path: str, elf: ElfFile) -> int:
        """How far from its own addresses a file was loaded."""
        return (
            next(m.start for m in self.list_mappings() if m.path == path and not m.offset)
            - elf.base_address
        )

    def find_stack_room(self, stack_pointer: int) -> int:
        """Bytes below a stack pointer that belong to the stack."""
        for part in self.list_mappings():
            if part.start <= stack_pointer < part.end:
                # The main thread's grows as it is used.
                return stack_pointer - part.start + (STACK_BYTES if part.path == "[stack]" else 0)
        return 0

    def is_idle(self, tid: int) -> bool:
        """Whether a thread waits in a system call in which it holds no lock of the C library's.

        Raises:
            PermissionError: the kernel does not allow it.
        """
        try:
            words = proc.read_lossy_text(
                proc.get_process_folder(self.pid) / f"task/{tid}/syscall"
            ).split()
        except PermissionError:
            raise
        except OSError:
            return False  # gone meanwhile
        if not words or not words[0].isdecimal():
            return False
        return _is_harmless_wait(int(words[0]), int(words[2], 16), int(words[3], 16))

    def list_thread_ids(self) -> list[int]:
        """The ids of its threads, the main one first."""
        return sorted(int(name) for name in os.listdir(f"/proc/{self.pid}/task"))


class ElfFile:
    """The parts of an ELF file that are needed."""

    def __init__(self, path: Path) -> None:
        from elftools.elf.elffile import ELFFile  # noqa: PLC0415

        self.file = path.open("rb")
        self.elf = ELFFile(self.file)

    def __enter__(self) -> ElfFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def entry_point(self) -> int:
        return int(self.elf.header["e_entry"])

    @property
    def base_address(self) -> int:
        """The address of its first byte, as it was linked."""
        first = next(self.elf.iter_segments("PT_LOAD"))
        return int(first["p_vaddr"]) - int(first["p_offset"])

    def find_symbol(self, name: str) -> int | None:
        """The address of a symbol that it offers to others, by their hash table: they are many."""
        from elftools.elf.hash import ELFHashSection, GNUHashSection  # noqa: PLC0415

        for section in map(self.elf.get_section_by_name, (".gnu.hash", ".hash")):
            if isinstance(section, (GNUHashSection, ELFHashSection)):
                symbols = section.get_symbol(name)
                return (int(symbols["st_value"]) or None) if symbols else None
        return None


def is_supported() -> bool:
    """Whether this method works on this machine's processor."""
    return platform.machine() in MACHINES


def inject_code(target: PythonProcess, tid: int, code: str) -> float:
    """Make a waiting thread run a line of Python as soon as it has the GIL; does not wait for it.

    Call it in a thread of its own: the kernel lets go of what a thread traces once that ends.

    Args:
        target: the process.
        tid: one of its threads, `PythonProcess.is_idle`.
        code: Python source; what it raises is printed on the process's stderr.

    Returns:
        Seconds for which the thread was stopped.

    Raises:
        BusyError: the thread does not wait in the kernel, or waits for what may be a lock of the C
            library's, or has no free stack, or is gone.
        PermissionError: the kernel does not allow it.
        VllmopsError: ``attach.not-python`` or ``attach.unknown-program``.
    """
    entry, functions = target.entry_point, target.function_addresses
    _require_known_program(target)
    try:
        return _inject_code(target, tid, code, entry, functions)
    except (ProcessLookupError, FileNotFoundError) as error:
        # The stopped thread ended with it.
        raise BusyError(f"thread {tid} is gone") from error


def _inject_code(
    target: PythonProcess, tid: int, code: str, entry: int, functions: tuple[int, ...]
) -> float:
    ptrace.ptrace(ptrace.SEIZE, tid)
    began = time.monotonic()
    ptrace.ptrace(ptrace.INTERRUPT, tid)
    ptrace.wait_until_stopped(tid)
    try:
        with open(f"/proc/{target.pid}/task/{tid}/mem", "r+b", buffering=0) as file:
            memory = file.fileno()
            registers = ptrace.read_registers(tid, ptrace.NT_PRSTATUS)
            # Only now does it stay as it is: since somebody looked it may have gone on to wait for
            # something else.
            if not _is_harmless_wait(*MACHINE.read_system_call(registers, memory)):
                raise BusyError(f"thread {tid} no longer waits, or waits for a lock")
            if target.find_stack_room(MACHINE.read_stack_pointer(registers)) < STACK_BYTES:
                raise BusyError(f"the stack of thread {tid} is too small")
            place, frame, argument = MACHINE.build_signal_frame(
                tid, registers, code.encode() + b"\0", memory
            )
            for content, address in ((frame, place), (MACHINE.STUB, entry)):
                if os.pwrite(memory, content, address) != len(content):
                    raise BusyError(f"the stack of thread {tid} has no free space")
        ptrace.write_registers(
            tid, MACHINE.build_stub_registers(registers, entry, place, argument, functions)
        )
    finally:
        with suppress(OSError):
            ptrace.ptrace(ptrace.DETACH, tid)
    return time.monotonic() - began


def _is_harmless_wait(number: int, operation: int, value: int) -> bool:
    """Whether a thread in a system call holds no lock of the C library's.

    Args:
        number: of the system call.
        operation: its second argument.
        value: its third argument, of which a futex has 32 bits.
    """
    if number != MACHINE.FUTEX:
        return number in MACHINE.WAITS
    command = operation & FUTEX_COMMAND
    return command in (FUTEX_WAIT, FUTEX_WAIT_BITSET) and value & 0xFFFFFFFF != (
        LOCKED_AND_WAITED_FOR
    )


def _require_known_program(target: PythonProcess) -> None:
    """Raise unless the program begins as programs do, and signal frames are taken as they are."""
    with open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory:
        there = os.pread(memory.fileno(), len(MACHINE.STUB), target.entry_point)
    status = proc.read_lossy_text(proc.get_process_folder(target.pid) / "status")
    if not there.startswith(MACHINE.ENTRIES) or "shstk" in status:
        raise VllmopsError(
            "attach.unknown-program",
            f"the program of pid {target.pid} starts in an unknown way or uses a shadow stack: "
            "a change would not be safe",
            "vllmops restart, when the server can be interrupted",
        )
