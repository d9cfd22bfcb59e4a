"""What ``memory record`` takes of a core while it records: the command and the agents it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from vllmops.observe.memory.recorder import FULL_S

from .figure import Figure, Limit, interleave_measurements, medians
from .setting import VLLMOPS, Setting, cpu_seconds

WARM_UP_S = 4.0  # until the command has found the server and taken its first sample


def measure(setting: Setting) -> Iterator[Figure]:
    # Of what it does once a minute, each window has its share.
    rounds, window_s = (1, 5.0) if setting.short else (2, FULL_S)
    record = (
        *(VLLMOPS, "memory", "record", "-t", str(setting.vision.pid)),
        *("--save", str(setting.home / "memory.json"), "--interval", "1", "--duration", "600"),
    )
    servers = [process.pid for process in setting.vision.processes()]

    def idle() -> float:
        return cores(servers, window_s)

    def cores_while_recording() -> float:
        with setting.meanwhile(*record, warm_up_s=WARM_UP_S) as command:
            return cores([*servers, command.pid], window_s)

    of = medians(interleave_measurements(rounds, {"recorded": cores_while_recording, "idle": idle}))
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
