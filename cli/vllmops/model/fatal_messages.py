"""Messages that ended a thread of an engine."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer


class MessageFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message.

    Args:
        size: in bytes.
        head: what it begins with: all of it, unless the message is large.
    """

    size: int
    head: bytes


class FatalMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that ended the thread that read or wrote it.

    Args:
        thread: its name, for a person.
        failed_at: when, in seconds since the epoch.
        error: what was raised.
        requests: ids of the requests that it was about.
        frames: as vLLM received them; of outputs that could not be encoded, one that holds what
            can't be encoded as text.
    """

    thread: str
    failed_at: float = msgspec.field(name="at")
    error: str
    requests: tuple[str, ...]
    frames: tuple[MessageFrame, ...]


class FatalMessages(AgentAnswer, frozen=True, kw_only=True):
    """The last messages that ended a thread of this process.

    Args:
        pid: process id.
        role: as in `Hello`.
        messages: the oldest first. They hold prompts.
    """

    pid: int
    role: str
    messages: tuple[FatalMessage, ...] = ()
