"""Snapshots in files: JSON, told apart by their ``kind`` and their ``schema``.

One that grows is a file of lines: what `load` reads from the first, then `Journal.add`'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import Exit, VllmopsError
from ..files import write_atomically

T = TypeVar("T", bound=msgspec.Struct)
E = TypeVar("E")
DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Head(msgspec.Struct, frozen=True):
    """What every snapshot file begins with."""

    kind: str
    schema: int


def save(path: Path, snapshot: msgspec.Struct) -> None:
    """Write a snapshot, readable by its owner alone: keys and frames may tell what users sent.

    Raises:
        VllmopsError: ``file.not-written``; an older file of that name is left as it was.
    """
    try:
        write_atomically(path, msgspec.json.encode(snapshot))
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> VllmopsError:
    return VllmopsError(
        "file.not-written",
        f"{path} can't be written: {error.strerror or error}",
        "choose another place with --save",
    )


class Journal:
    """A file that grows by lines; what a full disk refuses is kept and tried again.

    Args:
        path: its name; a file that has it is replaced.
        head: its first line.

    Raises:
        VllmopsError: ``file.not-written``.
    """

    def __init__(self, path: Path, head: msgspec.Struct) -> None:
        self.path = path
        self.pending = b""
        self.trouble: VllmopsError | None = None
        try:
            write_atomically(path, msgspec.json.encode(head) + b"\n")
            self.file = path.open("r+b", buffering=0)
        except OSError as error:
            raise not_written(path, error) from error
        self.size = self.file.seek(0, os.SEEK_END)

    def add(self, entry: msgspec.Struct) -> None:
        """Add a line; `trouble` tells whether it, or an older one, is not in the file."""
        self.pending += msgspec.json.encode(entry) + b"\n"
        try:
            self.file.seek(self.size)
            while self.pending:
                written = self.file.write(self.pending)
                self.pending = self.pending[written:]
                self.size += written
            os.fdatasync(self.file.fileno())
            self.trouble = None
        except OSError as error:
            self.trouble = not_written(self.path, error)


def load(path: Path, kind: type[T]) -> T:
    """Read a snapshot of one kind.

    Raises:
        VllmopsError: as `read` and `decode` do.
    """
    return decode(path, read(path), kind)


def decode_lines(
    path: Path, content: bytes, head: type[T], entry: msgspec.json.Decoder[E]
) -> tuple[T, list[E]]:
    """What a `Journal` wrote; a last line that was cut off is left out.

    Raises:
        VllmopsError: as `decode` does.
    """
    first, *rest = content.split(b"\n")
    found = decode(path, first, head)
    try:
        return found, [entry.decode(line) for line in rest[:-1]]
    except DAMAGE as error:
        raise damaged(path, error) from error


def read(path: Path) -> bytes:
    """A file's content.

    Raises:
        VllmopsError: ``file.missing`` (exit code 5) or ``file.unreadable``.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise VllmopsError(
            "file.missing", f"there is no file {path}", exit_code=Exit.NOT_FOUND
        ) from error
    except OSError as error:
        raise VllmopsError(
            "file.unreadable", f"{path} can't be read: {error.strerror or error}"
        ) from error


def decode(path: Path, content: bytes, kind: type[T]) -> T:
    """What a file's content says.

    Raises:
        VllmopsError: ``file.not-a-snapshot``, ``file.other-kind`` or ``file.newer``.
    """
    own = Head(
        **{
            field.name: field.default
            for field in msgspec.structs.fields(kind)
            if field.name in Head.__struct_fields__
        }
    )
    try:
        head = msgspec.json.decode(content, type=Head)
        if head.kind != own.kind:
            raise VllmopsError(
                "file.other-kind",
                f"{path} holds {head.kind}, not {own.kind}",
                "give it to the command that wrote it",
                exit_code=Exit.USAGE,
            )
        if head.schema > own.schema:
            raise VllmopsError(
                "file.newer",
                f"{path} was written by a newer vllmops (schema {head.schema}, "
                f"this one reads up to {own.schema})",
                "install the newest vllmops",
            )
        return msgspec.json.decode(content, type=kind)
    except DAMAGE as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> VllmopsError:
    return VllmopsError(
        "file.not-a-snapshot",
        f"{path} is no snapshot, or a damaged one: {error}",
        "write it anew with --save",
    )
