"""What an agent says about the keys of its process; no secret is in it."""

from __future__ import annotations

import msgspec

from .agent_state import AgentAnswer


class KeyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Times are seconds since the epoch.

    Args:
        kid: its name.
        status: ``next``, ``primary``, ``verify-only`` or ``revoked``.
        created_at: None if it is not known.
        not_after: when it stops opening anything, None for never.
        fingerprint: of the secret, the same wherever the key is.
    """

    kid: str
    status: str
    created_at: int | None = None
    not_after: int | None = None
    fingerprint: str


class ProcessKeys(AgentAnswer, frozen=True, kw_only=True):
    """The keys that a process works with.

    Args:
        pid: process id.
        role: as in `Hello`.
        keyring: the file that it follows, None if it follows none.
        source: ``file``, ``environment``, or ``none`` for a process that has no use for keys.
        keys: that it holds; they may differ from the file.
        loaded_at: when it loaded them, seconds since the epoch; None if it holds none.
        problem: why its keys differ from the file, in words; empty if they do not.
    """

    pid: int
    role: str
    keyring: str | None = None
    source: str = "none"
    keys: tuple[KeyMetadata, ...] = ()
    loaded_at: float | None = None
    problem: str = ""
