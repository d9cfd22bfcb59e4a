"""What the kernel knows about a process and Python stacks do not show."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from . import proc

FILES = ("status", "stat", "limits", "cgroup", "wchan", "io", "oom_score", "schedstat")
# These wait for the process's memory map, held as long as a process hangs.
SLOW = ("smaps_rollup",)
THREADS = 512


def render_process_facts(pid: int) -> Iterator[str]:
    """The facts, one section after the other, those that may take long last."""
    place = proc.get_process_folder(pid)
    for name in FILES:
        yield format_section(name, read_or_explain(place / name))
    yield format_section("file descriptors", render_descriptors(place))
    yield format_section("threads", "\n".join(render_threads(place)))
    for name in SLOW:
        yield format_section(name, read_or_explain(place / name))


def format_section(title: str, text: str) -> str:
    return f"== {title}\n{text.strip()}\n\n"


def read_or_explain(path: Path) -> str:
    """A file of ``/proc``; in its place why it can't be read."""
    try:
        return proc.read_lossy_text(path)
    except OSError as error:
        return f"({error.strerror})"


def render_descriptors(process_folder: Path) -> str:
    """How many files of each kind are open; their names could contain what users sent."""
    kinds: Counter[str] = Counter()
    try:
        names = os.listdir(process_folder / "fd")
    except OSError as error:
        return f"({error.strerror})"
    for name in names:
        try:
            target = os.readlink(process_folder / "fd" / name)
        except OSError:
            continue  # closed meanwhile
        kinds["/".join(target.split("/")[:2]) if "/" in target else target.partition(":")[0]] += 1
    lines = "\n".join(f"{count:6} {kind}" for kind, count in kinds.most_common())
    return f"{len(names):6} open\n{lines}"


def render_threads(process_folder: Path) -> Iterator[str]:
    """A line for each thread, below it the kernel's stack where that may be read."""
    try:
        tasks = sorted((process_folder / "task").iterdir(), key=lambda task: int(task.name))
    except OSError as error:
        yield f"({error.strerror})"
        return
    yield f"{'tid':>8} state {'user':>8} {'system':>8}  name, where it waits in the kernel"
    for task in tasks[:THREADS]:
        name, _, rest = read_or_explain(task / "stat").partition("(")[2].rpartition(")")
        fields = rest.split()
        if not fields:
            continue  # gone meanwhile
        yield (
            f"{task.name:>8} {fields[0]:5} {fields[11]:>8} {fields[12]:>8}  {name}, "
            f"{read_or_explain(task / 'wchan') or '-'}"
        )
        stack = read_or_explain(task / "stack")
        if not stack.startswith("("):
            yield from (f"{'':10}{line}" for line in stack.splitlines())
    if len(tasks) > THREADS:
        yield f"and {len(tasks) - THREADS} more"
