"""The messages that ended a thread of an engine, which a bundle takes along."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec

from ...model.fatal_messages import FatalMessage, FatalMessages, MessageFrame
from ..identity import make_process_fields

KEPT = 3  # messages; each thread that was started again may read another such one
MESSAGE_BYTES, FRAMES = 1 << 20, 64  # of a message, whose images may be large
LETTERS = 1000  # of what can't be encoded

_kept: deque[FatalMessage] = deque(maxlen=KEPT)


def keep_fatal_message(
    thread: str, error: str, requests: tuple[str, ...], parts: Sequence[Any]
) -> None:
    """Keep a message that has just ended a thread.

    Args:
        thread: as in `FatalMessage`.
        error: likewise.
        requests: likewise.
        parts: buffers; nothing is kept without any.
    """
    frames, left = list[MessageFrame](), MESSAGE_BYTES
    for part in parts[:FRAMES]:
        view = memoryview(getattr(part, "buffer", part)).cast("B")
        frames.append(MessageFrame(size=view.nbytes, head=bytes(view[:left])))
        left -= len(frames[-1].head)
    if frames:
        kept = FatalMessage(
            thread=thread,
            failed_at=time.time(),
            error=error,
            requests=requests,
            frames=tuple(frames),
        )
        _kept.append(kept)


def find_message_parts(reader: FrameType, inner: Sequence[FrameType]) -> list[Any]:
    """The parts of the message that a reader had.

    Args:
        reader: its frame, in which the parts have these names in all versions of vLLM.
        inner: what it called. While it waits in ZeroMQ, its frame has the message before.
    """
    if not inner or inner[0].f_globals.get("__name__", "").startswith("zmq"):
        return []
    known = reader.f_locals
    return [known["type_frame"], *known.get("data_frames", ())] if "type_frame" in known else []


def encode_outputs(outputs: Sequence[Any]) -> list[bytes]:
    """Outputs that could not be encoded, in one part."""
    return [msgspec.msgpack.encode(list(outputs), enc_hook=lambda one: repr(one)[:LETTERS])]


def list_fatal_messages() -> FatalMessages:
    """``GET /messages``."""
    return FatalMessages(pid=os.getpid(), **make_process_fields(), messages=tuple(_kept))
