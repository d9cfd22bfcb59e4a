"""The kernel's log, as far as it tells of GPUs.

It is ``/dev/kmsg``, see Documentation/ABI/testing; where that may not be read, systemd's journal,
which more users may.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ...model.server_snapshot import Xid

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # the kernel's longest; a shorter buffer gets an error
RECORDS = 200_000  # more than any log holds
XID = r"NVRM: Xid \((?:PCI:)?(?P<gpu>[^)]*)\): (?P<n>\d+)(?P<text>.*)"
LINE = re.compile(rf"^\d+,\d+,(?P<us>\d+),.*?;{XID}")
# A line of the journal: seconds since the machine began, the host, "kernel:".
TOLD = re.compile(rf"^\[ *(?P<s>\d+)\.(?P<us>\d{{6}})\] \S+ kernel: {XID}")
JOURNAL = (
    *("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager"),
    *("--output=short-monotonic", "--grep=NVRM: Xid"),
)
JOURNAL_S = 2.0


def read_xids(since_s: float, log: Path = KMSG) -> tuple[Xid, ...]:
    """The GPU errors in the kernel's log; none if it can't be read.

    Args:
        since_s: only those that are at most so many seconds old.
        log: where to read.
    """
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    if os.access(log, os.R_OK):
        # Fields that follow a record stand on lines of their own.
        lines = [
            (match, int(match["us"]) / 1e6) for match in map(LINE.match, read_records(log)) if match
        ]
    else:
        lines = [
            (match, int(match["s"]) + int(match["us"]) / 1e6)
            for match in map(TOLD.match, read_journal())
            if match
        ]
    return tuple(
        Xid(
            match["gpu"],
            int(match["n"]),
            match["text"].partition("\n")[0].strip(" ,"),
            max(now - at_s, 0.0),
        )
        for match, at_s in lines
        if now - at_s <= since_s
    )


def read_journal() -> list[str]:
    """The lines of systemd's journal about GPU errors; none where there is no journal."""
    try:
        done = subprocess.run(
            JOURNAL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JOURNAL_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def read_records(log: Path) -> Iterator[str]:
    """Every record of the log, oldest first; each read gives one."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(RECORDS):
            try:
                content = os.read(descriptor, RECORD_BYTES)
            except BrokenPipeError:
                continue  # the oldest was overwritten meanwhile: the next read goes on behind it
            if not content:
                return
            yield content.decode("utf-8", "replace")
    except OSError:  # BlockingIOError: there is no more
        return
    finally:
        os.close(descriptor)
