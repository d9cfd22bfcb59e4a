"""The kernel's log, as far as it tells of GPUs: ``/dev/kmsg``, see Documentation/ABI/testing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from ..protocol.server import Xid

KMSG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # the kernel's longest; a shorter buffer gets an error
RECORDS = 200_000  # more than any log holds
LINE = re.compile(
    r"^\d+,\d+,(?P<us>\d+),.*?;NVRM: Xid \((?:PCI:)?(?P<gpu>[^)]*)\): (?P<n>\d+)(?P<text>.*)"
)


def xids(since_s: float, log: Path = KMSG) -> tuple[Xid, ...]:
    """The GPU errors in the kernel's log; none if it can't be read.

    Args:
        since_s: only those that are at most so many seconds old.
        log: where to read.
    """
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    xids_ = []
    for record in records(log):
        # Fields that follow a record stand on lines of their own.
        if match := LINE.match(record):
            age_s = max(now - int(match["us"]) / 1e6, 0.0)
            if age_s <= since_s:
                text = match["text"].partition("\n")[0].strip(" ,")
                xids_.append(Xid(match["gpu"], int(match["n"]), text, age_s))
    return tuple(xids_)


def records(log: Path) -> Iterator[str]:
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
