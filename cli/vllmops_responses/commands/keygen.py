"""``vllmops keygen``: a fresh key, and the formats in which keys are written."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from vllmops.commands.options import validate_output_path
from vllmops.model.environment import SIGNING_KEY
from vllmops.support import output
from vllmops.support.errors import VllmopsError
from vllmops.support.files import make_not_written_error, write_atomically
from vllmops.support.output import Result, VerbatimText, print_result

from ..keys import keyring_file
from ..keys.keyring import Key, KeyRing, generate_secret, make_single_key_ring

app = output.make_typer_app()

NAME = "vllmops-keys"


class KeyFormat(StrEnum):
    """The formats in which keys are written."""

    HEX = "hex"
    ENV = "env"
    JSON = "json"
    KUBERNETES = "k8s-secret"


Out = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        callback=validate_output_path,
        help="Write it to this file, readable by its owner only.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]


@app.command(epilog="Example: vllmops keygen --format env --out /etc/vllm/key.env")
@print_result
def keygen(
    *,
    format_: Annotated[
        KeyFormat,
        typer.Option(
            "--format",
            help="64 hex characters; a line for an environment file; a keyring; "
            "a manifest for kubectl.",
        ),
    ] = KeyFormat.HEX,
    out: Out = None,
    force: Force = False,
    json_: output.Json = False,
) -> Result:
    """Print a fresh random key.

    It has 32 bytes. To create a key without showing it, use `vllmops keys add`.
    """
    ring = make_single_key_ring(generate_secret())
    (key,) = ring.keys
    match format_:
        case KeyFormat.JSON:
            text = format_keyring(ring)
        case KeyFormat.KUBERNETES:
            text = format_secret_manifest(SIGNING_KEY, format_key(key, KeyFormat.HEX))
        case _:
            text = format_key(key, format_)
    if out:
        save_secret(out, text, force=force)
    if not json_:
        output.print_to_stderr(
            f"key {key.kid}" + (f" is in {out}" if out else "; keep it secret"), "dim"
        )
    data: dict[str, Any] = {
        "kid": key.kid,
        "fingerprint": key.fingerprint,
        "format": format_,
        "path": str(out) if out else None,
        "key": None if out else text,
    }
    return Result(data, lambda: () if out else [VerbatimText(text)])


def format_key(key: Key, format_: KeyFormat) -> str:
    """A key by itself, as hex characters or as a line for an environment file."""
    text = key.secret.reveal().hex()
    return text if format_ is KeyFormat.HEX else f"{SIGNING_KEY}={text}"


def format_keyring(keyring: KeyRing) -> str:
    """A ring as its file has it."""
    return keyring_file.encode_keyring(keyring).decode().rstrip()


def format_secret_manifest(name: str, content: str) -> str:
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


def save_secret(path: Path, text: str, *, force: bool) -> None:
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
        raise make_not_written_error(path, error, "keys.not-written", hint) from error
