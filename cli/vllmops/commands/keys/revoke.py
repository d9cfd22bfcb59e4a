"""``vllmops keys revoke``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ... import output
from ...keys import file
from ...keys.ring import Key, Ring, Status, fresh
from ...output import Result, command, confirm
from .keyring import Keyring, Kid, result, ring_path
from .servers import after


@command
def revoke(
    kid: Kid,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Refuse whatever a key has sealed, at once: for a key that got out.

    Conversations that it sealed can't go on. In the place of a primary
    comes the next key, or a fresh one.
    """
    path = ring_path(keyring)
    spare = Key.of(fresh(), Status.NEXT, time.time())
    breaks = harm(file.load(path), kid)
    if not yes:
        confirm(f"{breaks} Revoke {kid}?", f"vllmops keys revoke {kid} --yes")
    ring = file.change(path, lambda ring: ring.revoke(kid, spare))
    more, notes = after(path, ring)
    return result(ring, str(path), {"kid": kid, "breaks": breaks, **more}, [breaks, *notes])


def harm(ring: Ring, kid: str) -> str:
    """What revoking a key breaks, in a sentence.

    Raises:
        VllmopsError: ``keys.unknown``.
    """
    match ring.get(kid).status:
        case Status.PRIMARY:
            heir = (
                f"{ring.next.kid} takes its place" if ring.next else "a fresh key takes its place"
            )
            return (
                f"Every conversation that clients carry and that was sealed since {kid} became "
                f"primary is refused from now on; {heir}, which servers that have not "
                "loaded it refuse for up to 2 s."
            )
        case Status.VERIFY_ONLY:
            return (
                f"Conversations that {kid} sealed before it was replaced are refused from now on."
            )
        case Status.NEXT:
            return f"Nothing breaks: {kid} has sealed nothing yet."
        case _:
            return f"Nothing changes: {kid} was revoked before."
