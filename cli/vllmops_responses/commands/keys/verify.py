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

from vllmops.model.environment import find_keyring_source
from vllmops.support import output
from vllmops.support.durations import format_utc_time
from vllmops.support.errors import ExitCode
from vllmops.support.files import STDIN, read_input
from vllmops.support.numbers import format_count
from vllmops.support.output import Result, format_duration, print_result

from ...keys import keyring_file
from .keyring_options import Keyring

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...keys.carrier import Carrier


@print_result
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
    from ...keys.carrier import MOST_BYTES, CarrierError, find_refusal, verify_carrier  # noqa: PLC0415

    if carrier == STDIN:
        carrier = read_input(Path(STDIN), 2 * MOST_BYTES).decode("ascii", "replace")
    text = carrier.strip().strip("\"'")
    ring = keyring_file.load_keyring_source(find_keyring_source(os.environ, keyring))
    data: dict[str, Any] = {"valid": False, "case": None, "reason": "", "kid": None}
    try:
        opened = verify_carrier(text, ring)
    except CarrierError as error:
        reason = error.message
        data |= {"case": error.case, "reason": reason}
        return Result(data, lambda: [render_verdict(reason)], ExitCode.FAILED)
    key = ring.get(opened.kid)
    case, reason = find_refusal(opened, key, time.time()) or (None, "")
    data |= {"valid": case is None, "case": case, "reason": reason, "key_status": key.status}
    data |= {**msgspec.to_builtins(opened), "items": len(opened.history)}
    if not reveal:
        del data["history"]
    code = ExitCode.OK if case is None else ExitCode.FAILED
    return Result(
        data, lambda: [render_verdict(reason), *render_carrier_facts(opened, data, reveal)], code
    )


def render_verdict(reason: str) -> RenderableType:
    """Whether a carrier is valid, human-readable."""
    if reason:
        return output.style_text(f"refused: {reason}", "bold red")
    return output.style_text("valid", "bold green")


def render_carrier_facts(
    carrier: Carrier, data: dict[str, Any], reveal: bool
) -> Iterator[RenderableType]:
    """The facts in a genuine carrier, human-readable."""
    rows = [
        ("key", f"{carrier.kid} ({data['key_status']})"),
        ("format", "v2 (encrypted)" if carrier.format == 2 else "signed-v1 (readable)"),
    ]
    if carrier.issued_at is not None:
        rows += [
            (
                "sealed",
                f"{format_utc_time(carrier.issued_at)}, "
                f"{format_duration(time.time() - carrier.issued_at)} ago",
            ),
            ("valid until", format_utc_time(carrier.expires_at)),
            ("model", carrier.model or ""),
            ("owner", carrier.owner or "none: no API key was used"),
        ]
    rows.append(
        ("history", format_count(len(carrier.history), "item") + ("" if reveal else "; --reveal"))
    )
    yield output.make_facts_table(rows)
    if reveal:
        # msgspec can't write half of a surrogate pair, which clients cut texts to.
        yield output.JsonText(json.dumps(carrier.history, indent=2, ensure_ascii=False))
