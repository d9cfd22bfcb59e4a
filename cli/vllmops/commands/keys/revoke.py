"""``vllmops keys revoke``."""

from __future__ import annotations

import time

from ... import output
from ...keys import file
from ...keys.ring import Key, Ring, Status, fresh
from ...output import Result, command, confirm
from ..options import Yes
from .keyring import Keyring, Kid, result, ring_path
from .servers import after


@command
def revoke(
    kid: Kid,
    *,
    yes: Yes = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Refuse everything sealed with a key, at once: for a leaked key.

    Conversations sealed with it cannot continue. A revoked primary is replaced
    by the next key, or by a fresh one.
    """
    path = ring_path(keyring)
    spare = Key.of(fresh(), Status.NEXT, time.time())
    breaks = harm(file.load(path), kid, time.time())
    if not yes:
        confirm(f"{breaks} Revoke {kid}?", f"vllmops keys revoke {kid} --yes")
    ring = file.change(path, lambda ring: ring.revoke(kid, spare, time.time()))
    more, notes = after(path, ring)
    return result(ring, str(path), {"kid": kid, "breaks": breaks, **more}, [breaks, *notes])


def harm(ring: Ring, kid: str, now: float) -> str:
    """What revoking a key breaks, in a sentence.

    Raises:
        VllmopsError: ``keys.unknown``.
    """
    match ring.get(kid).status:
        case Status.PRIMARY:
            heir = ring.without_over(now).next
            successor = heir.kid if heir else "a fresh key"
            return (
                f"Every client-held conversation sealed since {kid} became primary is refused from "
                f"now on; {successor} takes its place; for up to 2 s, servers that have not loaded "
                "that key refuse what it seals."
            )
        case Status.VERIFY_ONLY:
            return f"Conversations sealed with {kid} are refused from now on."
        case Status.NEXT:
            return f"Nothing breaks: no conversation is sealed with {kid} yet."
        case _:
            return f"Nothing changes: {kid} is revoked already."
