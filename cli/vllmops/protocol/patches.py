"""What an agent says about the patches of its process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .engine import Answer


class State(StrEnum):
    """What became of a patch in one process."""

    FIXED = "fixed upstream"
    APPLIED = "applied"
    FAILED = "failed"
    OFF = "off"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One patch in one process.

    Args:
        id: the patch.
        state: what became of it.
        reason: why it failed, in words.
        present: whether the defect is there by a probe made just now; None where none was made.
    """

    id: str
    state: State
    reason: str | None = None
    present: bool | None = None


class ProcessPatches(Answer, frozen=True, kw_only=True):
    """All patches of one process; those whose modules it has not imported are left out.

    Args:
        pid: process id.
        role: as in `Hello`.
        vllm_version: None where it can't be told.
        patches: in the registry's order.
        seconds: what probing and applying took.
    """

    pid: int
    role: str
    vllm_version: str | None
    patches: list[Verdict]
    seconds: float
