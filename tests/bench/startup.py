"""How long the command line takes to start, and what it imports."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from functools import partial

from vllmops.model import snapshot_files
from vllmops.model.caches import CacheSample, CacheSnapshot

from .figure import Figure, Limit, interleave_measurements, medians
from .setting import PYTHON, VLLMOPS, Setting

RIVAL = "python -c 'import typer'"
# Of these the parts are dear: seconds and hundreds of MB. `vllmops` begins with neither.
HEAVY = {"vllm", "torch", "transformers"}


def measure(setting: Setting) -> Iterator[Figure]:
    typer = (PYTHON, "-c", "import typer")
    targets = {
        "typer": typer,
        "version": (VLLMOPS, "--version"),
        "help": (VLLMOPS, "--help"),
        "again": typer,
    }
    for words in targets.values():
        setting.run(*words)  # compiles what is not
    values = interleave_measurements(
        4 if setting.short else 40,
        {name: partial(setting.seconds, *words) for name, words in targets.items()},
    )
    of, n = medians(values), len(values["typer"])
    wide = setting.short
    for name, times in (("version", 3.0 if wide else 1.3), ("help", 4.0 if wide else 2.0)):
        yield Figure(
            f"vllmops --{name}",
            "s",
            of[name],
            RIVAL,
            of["typer"],
            Limit(times),
            n,
            control=of["again"],
        )
    yield from measure_liveness_probe(setting)
    yield Figure(
        "modules of vLLM, torch, transformers imported by --help, ps, cache inspect FILE",
        "modules",
        heavy_imports(setting),
        "none",
        0,
        Limit(),
        1,
    )


def measure_liveness_probe(setting: Setting) -> Iterator[Figure]:
    """What a probe costs, which runs every few seconds: CPU time, for a machine is busy then."""
    folder = setting.home / "instances" / "probed"
    folder.mkdir(0o700, parents=True)
    record = {"state": "ready", "stage": "ready", "note": "", "started_at": 1.0, "processes": []}
    with os.fdopen(os.open(folder / "instance.json", os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        json.dump(record, file)

    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        setting.run(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    typer, probe = (PYTHON, "-c", "import typer"), (VLLMOPS, "probe", "--liveness", "-t", "probed")
    values = interleave_measurements(
        4 if setting.short else 40,
        {"probe": partial(cpu_s, *probe), "typer": partial(cpu_s, *typer)},
    )
    of = medians(values)
    yield Figure(
        "vllmops probe --liveness, CPU time",
        "s",
        of["probe"],
        RIVAL,
        of["typer"],
        Limit(1.5 if setting.short else 1.0),
        len(values["probe"]),
    )


def heavy_imports(setting: Setting) -> int:
    """How many modules that a command line has no use for are imported all the same."""
    file = setting.home / "snapshot.json"
    snapshot_files.save_snapshot(
        file,
        CacheSnapshot(server="none", samples=[CacheSample(taken_at=time.time(), processes=[])]),
    )
    found: set[str] = set()
    for words in (("--help",), ("ps",), ("cache", "inspect", str(file))):
        shown = setting.run(VLLMOPS, *words, PYTHONPROFILEIMPORTTIME="1").stderr.decode()
        names = {line.rpartition("|")[2].strip() for line in shown.splitlines()}
        if "vllmops.app" not in names:
            raise RuntimeError(f"Python did not tell what it imports: {shown[:500]}")
        found |= {name for name in names if name.partition(".")[0] in HEAVY}
    return len(found)
