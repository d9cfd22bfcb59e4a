"""Starts what outlives the command that starts it: supervisors and watches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def start_detached(
    module: str,
    arguments: Sequence[str],
    keep: Sequence[int],
    log: int | None = None,
    directory: str | None = None,
) -> None:
    """Start a module as a program, in a session of its own: a terminal's Ctrl-C is not for it.

    Args:
        module: its name.
        arguments: its arguments.
        keep: open files that it gets, by the same numbers.
        log: the open file that it writes to, None for this process's own output.
        directory: where it runs, None for this process's own.

    Raises:
        OSError: it can't be started.
    """
    subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=directory,
        pass_fds=keep,
        start_new_session=True,
    )
