"""A file that shows each second that this process still runs Python.

Written with ``pwrite``, not through a mapping: on a full disk a mapped write raises SIGBUS and
would kill the server. A full disk or a removed directory stops only the heartbeat.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...model.agent_state import BEAT_BYTES, BEAT_INTERVAL_S, Heartbeat
from ...model.json_text import encode_json
from ...support.background import ErrorReporter
from ..log import log


class HeartbeatWriter:
    """Beats into `path` from a daemon thread until `stop`.

    Args:
        path: the file; an existing one is overwritten.
        make_heartbeat: what to write, given the sequence number and the monotonic time in seconds.
    """

    def __init__(self, path: Path, make_heartbeat: Callable[[int, float], Heartbeat]) -> None:
        self.path = path
        self.make_heartbeat = make_heartbeat
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.stop_requested = threading.Event()
        self.reporter = ErrorReporter(
            f"the heartbeat can't be written to {path}: vllmops shows this process as stuck",
            log.warning,
        )

    def start(self) -> None:
        self.write_heartbeat(0)
        threading.Thread(target=self.run_until_stopped, name="vllmops-heart", daemon=True).start()

    def run_until_stopped(self) -> None:
        sequence = 0
        while not self.stop_requested.wait(BEAT_INTERVAL_S):
            sequence += 1
            self.write_heartbeat(sequence)

    def write_heartbeat(self, sequence: int) -> None:
        # An error must not end the thread: the next write may succeed.
        try:
            beat = self.make_heartbeat(sequence, time.monotonic())
            record = encode_json(beat)
            if len(record) > BEAT_BYTES:
                record = encode_json(msgspec.structs.replace(beat, oldest_request_id=""))
            if len(record) > BEAT_BYTES:
                # Nobody could read a part of it.
                raise ValueError(f"a record of {len(record)} bytes is too long")
            os.pwrite(self.fd, record.ljust(BEAT_BYTES), 0)
        except Exception as error:
            self.reporter.report(error)

    def stop(self) -> None:
        self.stop_requested.set()
