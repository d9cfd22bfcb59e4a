"""Which vLLM processes of this machine are a test's own: other tests' servers run beside it.

Run as a program, it is `vllmops` that sees those of its state directory alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import ProcessEntry
from vllmops.model.roles import find_title_role


def foreign(seen: ProcessEntry, home: Path) -> bool:
    """Whether a process is one of vLLM, and of another state directory."""
    vllm = (
        find_title_role(seen.arguments)
        or processes.parse_serve_arguments(seen.arguments) is not None
    )
    return bool(vllm) and not in_home(seen.pid, home)


def in_home(pid: int, home: Path) -> bool:
    """Whether a process, a program or a fork of this one (`commands.become`), has that home."""
    try:
        place = Path(f"/proc/{pid}")
        environment = (place / "environ").read_bytes().split(b"\0")
        name, _, state = (
            (place / "stat").read_text("utf-8", "replace").partition("(")[2].rpartition(") ")
        )
    except OSError:
        return False
    ours = name == home.name or f"VLLMOPS_HOME={home}".encode() in environment
    return ours and pid != os.getpid() and state[0] not in "ZX"


def table_of(home: Path) -> Callable[[], processes.Table]:
    """The process table without foreign processes."""
    table = processes.read_process_table
    return lambda: {pid: seen for pid, seen in table().items() if not foreign(seen, home)}


if __name__ == "__main__":
    from vllmops import app

    if place := os.environ.get("VLLMOPS_HOME"):
        processes.read_process_table = table_of(Path(place))
    app.main()
