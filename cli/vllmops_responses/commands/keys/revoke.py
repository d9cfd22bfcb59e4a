"""``vllmops keys revoke``."""

from __future__ import annotations

import time

from vllmops.commands.options import Yes
from vllmops.support import output
from vllmops.support.output import Result, print_result, require_confirmation

from ...keys import keyring_file
from ...keys.keyring import Key, KeyRing, KeyStatus, generate_secret
from .keyring_options import Keyring, Kid, find_keyring_path, make_keyring_result
from .keys_in_use import collect_load_status


@print_result
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
    path = find_keyring_path(keyring)
    spare = Key.from_secret(generate_secret(), KeyStatus.NEXT, time.time())
    breaks = describe_revocation_impact(keyring_file.load_keyring(path), kid, time.time())
    if not yes:
        require_confirmation(f"{breaks} Revoke {kid}?", f"vllmops keys revoke {kid} --yes")
    ring = keyring_file.change_keyring(path, lambda ring: ring.revoke(kid, spare, time.time()))
    more, notes = collect_load_status(path, ring)
    return make_keyring_result(
        ring, str(path), {"kid": kid, "breaks": breaks, **more}, [breaks, *notes]
    )


def describe_revocation_impact(keyring: KeyRing, kid: str, now: float) -> str:
    """What revoking a key breaks, in a sentence.

    Raises:
        VllmopsError: ``keys.unknown``.
    """
    match keyring.get(kid).status:
        case KeyStatus.PRIMARY:
            heir = keyring.without_expired(now).next_key
            successor = heir.kid if heir else "a fresh key"
            return (
                f"Every client-held conversation sealed since {kid} became primary is refused from "
                f"now on; {successor} takes its place; for up to 2 s, servers that have not loaded "
                "that key refuse what it seals."
            )
        case KeyStatus.VERIFY_ONLY:
            return f"Conversations sealed with {kid} are refused from now on."
        case KeyStatus.NEXT:
            return f"Nothing breaks: no conversation is sealed with {kid} yet."
        case _:
            return f"Nothing changes: {kid} is revoked already."
