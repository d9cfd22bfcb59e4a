"""``vllmops keys verify``: which key sealed a carrier, when, for whom, and whether it is valid."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ... import output
from ...errors import Exit
from ...files import STDIN, read
from ...keys import file
from ...keys.ring import when
from ...numbers import many
from ...output import Result, command, span
from .keyring import Keyring

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...keys.carrier import Carrier


@command
def verify(
    carrier: Annotated[
        str,
        typer.Argument(metavar="CARRIER", help="The `encrypted_content`; - reads it from stdin."),
    ],
    *,
    reveal: Annotated[bool, typer.Option("--reveal", help="Also show the conversation.")] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Show which key sealed a carrier, when, for whom, and whether it is valid.

    Exit code 1 if a server with this keyring would refuse it.
    """
    from ...keys.carrier import MOST_BYTES, CarrierError, genuine, refusal  # noqa: PLC0415

    if carrier == STDIN:
        carrier = read(Path(STDIN), 2 * MOST_BYTES).decode("ascii", "replace")
    text = carrier.strip().strip("\"'")
    ring = file.source(os.environ, keyring).load()
    data: dict[str, Any] = {"valid": False, "case": None, "reason": "", "kid": None}
    try:
        opened = genuine(text, ring)
    except CarrierError as error:
        reason = error.message
        data |= {"case": error.case, "reason": reason}
        return Result(data, lambda: [verdict(reason)], Exit.FAILED)
    key = ring.get(opened.kid)
    case, reason = refusal(opened, key, time.time()) or (None, "")
    data |= {"valid": case is None, "case": case, "reason": reason, "key_status": key.status}
    data |= {**msgspec.to_builtins(opened), "items": len(opened.history)}
    if not reveal:
        del data["history"]
    code = Exit.OK if case is None else Exit.FAILED
    return Result(data, lambda: [verdict(reason), *facts(opened, data, reveal)], code)


def verdict(reason: str) -> RenderableType:
    """Whether a carrier is valid, human-readable."""
    if reason:
        return output.styled(f"refused: {reason}", "bold red")
    return output.styled("valid", "bold green")


def facts(opened: Carrier, data: dict[str, Any], reveal: bool) -> Iterator[RenderableType]:
    """The facts in a genuine carrier, human-readable."""
    rows = [
        ("key", f"{opened.kid} ({data['key_status']})"),
        ("format", "v2 (encrypted)" if opened.format == 2 else "signed-v1 (readable)"),
    ]
    if opened.issued_at is not None:
        rows += [
            ("sealed", f"{when(opened.issued_at)}, {span(time.time() - opened.issued_at)} ago"),
            ("valid until", when(opened.expires_at)),
            ("model", opened.model or ""),
            ("owner", opened.owner or "none: no API key was used"),
        ]
    rows.append(("history", many(len(opened.history), "item") + ("" if reveal else "; --reveal")))
    yield output.facts(rows)
    if reveal:
        # msgspec can't write half of a surrogate pair, which clients cut texts to.
        yield output.JsonText(json.dumps(opened.history, indent=2, ensure_ascii=False))
