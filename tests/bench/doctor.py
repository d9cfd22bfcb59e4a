"""``doctor`` on a server that is well, and ``stacks explain`` of a long paste; start-up counts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .figure import Figure, Limit, interleaved, medians
from .setting import VLLMOPS, Setting

DUMP_BYTES = 1_000_000


def measure(setting: Setting) -> Iterator[Figure]:
    server = setting.vision
    target = ("-t", str(server.pid), "--json")
    paste = setting.home / "paste.txt"
    dump = setting.run(VLLMOPS, "stacks", "dump", "-t", str(server.pid)).stdout
    paste.write_bytes((dump + b"\n") * (DUMP_BYTES // len(dump) + 1))
    targets = {
        "version": partial(setting.seconds, VLLMOPS, "--version"),
        "dump": partial(setting.seconds, VLLMOPS, "stacks", "dump", *target),
        "doctor": partial(setting.seconds, VLLMOPS, "doctor", *target),
        "explain": partial(setting.seconds, VLLMOPS, "stacks", "explain", str(paste), "--json"),
    }
    values = interleaved(2 if setting.short else 30, targets)
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
    yield Figure(
        f"stacks explain of {paste.stat().st_size / 1e6:.1f} MB",
        "s",
        of["explain"],
        "vllmops --version",
        of["version"],
        Limit(0, 0.3 * room),
        len(values["explain"]),
    )
