"""What was read from stacks that somebody pasted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .stacks import Frame, StacksSnapshot

if TYPE_CHECKING:
    from .server_snapshot import RasCapture


@dataclass(frozen=True)
class CrashTraceback:
    """A traceback: where an exception came from, or a fatal error of the interpreter.

    Args:
        process: as the log prefix names it, such as ``EngineCore pid 7``; empty if unknown.
        error: the last line, such as ``ValueError: no``; empty if it is missing.
        frames: innermost first, as in stacks.
    """

    process: str
    error: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class PastedStacks:
    """Stacks, crashes, and the text around them.

    Args:
        samples: by time; a process that appears twice is in two samples.
        crashes: tracebacks, in the order of the text.
        text: without prefixes and escape codes, to find log lines in it.
        complete: whether all processes of the server are known to be in it.
        sections: what each person wrote, where the text is an issue with several that tell
            something; the other fields are then of all of them together.
        ras: NCCL's reports of a live server, in its order.
    """

    samples: tuple[StacksSnapshot, ...]
    crashes: tuple[CrashTraceback, ...] = ()
    text: str = ""
    complete: bool = False
    sections: tuple[PastedStacks, ...] = ()
    ras: tuple[RasCapture, ...] = ()
