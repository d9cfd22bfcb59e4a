"""``vllmops keygen``: a fresh key, and the formats in which keys are written."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import output
from ..errors import VllmopsError
from ..files import not_written, write_atomically
from ..keys import file
from ..keys.ring import Key, Ring, fresh, only
from ..output import Result, Verbatim, command
from .options import to_write

app = output.typer_app()

NAME = "vllmops-keys"


class Format(StrEnum):
    """The formats in which keys are written."""

    HEX = "hex"
    ENV = "env"
    JSON = "json"
    KUBERNETES = "k8s-secret"


Out = Annotated[
    Path | None,
    typer.Option(
        readable=False, callback=to_write, help="Write it to this file, readable by its owner only."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


@app.command(epilog="Example: vllmops keygen --format env --out /etc/vllm/key.env")
@command
def keygen(
    *,
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="64 hex characters; a line for an environment file; a keyring; "
            "a manifest for kubectl.",
        ),
    ] = Format.HEX,
    out: Out = None,
    force: Force = False,
    json_: output.Json = False,
) -> Result:
    """Print a fresh random key.

    It has 32 bytes. To create a key without showing it, use `vllmops keys add`.
    """
    ring = only(fresh())
    (key,) = ring.keys
    match format_:
        case Format.JSON:
            text = whole(ring)
        case Format.KUBERNETES:
            text = manifest(file.SIGNING_KEY, spelt(key, Format.HEX))
        case _:
            text = spelt(key, format_)
    if out:
        save(out, text, force=force)
    if not json_:
        output.say(f"key {key.kid}" + (f" is in {out}" if out else "; keep it secret"), "dim")
    data: dict[str, Any] = {
        "kid": key.kid,
        "fingerprint": key.fingerprint,
        "format": format_,
        "path": str(out) if out else None,
        "key": None if out else text,
    }
    return Result(data, lambda: () if out else [Verbatim(text)])


def spelt(key: Key, format_: Format) -> str:
    """A key by itself, as hex characters or as a line for an environment file."""
    text = key.secret.reveal().hex()
    return text if format_ is Format.HEX else f"{file.SIGNING_KEY}={text}"


def whole(ring: Ring) -> str:
    """A ring as its file has it."""
    return file.encode(ring).decode().rstrip()


def manifest(name: str, content: str) -> str:
    """A Secret of Kubernetes with one entry, as YAML."""
    # A string of JSON's is one of YAML's.
    return "\n".join(
        (
            "apiVersion: v1",
            "kind: Secret",
            "metadata:",
            f"  name: {NAME}",
            "type: Opaque",
            "stringData:",
            f"  {name}: {json.dumps(content)}",
        )
    )


def save(path: Path, text: str, *, force: bool) -> None:
    """Write a secret to a file of its own.

    Raises:
        VllmopsError: ``keys.exists`` (exit code 2), or ``keys.not-written``.
    """
    try:
        write_atomically(path, text.encode() + b"\n", overwrite=force)
    except FileExistsError as error:
        raise VllmopsError(
            "keys.exists",
            f"{path} exists already, and may hold a key in use",
            "choose another --out",
        ) from error
    except OSError as error:
        hint = "choose another place with --out"
        raise not_written(path, error, "keys.not-written", hint) from error
