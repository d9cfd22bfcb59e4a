"""``vllmops keys export``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vllmops.model.environment import find_keyring_source
from vllmops.support import output
from vllmops.support.errors import make_usage_error
from vllmops.support.numbers import format_count
from vllmops.support.output import Result, VerbatimText, print_result

from ...keys import keyring_file
from ...keys.keyring import KeyRing
from .. import keygen
from ..keygen import Force, KeyFormat, Out
from .keyring_options import Keyring


@print_result
def export(
    kid: Annotated[
        str | None,
        typer.Argument(
            metavar="[KID]", help="Export one key instead of all; hex and env export the primary."
        ),
    ] = None,
    *,
    format_: Annotated[
        KeyFormat, typer.Option("--format", help="json and k8s-secret write a whole keyring.")
    ] = KeyFormat.JSON,
    out: Out = None,
    force: Force = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Print the secrets, instead of --out.")
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Export keys with their secrets, for servers that do not share the file."""
    if not out and not reveal:
        raise make_usage_error(
            "this would print secrets", "use --out FILE, or --reveal to print them"
        )
    ring = keyring_file.load_keyring_source(find_keyring_source(os.environ, keyring))
    if kid:
        ring = KeyRing(keys=(ring.get(kid),))
    match format_:
        case KeyFormat.JSON:
            text = keygen.format_keyring(ring)
        case KeyFormat.KUBERNETES:
            text = keygen.format_secret_manifest("keyring.json", keygen.format_keyring(ring))
        case _:
            text = keygen.format_key(ring.keys[0] if kid else ring.require_primary(), format_)
    if out:
        keygen.save_secret(out, text, force=force)
        if not json_:
            output.print_to_stderr(f"{format_count(len(ring.keys), 'key')} written to {out}")
    data = {"path": str(out) if out else None, "keys": [key.without_secret() for key in ring.keys]}
    return Result(
        data if out else {**data, "text": text}, lambda: () if out else [VerbatimText(text)]
    )
