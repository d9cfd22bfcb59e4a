"""Reads and changes the ring's file.

The file is replaced whole, by one writer at a time. A copy beside it is written first, so that
the keys survive if a person or a broken disk damages the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import join
from typing import Any

import msgspec

from vllmops.model.environment import SIGNING_KEY, KeyringSource, locate_default_keyring
from vllmops.support.errors import VllmopsError
from vllmops.support.files import (
    choose_file_exit_code,
    lock_file,
    make_not_written_error,
    write_atomically,
)
from vllmops.support.home import create_missing_folders, resolve_home
from vllmops.support.secret_files import MOST_BYTES, read_secret_file

from .keyring import VERSION, KeyRing, Secret, make_single_key_ring, parse_hex_secret

LOCK_WAIT_S = 5.0
LOCK_POLL_S = 0.02


def decode_secret(kind: type[Any], text: Any) -> Secret:
    """The secret that a ring's file spells in hex."""
    if kind is not Secret or not isinstance(text, str):
        raise ValueError("a secret must be hex characters")
    try:
        return parse_hex_secret(text, "a secret")
    except VllmopsError as error:
        raise ValueError(error.message) from None


def encode_secret(secret: Any) -> str:
    """A secret as a ring's file spells it."""
    assert isinstance(secret, Secret)
    return secret.reveal().hex()


class KeyringVersion(msgspec.Struct, frozen=True):
    """The part of a ring's file that every version has."""

    version: int


# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
RING = msgspec.json.Decoder(KeyRing, dec_hook=decode_secret)
VERSION_OF = msgspec.json.Decoder(KeyringVersion)


def is_default_keyring(path: Path) -> bool:
    """Whether a keyring is the state directory's own; a user without one names another file."""
    try:
        return path == locate_default_keyring()
    except VllmopsError:
        return False


def require_safe_location(path: Path) -> None:
    """Check the state directory if the ring is there; raises ``home.unsafe`` (exit code 4)."""
    if is_default_keyring(path):
        resolve_home()


def load_keyring_source(source: KeyringSource) -> KeyRing:
    """The ring from wherever it comes.

    Raises:
        VllmopsError: as `load_keyring` and `keyring.parse_hex_secret` do.
    """
    if source.path is not None:
        return load_keyring(source.path)
    if source.text:
        return make_single_key_ring(parse_hex_secret(source.text, SIGNING_KEY))
    return KeyRing()


def load_keyring(path: Path) -> KeyRing:
    """Read a ring.

    Raises:
        VllmopsError: ``keys.no-ring`` (exit code 5), ``keys.unreadable``, ``keys.unsafe`` (4),
            ``keys.newer`` or ``keys.broken``.
    """
    return decode_keyring(read_keyring(path), path)


def read_keyring(path: Path) -> bytes:
    """The content of a ring's file."""
    require_safe_location(path)
    try:
        content = read_secret_file(path)
    except FileNotFoundError as error:
        raise make_missing_error(path) from error
    if len(content) > MOST_BYTES:
        raise make_broken_error(path, f"it has more than {MOST_BYTES} bytes")
    return content


def decode_keyring(content: bytes, path: Path) -> KeyRing:
    """The ring in a file's content; `path` is for messages."""
    try:
        version = VERSION_OF.decode(content).version
        if version > VERSION:
            raise VllmopsError(
                "keys.newer",
                f"{path} was written by a newer vllmops (version {version}, this one reads up to "
                f"{VERSION})",
                "install the newest vllmops",
            )
        return RING.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # Its text names a position in the file, never the content there.
        raise make_broken_error(path, str(error)) from None


def encode_keyring(keyring: KeyRing) -> bytes:
    """A ring's file, secrets included."""
    return (
        msgspec.json.format(msgspec.json.encode(keyring, enc_hook=encode_secret), indent=2) + b"\n"
    )


def change_keyring(
    path: Path, change: Callable[[KeyRing], KeyRing], *, create: bool = False
) -> KeyRing:
    """Change a ring's file, and nobody else at the same time.

    Args:
        path: the file; a link is followed.
        change: makes the new ring from the old one; an equal one is not written.
        create: begin with an empty ring where there is no file, and no copy of one.

    Returns:
        The ring as it is now.

    Raises:
        VllmopsError: of `load_keyring` and of `change`, which leave all as it was; ``keys.locked``
            (exit code 3), or ``keys.not-written``, which leaves the file as it was.
    """
    require_safe_location(path)
    if create and is_default_keyring(path):
        with contextlib.suppress(OSError):
            create_missing_folders(path.parent)
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        load_keyring(path)  # refuses it, before there is a lock file beside a directory or a device
    with lock_keyring(path):
        before = (
            KeyRing()
            if create and not path.exists() and not locate_copy(path).exists()
            else load_keyring(path)
        )
        after = change(before)
        if after != before:
            save_keyring(path, after)
    return after


def save_keyring(path: Path, keyring: KeyRing) -> None:
    content = encode_keyring(keyring)
    left = re.compile(rf"\.{re.escape(path.name)}(\.copy)?\.[a-z0-9_]{{8}}")
    try:
        for entry in path.parent.iterdir():
            if left.fullmatch(entry.name):  # by a writer that was killed: no other is at work now
                entry.unlink()
        at = path.stat() if path.exists() else None
        group = at.st_gid if at and at.st_mode & stat.S_IRGRP else None
        # The copy first: what it has beyond the file, after a crash, is what was asked for.
        write_atomically(locate_copy(path), content)
        write_atomically(path, content, group=group)
    except OSError as error:
        hint = "free space or grant this user write access there, then try again"
        raise make_not_written_error(path, error, "keys.not-written", hint) from error


def locate_copy(path: Path) -> Path:
    """The last good content of a ring's file."""
    return path.with_name(f"{path.name}.copy")


@contextlib.contextmanager
def lock_keyring(path: Path) -> Iterator[None]:
    """Hold the lock for changing a ring.

    Raises:
        VllmopsError: ``keys.locked`` (exit code 3), or ``keys.not-written``.
    """
    lock = path.with_name(f"{path.name}.lock")
    deadline = time.monotonic() + LOCK_WAIT_S
    try:
        while (held := lock_file(lock)) is None and time.monotonic() < deadline:
            time.sleep(LOCK_POLL_S)
    except OSError as error:
        raise VllmopsError(
            "keys.not-written",
            f"{path} cannot be changed: {lock} cannot be opened: {error.strerror or error}",
            "run this as the keyring's owner, in a directory that they own",
            exit_code=choose_file_exit_code(error),
        ) from error
    if held is None:
        raise VllmopsError(
            "keys.locked",
            f"another command has been changing {path} for {LOCK_WAIT_S:.0f} s",
            "try again; vllmops keys list shows the keys",
        )
    try:
        yield
    finally:
        os.close(held)


def make_missing_error(path: Path) -> VllmopsError:
    if locate_copy(path).exists():
        return VllmopsError(
            "keys.no-ring",
            f"{path} is missing, but its copy exists: {locate_copy(path)}",
            f"{join(['mv', str(locate_copy(path)), str(path)])}, or move the copy away to start "
            "over",
        )
    return VllmopsError(
        "keys.no-ring",
        f"there is no keyring {path}",
        f"create it: {join(['vllmops', 'keys', 'add', '--keyring', str(path)])}",
    )


def make_broken_error(path: Path, reason: str) -> VllmopsError:
    return VllmopsError(
        "keys.broken",
        f"{path} is not a keyring, or is damaged: {reason}",
        "its last good content is in its copy: "
        f"{join(['cp', '-p', str(locate_copy(path)), str(path)])}"
        if locate_copy(path).exists()
        else "restore it from a backup, or move it away and start over",
    )
