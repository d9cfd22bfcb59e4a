"""The stage of a rotation, and its steps: pure functions of a ring and the servers' keys.

Add, wait until every server has loaded the key, promote, and keep the old one for as long as
carriers live. Each step looks at the ring anew, so that a rotation that was cut off goes on where
it was, and two at once are one.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from vllmops.model.keys import ProcessKeys
from vllmops.support.errors import VllmopsError

from .keyring import Key, KeyRing, KeyStatus


class RotationStage(StrEnum):
    """The stage of a rotation."""

    EMPTY = "empty"  # no key seals
    SPREADING = "spreading"  # a key is next, and not every server has it
    READY = "ready"  # a key is next, and every server has it
    LAGGING = "lagging"  # a server's keys differ from the file
    OVERLAP = "overlap"  # an old key opens what it sealed
    OVER = "over"  # the time of a key is over
    STEADY = "steady"


def find_stage(keyring: KeyRing, processes: Collection[ProcessKeys], now: float) -> RotationStage:
    """The stage of a ring's rotation.

    Args:
        keyring: of the file.
        processes: what each process that follows it holds.
        now: seconds since the epoch.
    """
    live = keyring.without_expired(now)
    if coming := live.next_key:
        return (
            RotationStage.SPREADING
            if find_processes_without_key(coming.kid, processes)
            else RotationStage.READY
        )
    if not keyring.primary:
        return RotationStage.EMPTY
    if any(not is_up_to_date(process, keyring) for process in processes):
        return RotationStage.LAGGING
    if live != keyring:
        return RotationStage.OVER
    return (
        RotationStage.OVERLAP if live.select_keys(KeyStatus.VERIFY_ONLY) else RotationStage.STEADY
    )


def find_processes_without_key(kid: str, processes: Collection[ProcessKeys]) -> list[ProcessKeys]:
    """The processes that could not open what that key seals."""
    return [
        process
        for process in processes
        if not any(key.kid == kid and key.status != KeyStatus.REVOKED for key in process.keys)
    ]


def is_up_to_date(process_keys: ProcessKeys, keyring: KeyRing) -> bool:
    """Whether a process holds the keys of the ring."""
    return list(process_keys.keys) == [key.without_secret() for key in keyring.keys]


def begin_rotation(keyring: KeyRing, new_key: Key, now: float) -> KeyRing:
    """The ring with a key that is next, a fresh one if needed, and without those that are over."""
    keyring = keyring.without_expired(now)
    return keyring if keyring.next_key else keyring.add(new_key)


def finish_rotation(keyring: KeyRing, kid: str, now: float, overlap_s: float) -> KeyRing:
    """The ring with the key promoted; it may have been by somebody else, too.

    Raises:
        VllmopsError: ``keys.overtaken`` if it was taken out or revoked meanwhile.
    """
    key = keyring.find(kid)
    if key is None or key.status is KeyStatus.REVOKED:
        raise VllmopsError(
            "keys.overtaken",
            f"{kid} was {'revoked' if key else 'removed'} while servers loaded it",
            "start again with vllmops keys rotate",
        )
    return keyring if key.status is not KeyStatus.NEXT else keyring.promote(kid, now, overlap_s)
