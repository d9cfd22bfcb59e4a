"""``vllmops keys import``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ... import output
from ...errors import usage
from ...files import read, spelt
from ...keys import file
from ...keys.ring import Key, Ring, Status, from_hex
from ...output import Result, command
from .keyring import Keyring, first, result, ring_path
from .servers import after


@command
def import_(
    source: Annotated[
        Path,
        typer.Argument(
            readable=False,
            metavar="FILE",
            help="A file that keygen or export wrote; - reads stdin.",
        ),
    ],
    *,
    verify_only: Annotated[
        bool,
        typer.Option(
            "--verify-only",
            help="Import a single key as verify-only: it opens existing state and seals nothing.",
        ),
    ] = False,
    keyring: Keyring = None,
    json_: output.Json = False,
) -> Result:
    """Import keys: hex, a line of an environment file, or another keyring.

    A single key is imported as `next`; the first key of a keyring becomes its
    primary. A key that both keyrings hold takes the later status of the two:
    next, primary, verify-only, revoked.
    """
    path = ring_path(keyring)
    other = parsed(source, verify_only=verify_only)

    def merged(ring: Ring) -> Ring:
        if isinstance(other, Ring):
            return ring.merge(other)
        return ring.add(first(ring, other) if other.status is Status.NEXT else other)

    ring = file.change(path, merged, create=True)
    return result(ring, str(path), *after(path, ring))


def parsed(source: Path, *, verify_only: bool) -> Key | Ring:
    """A key or a ring from a file or from stdin.

    Raises:
        VllmopsError: as `files.read` does, the error of the content, or ``usage``.
    """
    content = read(source, file.MOST_BYTES)
    if content.lstrip().startswith(b"{"):
        if verify_only:
            # Its keys have their own states, and one of them might be promoted here.
            message = f"--verify-only is for a single key, but {spelt(source)} is a keyring"
            raise usage(message, "vllmops keys export KID --format hex --out FILE, there")
        return file.decode(content, source)
    text = content.decode(errors="replace").strip()
    text = text.removeprefix("export ").removeprefix(f"{file.SIGNING_KEY}=").strip("\"'")
    secret = from_hex(text, "the input")
    return Key.of(secret, Status.VERIFY_ONLY if verify_only else Status.NEXT, time.time())
