"""``vllmops keys export``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ... import output
from ...errors import usage
from ...keys import file
from ...keys.ring import Ring
from ...numbers import many
from ...output import Result, Verbatim, command
from .. import keygen
from ..keygen import Force, Format, Out
from .keyring import Keyring


@command
def export(
    kid: Annotated[
        str | None,
        typer.Argument(
            metavar="[KID]", help="Export one key instead of all; hex and env export the primary."
        ),
    ] = None,
    *,
    format_: Annotated[
        Format, typer.Option("--format", help="json and k8s-secret write a whole keyring.")
    ] = Format.JSON,
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
        raise usage("this would print secrets", "use --out FILE, or --reveal to print them")
    ring = file.source(os.environ, keyring).load()
    if kid:
        ring = Ring(keys=(ring.get(kid),))
    match format_:
        case Format.JSON:
            text = keygen.whole(ring)
        case Format.KUBERNETES:
            text = keygen.manifest("keyring.json", keygen.whole(ring))
        case _:
            text = keygen.spelt(ring.keys[0] if kid else ring.sealing(), format_)
    if out:
        keygen.save(out, text, force=force)
        if not json_:
            output.say(f"{many(len(ring.keys), 'key')} written to {out}")
    data = {"path": str(out) if out else None, "keys": [key.public() for key in ring.keys]}
    return Result(data if out else {**data, "text": text}, lambda: () if out else [Verbatim(text)])
