"""What ``memory record`` takes of a core while it records: the command and the agents it asks."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence

from vllmops.client.memory import FULL_S

from .figure import Figure, Limit, interleaved, medians
from .setting import VLLMOPS, Setting

WARM_UP_S = 4.0  # until the command has found the server and taken its first sample


def measure(setting: Setting) -> Iterator[Figure]:
    # Of what it does once a minute, each window has its share.
    rounds, window_s = (1, 5.0) if setting.short else (2, FULL_S)
    servers = [process.pid for process in setting.vision.processes()]

    def idle() -> float:
        return cores(servers, window_s)

    def recorded() -> float:
        with recording(setting) as command:
            return cores([*servers, command], window_s)

    of = medians(interleaved(rounds, {"recorded": recorded, "idle": idle}))
    yield Figure(
        "memory record --interval 1, server and command",
        "cores",
        of["recorded"],
        "the idle server",
        of["idle"],
        Limit(2, 0.05) if setting.short else Limit(1, 0.005),
        rounds,
    )


def cores(pids: Sequence[int], seconds: float) -> float:
    """How many cores some processes keep busy."""
    began, before = time.perf_counter(), sum(map(cpu_seconds, pids))
    time.sleep(seconds)
    return (sum(map(cpu_seconds, pids)) - before) / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond; ``/proc`` has it to 10 ms."""
    # What clock_getcpuclockid(3) makes of a pid on Linux.
    return time.clock_gettime((~pid << 3) | 2)


@contextlib.contextmanager
def recording(setting: Setting) -> Iterator[int]:
    """Record meanwhile; yields the command's pid."""
    kept = setting.home / "memory.json"
    words = ("memory", "record", "-t", str(setting.vision.pid), "--save", str(kept))
    complaints = setting.home / "memory.log"
    with complaints.open("wb") as file:
        command = subprocess.Popen(
            (VLLMOPS, *words, "--interval", "1", "--duration", "600"),
            env=setting.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
        try:
            time.sleep(WARM_UP_S)
            yield command.pid
            if command.poll() is not None:
                raise RuntimeError(f"{' '.join(words)}: {complaints.read_text()}")
        finally:
            command.kill()
            command.wait()
