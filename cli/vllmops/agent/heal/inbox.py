"""Whether an engine has taken in everything that was sent to it.

A request that only the front end knows may be on its way. It is not, once the engine's input thread
waits for messages and its main thread has nothing left to take.
"""

from __future__ import annotations

import sys
from typing import Any

from ...protocol.heal import Proof
from .. import objects

READER = "process_input_sockets"
WAITING = frozenset({"poll", "_poll"})  # of pyzmq


def look() -> list[Proof]:
    """One proof where the inbox is empty and its reader at rest."""
    core = objects.latest("engine-core")
    if core is None or not hasattr(core, "input_queue") or core.input_queue.qsize():
        return []
    if not any(resting(frame) for frame in sys._current_frames().values()):
        return []
    return [Proof(subject="inbox", what="its inbox is empty")]


def resting(top: Any) -> bool:
    """Whether a thread is the reader and waits for a message."""
    frame, inner = top, ""
    while frame is not None and frame.f_code.co_name != READER:
        inner = frame.f_code.co_name
        frame = frame.f_back
    return frame is not None and inner in WAITING
