"""Processes as the kernel sees them now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ...model import process_identity
from ...model.server_snapshot import ProcessState, ThreadTimeslices
from . import proc
from .processes import Process

NANO = 1e9
COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "fatbinary", "nvlink", "ninja", "gcc", "g++", "cc1plus", "cc1"}
    | {"clang", "clang++", "ld", "as", "hipcc"}
)


def observe_process(process: Process) -> ProcessState:
    """A process as the kernel sees it now."""
    title = process.title.split(" ")[0] if process.title.startswith("VLLM::") else ""
    known = ProcessState(
        role=process.role.value,
        pid=process.pid,
        create_time=process.create_time,
        title=title,
        **msgspec.structs.asdict(process.place),
    )
    try:
        fields = process_identity.read_stat_fields(process.pid)
    except OSError:
        return known
    if int(fields[19]) != process.start_ticks:
        return known  # another one has its pid
    return msgspec.structs.replace(
        known,
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) / process_identity.TICKS,
        main=read_timeslices(process.pid),
        threads=int(fields[17]),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGESIZE"),
    )


def read_timeslices(pid: int) -> ThreadTimeslices | None:
    """The turns of a process's main thread; None if the kernel does not count them."""
    try:
        ran, waited, count = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
    except (OSError, ValueError):
        return None
    return ThreadTimeslices(ran / NANO, waited / NANO, count)


def find_compilers(processes: Iterable[Process]) -> Iterator[str]:
    """The names of compilers that run below some processes."""
    queue = [process.pid for process in processes]
    for pid in queue:
        with suppress(OSError):
            queue += [child for child in proc.list_child_pids(pid) if child not in queue]
    for pid in queue:
        with suppress(OSError):
            name = proc.read_process_name(pid)
            if name in COMPILERS:
                yield name
