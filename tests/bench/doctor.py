"""``doctor`` on a server that is well, and ``stacks explain`` of a long paste; start-up counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .figure import Figure, Limit, interleave_measurements, medians
from .setting import VLLMOPS, Setting

DUMP_BYTES = 1_000_000
PASTE = Path(__file__).parents[1] / "rules/stacks/healthy-busy.three-samples.txt"


def measure(setting: Setting) -> Iterator[Figure]:
    server = setting.vision
    target = ("-t", str(server.pid), "--json")
    long = setting.home / "paste.txt"
    dump = setting.run(VLLMOPS, "stacks", "dump", "-t", str(server.pid)).stdout
    long.write_bytes((dump + b"\n") * (DUMP_BYTES // len(dump) + 1))
    targets = {
        "version": partial(setting.cpu_seconds, VLLMOPS, "--version"),
        "dump": partial(setting.seconds, VLLMOPS, "stacks", "dump", *target),
        "doctor": partial(setting.seconds, VLLMOPS, "doctor", *target),
        "paste": partial(setting.cpu_seconds, VLLMOPS, "stacks", "explain", str(PASTE)),
        "long": partial(setting.cpu_seconds, VLLMOPS, "stacks", "explain", str(long)),
    }
    values = interleave_measurements(2 if setting.short else 30, targets)
    of = medians(values)
    room = 3.0 if setting.short else 1.0
    yield Figure(
        "doctor, a server of three processes that is well",
        "s",
        of["doctor"],
        "stacks dump",
        of["dump"],
        Limit(0, 2.0 * room),
        len(values["doctor"]),
    )
    for name, path, most_s in (("paste", PASTE, 0.15), ("long", long, 0.3)):
        yield Figure(
            f"stacks explain of {path.stat().st_size / 1e6:.2f} MB, CPU time",
            "s",
            of[name],
            "vllmops --version",
            of["version"],
            Limit(0, most_s * room),
            len(values[name]),
        )
