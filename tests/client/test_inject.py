"""Injection on real processes: whatever the thread waited for goes on, whoever dies meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllmops.client import inject
from vllmops.errors import VllmopsError

pytestmark = pytest.mark.skipif(not inject.supported(), reason="x86-64 alone")

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
    "event": lambda: event.wait(60),
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
time.sleep(0.2)
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
        self.target = inject.Target(self.process.pid)

    def end(self) -> dict[str, bool]:
        """Let all threads go; what each says."""
        output, _ = self.process.communicate("\n", timeout=30)
        assert self.process.returncode == 0
        found: dict[str, bool] = eval(output)
        return found


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.process.kill()


def injected(target: inject.Target, tid: int, code: str) -> float:
    """In a thread of its own, as it is to be called."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(inject.inject, target, tid, code).result()


def until(done: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (result := done()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def says(file: Path, line: str) -> bool:
    return file.exists() and line in file.read_text()


def test_every_kind_of_wait_goes_on(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "told"
    for name, tid in program.tids.items():
        if name == "sleep":
            continue
        assert program.target.idle(tid), name
        stopped_s = injected(
            program.target, tid, f"open({str(file)!r}, 'a').write('{name} {tid}\\n')"
        )
        assert stopped_s < 1
        until(partial(says, file, f"{name} {tid}\n"))
    assert program.end() == dict.fromkeys(program.tids, True)


def test_the_borrowed_thread_runs_it(program: Program, tmp_path: Path) -> None:
    file, tid = tmp_path / "told", program.tids["get"]
    code = f"import threading; open({str(file)!r}, 'w').write(str(threading.get_native_id()))"
    injected(program.target, tid, code)
    assert until(lambda: file.exists() and file.read_text()) == str(tid)


def test_many_times(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "told"
    for number in range(100):
        name = list(program.tids)[number % 6]
        code = f"open({str(file)!r}, 'a').write('.'); sum(x * 0.5 for x in range(1000))"
        until(partial(program.target.idle, program.tids[name]))
        injected(program.target, program.tids[name], code)
    until(lambda: len(file.read_text()) == 100)
    assert program.end() == dict.fromkeys(program.tids, True)


def test_an_exception_harms_nothing(program: Program) -> None:
    injected(program.target, program.tids["get"], "1 / 0")
    time.sleep(0.1)
    assert program.end() == dict.fromkeys(program.tids, True)


# Dies right before its N-th ptrace(2), or right after the last one.
ASSASSIN = """
import os, signal, sys
from vllmops.client import inject
left, real = int(sys.argv[3]), inject._ptrace
def ptrace(*args, **kwargs):
    global left
    if left == 0: os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return real(*args, **kwargs)
inject._ptrace = ptrace
inject.inject(inject.Target(int(sys.argv[1])), int(sys.argv[2]), sys.argv[4])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_at_any_step_it_leaves_the_process_running(program: Program, tmp_path: Path) -> None:
    file, calls = tmp_path / "told", 8
    code = f"open({str(file)!r}, 'a').write('.')"
    for step in range(calls):
        words = (str(program.process.pid), str(program.tids["epoll"]), str(step), code)
        done = subprocess.run([sys.executable, "-c", ASSASSIN, *words], check=False)
        assert done.returncode == -signal.SIGKILL
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
        target = inject.Target(spin.pid)
        assert not target.idle(spin.pid)
        with pytest.raises(inject.BusyError):
            injected(target, spin.pid, "1 / 0")
        assert Path(f"/proc/{spin.pid}/stat").read_text().split()[2] == "R"
    finally:
        spin.kill()
        spin.wait()


def test_a_process_without_python_is_refused() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(VllmopsError) as error:
            injected(inject.Target(sleeper.pid), sleeper.pid, "1")
        assert error.value.code == "attach.not-python"
    finally:
        sleeper.kill()
        sleeper.wait()
