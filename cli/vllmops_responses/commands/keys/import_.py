"""``vllmops keys import``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vllmops.model.environment import SIGNING_KEY
from vllmops.support import output
from vllmops.support.errors import make_usage_error
from vllmops.support.files import format_input_name, read_input
from vllmops.support.output import Result, print_result
from vllmops.support.secret_files import MOST_BYTES

from ...keys import keyring_file
from ...keys.keyring import Key, KeyRing, KeyStatus, parse_hex_secret
from .keyring_options import Keyring, find_keyring_path, make_keyring_result, make_primary_if_first
from .keys_in_use import collect_load_status


@print_result
def import_keys(
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
    path = find_keyring_path(keyring)
    other = read_key_input(source, verify_only=verify_only)

    def merge_input(current_keyring: KeyRing) -> KeyRing:
        if isinstance(other, KeyRing):
            return current_keyring.merge(other)
        return current_keyring.add(
            make_primary_if_first(current_keyring, other)
            if other.status is KeyStatus.NEXT
            else other
        )

    ring = keyring_file.change_keyring(path, merge_input, create=True)
    return make_keyring_result(ring, str(path), *collect_load_status(path, ring))


def read_key_input(source: Path, *, verify_only: bool) -> Key | KeyRing:
    """A key or a ring from a file or from stdin.

    Raises:
        VllmopsError: as `files.read_input` does, the error of the content, or ``usage``.
    """
    content = read_input(source, MOST_BYTES)
    if content.lstrip().startswith(b"{"):
        if verify_only:
            # Its keys have their own states, and one of them might be promoted here.
            message = (
                f"--verify-only is for a single key, but {format_input_name(source)} is a keyring"
            )
            raise make_usage_error(
                message, "vllmops keys export KID --format hex --out FILE, there"
            )
        return keyring_file.decode_keyring(content, source)
    text = content.decode(errors="replace").strip()
    text = text.removeprefix("export ").removeprefix(f"{SIGNING_KEY}=").strip("\"'")
    secret = parse_hex_secret(text, "the input")
    return Key.from_secret(
        secret, KeyStatus.VERIFY_ONLY if verify_only else KeyStatus.NEXT, time.time()
    )
