"""``stacks dump`` of a whole server, against py-spy on one process of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from vllmops.collect.stacks import pyspy

from .figure import Figure, Limit, interleave_measurements, medians
from .setting import VLLMOPS, Setting


def measure(setting: Setting) -> Iterator[Figure]:
    server = setting.vision
    program = pyspy.find_pyspy()
    dump = (VLLMOPS, "stacks", "dump", "-t", str(server.pid), "--json")
    targets = {"all": partial(setting.seconds, *dump)}
    for process in server.processes():
        one = (program, "dump", "--json", "--pid", str(process.pid))
        targets[str(process.pid)] = partial(setting.seconds, *one)
    values = interleave_measurements(4 if setting.short else 30, targets)
    of = medians(values)
    slowest = max(of[name] for name in of if name != "all")
    yield Figure(
        f"stacks dump of {len(of) - 1} processes",
        "s",
        of["all"],
        "py-spy dump of the slowest one",
        slowest,
        Limit(3, 2.0) if setting.short else Limit(1.5, 0.15),
        len(values["all"]),
    )
