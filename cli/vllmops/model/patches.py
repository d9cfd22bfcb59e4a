"""What an agent says about the patches of its process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .agent_state import AgentAnswer


class PatchState(StrEnum):
    """The state of a patch in one process."""

    FIXED = "fixed upstream"
    APPLIED = "applied"
    FAILED = "failed"
    OFF = "off"


class PatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One patch in one process.

    Args:
        id: the patch.
        state: whether it is applied, and if not, why.
        reason: why it failed, in words.
        present: whether a probe finds the defect now; None if none was run.
    """

    id: str
    state: PatchState
    reason: str | None = None
    present: bool | None = None


class ProcessPatches(AgentAnswer, frozen=True, kw_only=True):
    """All patches of one process, except those whose modules it has not imported.

    Args:
        pid: process id.
        role: as in `Hello`.
        vllm_version: None if unknown.
        patches: in the registry's order.
        seconds: the duration of probing and applying.
        problems: what the agent can't do with this vLLM, in words.
        cpu_s: CPU seconds of the agent's own threads so far.
        repairs: how often something was repaired, by what it was.
    """

    pid: int
    role: str
    vllm_version: str | None
    patches: list[PatchReport]
    seconds: float
    problems: tuple[str, ...] = ()
    cpu_s: float = 0.0
    repairs: dict[str, int] = msgspec.field(default_factory=dict)
