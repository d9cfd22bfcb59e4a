"""The stage of a rotation, and its steps: pure functions of a ring and the servers' keys.

Add, wait until every server has loaded the key, promote, and keep the old one for as long as
carriers live. Each step looks at the ring anew, so that a rotation that was cut off goes on where
it was, and two at once are one.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from ..errors import VllmopsError
from ..protocol.keys import ProcessKeys
from .ring import Key, KeyRing, KeyStatus


class RotationStage(StrEnum):
    """The stage of a rotation."""

    EMPTY = "empty"  # no key seals
    SPREADING = "spreading"  # a key is next, and not every server has it
    READY = "ready"  # a key is next, and every server has it
    LAGGING = "lagging"  # a server's keys differ from the file
    OVERLAP = "overlap"  # an old key opens what it sealed
    OVER = "over"  # the time of a key is over
    STEADY = "steady"


def find_stage(ring: KeyRing, held: Collection[ProcessKeys], now: float) -> RotationStage:
    """The stage of a ring's rotation.

    Args:
        ring: of the file.
        held: what each process that follows it holds.
        now: seconds since the epoch.
    """
    live = ring.without_expired(now)
    if coming := live.next_key:
        return (
            RotationStage.SPREADING
            if find_processes_without_key(coming.kid, held)
            else RotationStage.READY
        )
    if not ring.primary:
        return RotationStage.EMPTY
    if any(not is_up_to_date(process, ring) for process in held):
        return RotationStage.LAGGING
    if live != ring:
        return RotationStage.OVER
    return (
        RotationStage.OVERLAP if live.select_keys(KeyStatus.VERIFY_ONLY) else RotationStage.STEADY
    )


def find_processes_without_key(kid: str, held: Collection[ProcessKeys]) -> list[ProcessKeys]:
    """The processes that could not open what that key seals."""
    return [
        process
        for process in held
        if not any(key.kid == kid and key.status != KeyStatus.REVOKED for key in process.keys)
    ]


def is_up_to_date(held: ProcessKeys, ring: KeyRing) -> bool:
    """Whether a process holds the keys of the ring."""
    return list(held.keys) == [key.without_secret() for key in ring.keys]


def begin_rotation(ring: KeyRing, fresh: Key, now: float) -> KeyRing:
    """The ring with a key that is next, a fresh one if needed, and without those that are over."""
    ring = ring.without_expired(now)
    return ring if ring.next_key else ring.add(fresh)


def finish_rotation(ring: KeyRing, kid: str, now: float, overlap_s: float) -> KeyRing:
    """The ring with the key promoted; it may have been by somebody else, too.

    Raises:
        VllmopsError: ``keys.overtaken`` if it was taken out or revoked meanwhile.
    """
    key = ring.find(kid)
    if key is None or key.status is KeyStatus.REVOKED:
        raise VllmopsError(
            "keys.overtaken",
            f"{kid} was {'revoked' if key else 'removed'} while servers loaded it",
            "start again with vllmops keys rotate",
        )
    return ring if key.status is not KeyStatus.NEXT else ring.promote(kid, now, overlap_s)
