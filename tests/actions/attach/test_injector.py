"""Injection on real processes: whatever the thread waited for goes on, whoever dies meanwhile."""

from __future__ import annotations

import os
import platform
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllmops.actions.attach import injector, x86
from vllmops.actions.attach import ptrace as trace
from vllmops.actions.attach.ptrace import BusyError
from vllmops.support.errors import VllmopsError

from ...support.extent import programs
from ...support.waiting import until

pytestmark = [programs, pytest.mark.skipif(not injector.is_supported(), reason="no such processor")]

# Calls of ptrace(2) for one injection; arm64 also asks for a stack of return addresses.
CALLS = 7 if injector.MACHINE is x86 else 8

# Threads that wait in every way that Python has; each says that it is right when it is let go.
PROGRAM = """
import os, queue, select, socket, sys, threading, time
ends = {name: socket.socketpair() for name in ("select", "poll", "epoll", "recv")}
things, lock, event = queue.Queue(), threading.Lock(), threading.Event()
lock.acquire()
def poll(): p = select.poll(); p.register(ends["poll"][0], 1); return bool(p.poll())
def epoll(): p = select.epoll(); p.register(ends["epoll"][0], 1); return bool(p.poll())
waits = {
    "get": lambda: things.get() == 1,
    "lock": lock.acquire,
    "event": lambda: event.wait(600),
    "select": lambda: select.select([ends["select"][0]], [], [])[0] != [],
    "poll": poll,
    "epoll": epoll,
    "sleep": lambda: time.sleep(float(sys.argv[1])) is None,
}
tids, right = {}, {}
def run(name):
    tids[name] = threading.get_native_id()
    x = 1.25
    right[name] = waits[name]() and x * 4 == 5.0
threads = [threading.Thread(target=run, args=(name,)) for name in waits]
for each in threads: each.start()
while len(tids) < len(threads): time.sleep(0.01)
print(tids, flush=True)
sys.stdin.readline()
things.put(1); lock.release(); event.set()
for name in ("select", "poll", "epoll"): ends[name][1].send(b"x")
for each in threads: each.join()
print(right, flush=True)
"""


class Program:
    """The program above, and the threads in it."""

    def __init__(self, sleep_s: float = 0.1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(sleep_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.tids: dict[str, int] = eval(self.process.stdout.readline())
        self.target = injector.PythonProcess(self.process.pid)
        waiting = [tid for name, tid in self.tids.items() if name != "sleep"]
        until(lambda: all(map(self.target.is_idle, waiting)))

    def end(self) -> dict[str, bool]:
        """Let all threads go; what each says."""
        output, _ = self.process.communicate("\n", timeout=60)
        assert self.process.returncode == 0
        found: dict[str, bool] = eval(output)
        return found


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.process.kill()


def inject_in_thread(target: injector.PythonProcess, tid: int, code: str) -> float:
    """In a thread of its own, as it is to be called."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(injector.inject_code, target, tid, code).result()


def says(file: Path, line: str) -> bool:
    return file.exists() and line in file.read_text()


def test_every_kind_of_wait_goes_on(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "told"
    for name, tid in program.tids.items():
        if name == "sleep":
            continue
        assert program.target.is_idle(tid), name
        inject_in_thread(program.target, tid, f"open({str(file)!r}, 'a').write('{name} {tid}\\n')")
        until(partial(says, file, f"{name} {tid}\n"))
    assert program.end() == dict.fromkeys(program.tids, True)


def test_the_thread_is_stopped_for_less_than_a_second(program: Program) -> None:
    assert inject_in_thread(program.target, program.tids["get"], "pass") < 1


def test_the_borrowed_thread_runs_it(program: Program, tmp_path: Path) -> None:
    file, tid = tmp_path / "told", program.tids["get"]
    code = f"import threading; open({str(file)!r}, 'w').write(str(threading.get_native_id()))"
    inject_in_thread(program.target, tid, code)
    assert until(lambda: file.exists() and file.read_text()) == str(tid)


def test_many_times(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "told"
    for number in range(100):
        name = list(program.tids)[number % 6]
        code = f"open({str(file)!r}, 'a').write('.'); sum(x * 0.5 for x in range(1000))"
        until(partial(program.target.is_idle, program.tids[name]))
        inject_in_thread(program.target, program.tids[name], code)
    until(lambda: len(file.read_text()) == 100)
    assert program.end() == dict.fromkeys(program.tids, True)


def test_an_exception_harms_nothing(program: Program) -> None:
    inject_in_thread(program.target, program.tids["get"], "1 / 0")
    time.sleep(0.1)
    assert program.end() == dict.fromkeys(program.tids, True)


def kill_during_injection(step: int, target: injector.PythonProcess, tid: int, code: str) -> int:
    """Have a fork inject, and die right before its N-th ptrace(2), or right after the last."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left, real = step, trace.ptrace

    def ptrace(*args: Any, **how: Any) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **how)

    try:
        trace.ptrace = ptrace
        injector.inject_code(target, tid, code)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def test_killed_at_any_step_it_leaves_the_process_running(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "told"
    code = f"open({str(file)!r}, 'a').write('.')"
    for step in range(CALLS + 1):
        until(partial(program.target.is_idle, program.tids["epoll"]))
        assert (
            kill_during_injection(step, program.target, program.tids["epoll"], code)
            == -signal.SIGKILL
        )
    # Whoever has set the registers has done it all.
    until(lambda: file.exists() and file.read_text())
    states = Path(f"/proc/{program.process.pid}/status").read_text()
    assert "TracerPid:\t0" in states
    assert program.end() == dict.fromkeys(program.tids, True)


def test_a_running_thread_is_left_alone(program: Program) -> None:
    spin = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert spin.stdout is not None
        spin.stdout.readline()
        target = injector.PythonProcess(spin.pid)
        assert not target.is_idle(spin.pid)
        with pytest.raises(BusyError):
            inject_in_thread(target, spin.pid, "1 / 0")
        until(lambda: Path(f"/proc/{spin.pid}/stat").read_text().split()[2] == "R")
    finally:
        spin.kill()
        spin.wait()


def test_a_process_without_python_is_refused() -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        with pytest.raises(VllmopsError) as error:
            inject_in_thread(injector.PythonProcess(sleeper.pid), sleeper.pid, "1")
        assert error.value.code == "attach.not-python"
    finally:
        sleeper.kill()
        sleeper.wait()


# Two threads and a lock of the C library's; the second one waits for it, as inside malloc().
LOCKED = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
def wait():
    print(threading.get_native_id(), flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_unlock(mutex)
thread = threading.Thread(target=wait)
thread.start()
sys.stdin.readline()
libc.pthread_mutex_unlock(mutex)
thread.join()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    started: list[subprocess.Popen[str]] = []

    def begin(source: str, *words: str) -> tuple[subprocess.Popen[str], int]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", source, *words]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        assert started[-1].stdout
        return started[-1], int(started[-1].stdout.readline())

    yield begin
    for item in started:
        item.kill()
        item.communicate()


def in_call(pid: int, tid: int, number: int) -> bool:
    words = Path(f"/proc/{pid}/task/{tid}/syscall").read_text().split()
    return words[0] == str(number)


def test_injection_checks_the_wait_again_after_stopping_the_thread(start: Any) -> None:
    """Who looked before may have seen another wait."""
    process, tid = start(LOCKED)
    until(lambda: in_call(process.pid, tid, injector.MACHINE.FUTEX))
    target = injector.PythonProcess(process.pid)
    assert not target.is_idle(tid)
    for _ in range(3):
        with pytest.raises(BusyError):
            inject_in_thread(target, tid, "1 / 0")
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "operation", "value", "harmless"),
    [
        (injector.MACHINE.FUTEX, 128, 0, True),  # FUTEX_WAIT | FUTEX_PRIVATE_FLAG
        (injector.MACHINE.FUTEX, 137 | 256, 7, True),  # FUTEX_WAIT_BITSET, private, realtime
        (injector.MACHINE.FUTEX, 128, 2, False),
        (injector.MACHINE.FUTEX, 128, 0xFFFF_0000_0000_0002, False),  # a futex has 32 bits
        (injector.MACHINE.FUTEX, 129, 1, False),  # FUTEX_WAKE
        (injector.MACHINE.FUTEX, 134, 0, False),  # FUTEX_LOCK_PI
        (min(injector.MACHINE.WAITS), 2, 2, True),
        (0, 0, 0, False),
        (2**64 - 1, 128, 0, False),  # in no system call
    ],
)
def test_harmless_waits_are_recognized(
    number: int, operation: int, value: int, harmless: bool
) -> None:
    assert injector._is_harmless_wait(number, operation, value) is harmless


def has_thread_ended(program: Program) -> bool:
    """Whether the thread that is traced has ended."""
    stat = Path(f"/proc/{program.process.pid}/task/{program.tids['get']}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_process_that_dies_meanwhile(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step: no time can be told from outside."""
    real = trace.ptrace
    for step in range(CALLS):
        item, left = Program(), step

        def ptrace(*args: Any, target: Program = item, **kwargs: Any) -> None:
            nonlocal left
            if not left:
                target.process.kill()  # it is reaped once its tracer is gone
                until(partial(has_thread_ended, target))
            left -= 1
            real(*args, **kwargs)

        monkeypatch.setattr(trace, "ptrace", ptrace)
        if step < CALLS - 1:
            with pytest.raises(BusyError):
                inject_in_thread(item.target, item.tids["get"], "pass")
        else:  # all was done
            inject_in_thread(item.target, item.tids["get"], "pass")
        item.process.communicate()
        monkeypatch.setattr(trace, "ptrace", real)


# What waits in poll(2) with a value in a vector register, and says whether it is still there. Code
# lies in a file: where the kernel maps that, it sees to the processor's caches of instructions.
VECTOR = """
import ctypes, mmap, struct, sys, tempfile, threading
file = tempfile.TemporaryFile()
file.write(bytes.fromhex(sys.argv[1]).ljust(4096, b"\\0"))
file.flush()
every = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
page = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, every)
run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(
    ctypes.addressof(ctypes.c_char.from_buffer(page))
)
size = int(sys.argv[2])
given, got = bytes(range(100, 100 + size)), ctypes.create_string_buffer(size)
print(threading.get_native_id(), flush=True)
run(given, ctypes.addressof(got), struct.pack("qq", 600, 0))
print(int(got.raw == given), flush=True)
"""
# The code, the bytes of the register, and the number of the system call.
VECTORS = {
    # vmovdqu ymm15, [rdi]; mov r8, rsi; poll(NULL, 0, 600000); vmovdqu [r8], ymm15; vzeroupper; ret
    "x86_64": ("c57e6f3f4989f031ff31f6bac0270900b8070000000f05c4417e7f38c5f877c3", 32, 7),
    # ldr q20, [x0]; mov x9, x1; ppoll(NULL, 0, x2, NULL); str q20, [x9]; ret
    "aarch64": (
        "1400c03de90301aa000080d2010080d2030080d2280980d2010000d43401803dc0035fd6",
        *(16, 73),
    ),
}


def test_vector_registers_are_as_they_were(start: Any, tmp_path: Path) -> None:
    """On x86-64 their upper halves, too, which are not among those that every frame has."""
    code, size, number = VECTORS[platform.machine()]
    process, tid = start(VECTOR, code, str(size))
    until(lambda: in_call(process.pid, tid, number))
    file = tmp_path / "told"
    line = f"import ctypes; open({str(file)!r}, 'w').write(str(sum(x * 0.1 for x in range(9999))))"
    inject_in_thread(injector.PythonProcess(process.pid), tid, line)
    until(file.exists)
    assert process.communicate(timeout=60)[0] == "1\n"


def run_while_stopped(program: Program, act: Callable[[int], Any]) -> Any:
    tid = program.tids["get"]

    def stop() -> Any:
        trace.ptrace(trace.SEIZE, tid)
        trace.ptrace(trace.INTERRUPT, tid)
        trace.wait_until_stopped(tid)
        try:
            return act(tid)
        finally:
            trace.ptrace(trace.DETACH, tid)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(stop).result()


def read_extended_state(tid: int, room: int = x86.XSTATE_BYTES) -> bytes:
    return trace.read_registers(tid, x86.NT_X86_XSTATE, room)


@pytest.mark.skipif(injector.MACHINE is not x86, reason="its extended state")
def test_no_state_is_cut_off(program: Program) -> None:
    whole = run_while_stopped(program, read_extended_state)
    assert len(whole) < x86.XSTATE_BYTES
    for room in (576, len(whole) - 64, len(whole), len(whole) + 8):
        assert run_while_stopped(program, partial(read_extended_state, room=room)) == whole


def amx(used: int, tiles: bytes = bytes(8192)) -> bytes:
    """What ptrace gives on a processor with AMX, which the machines of the tests need not have."""
    state = bytearray(2816) + tiles
    struct.pack_into("<Q", state, 464, 0x602E7)
    struct.pack_into("<Q", state, 512, used)
    state[600:640] = b"\xaa" * 40
    return bytes(state)


def software(frame: bytes) -> tuple[int, int, int]:
    """What the kernel reads of a frame: the sizes, and the features, as asm/sigcontext.h has it."""
    magic, extended, features, size = struct.unpack_from("<IIQI", frame, 464)
    assert magic == 0x46505853
    assert extended == size + 4
    assert struct.unpack_from("<I", frame, size) == (0x46505845,)
    return size, len(frame), features


def test_a_thread_without_tiles_has_a_frame_without_them() -> None:
    frame = x86.build_extended_state(amx(used=0xE7))
    assert software(frame) == (2816, 2820, 0x202E7)
    assert frame[600:640] == b"\xaa" * 40


def test_a_thread_with_tiles_has_them_in_its_frame() -> None:
    frame = x86.build_extended_state(amx(used=0x602E7, tiles=bytes([7]) * 8192))
    assert software(frame) == (11008, 11012, 0x602E7)
    assert frame[2816:11008] == bytes([7]) * 8192


def test_a_layout_that_is_not_known_is_left_alone() -> None:
    with pytest.raises(BusyError):
        x86.build_extended_state(amx(used=0xE7, tiles=bytes([7]) * 8192))
