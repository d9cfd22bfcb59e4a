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
from .ring import Key, Ring, Status


class Stage(StrEnum):
    """The stage of a rotation."""

    EMPTY = "empty"  # no key seals
    SPREADING = "spreading"  # a key is next, and not every server has it
    READY = "ready"  # a key is next, and every server has it
    LAGGING = "lagging"  # a server's keys differ from the file
    OVERLAP = "overlap"  # an old key opens what it sealed
    OVER = "over"  # the time of a key is over
    STEADY = "steady"


def stage(ring: Ring, held: Collection[ProcessKeys], now: float) -> Stage:
    """The stage of a ring's rotation.

    Args:
        ring: of the file.
        held: what each process that follows it holds.
        now: seconds since the epoch.
    """
    live = ring.without_over(now)
    if coming := live.next:
        return Stage.SPREADING if lacking(coming.kid, held) else Stage.READY
    if not ring.primary:
        return Stage.EMPTY
    if any(not up_to_date(process, ring) for process in held):
        return Stage.LAGGING
    if live != ring:
        return Stage.OVER
    return Stage.OVERLAP if live.those(Status.VERIFY_ONLY) else Stage.STEADY


def lacking(kid: str, held: Collection[ProcessKeys]) -> list[ProcessKeys]:
    """The processes that could not open what that key seals."""
    return [
        process
        for process in held
        if not any(key.kid == kid and key.status != Status.REVOKED for key in process.keys)
    ]


def up_to_date(held: ProcessKeys, ring: Ring) -> bool:
    """Whether a process holds the keys of the ring."""
    return list(held.keys) == [key.public() for key in ring.keys]


def begin(ring: Ring, fresh: Key, now: float) -> Ring:
    """The ring with a key that is next, a fresh one if needed, and without those that are over."""
    ring = ring.without_over(now)
    return ring if ring.next else ring.add(fresh)


def finish(ring: Ring, kid: str, now: float, overlap_s: float) -> Ring:
    """The ring with the key promoted; it may have been by somebody else, too.

    Raises:
        VllmopsError: ``keys.overtaken`` if it was taken out or revoked meanwhile.
    """
    key = ring.find(kid)
    if key is None or key.status is Status.REVOKED:
        raise VllmopsError(
            "keys.overtaken",
            f"{kid} was {'revoked' if key else 'removed'} while servers loaded it",
            "start again with vllmops keys rotate",
        )
    return ring if key.status is not Status.NEXT else ring.promote(kid, now, overlap_s)
