"""Snapshots in files: JSON with a ``kind`` and a ``schema``.

One that grows is a file of lines: what `load_snapshot` reads from the first, then
`Journal.append`'s.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

import msgspec

from ..support.errors import VllmopsError
from ..support.files import (
    make_not_written_error,
    open_special_file,
    read_input,
    resolve_links,
    write_atomically,
)
from .json_text import encode_json

T = TypeVar("T", bound=msgspec.Struct)
E = TypeVar("E")
MOST_BYTES = 256 << 20
LARGEST = 1 << 63
MANY_DIGITS = re.compile(rb"[0-9]{19}|[0-9][eE]\+?[0-9]{2}")
DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class SnapshotHead(msgspec.Struct, frozen=True):
    """What every snapshot file begins with."""

    kind: str
    schema: int


def save_snapshot(path: Path, snapshot: msgspec.Struct) -> None:
    """Write a snapshot, readable by its owner alone: keys and frames may reveal what users sent.

    Raises:
        VllmopsError: ``file.not-written``; an older file of that name is left as it was.
    """
    try:
        write_atomically(path, encode_json(snapshot))
    except OSError as error:
        raise make_not_written_error(path, error) from error


class Journal:
    """A file that grows by lines; what a full disk refuses is kept and tried again.

    Args:
        path: its name; a file that has it is replaced, a device or a FIFO written into.
        head: its first line.

    Raises:
        VllmopsError: ``file.not-written``.
    """

    def __init__(self, path: Path, head: msgspec.Struct) -> None:
        self.path = path
        self.pending = b""
        self.failure: VllmopsError | None = None
        try:
            place = resolve_links(path)
            special = open_special_file(place)
            self.is_regular_file = special is None
            if special is None:
                write_atomically(place, encode_json(head) + b"\n")
                self.file = place.open("r+b", buffering=0)
            else:
                self.file = os.fdopen(special, "wb", 0)
                self.file.write(encode_json(head) + b"\n")
        except OSError as error:
            raise make_not_written_error(path, error) from error
        self.size = self.file.seek(0, os.SEEK_END) if self.is_regular_file else 0

    def append(self, entry: msgspec.Struct) -> None:
        """Add a line; `failure` is set if this or an older line is not in the file."""
        self.pending += encode_json(entry) + b"\n"
        try:
            if self.is_regular_file:
                self.file.seek(self.size)
            while self.pending:
                written = self.file.write(self.pending)
                self.pending = self.pending[written:]
                self.size += written
            if self.is_regular_file:
                os.fdatasync(self.file.fileno())
            self.failure = None
        except OSError as error:
            self.failure = make_not_written_error(self.path, error)


def load_snapshot(path: Path, kind: type[T]) -> T:
    """Read a snapshot of one kind.

    Raises:
        VllmopsError: as `read_input` and `parse_snapshot` do.
    """
    return parse_snapshot(path, read_input(path, MOST_BYTES), kind)


def parse_journal(
    path: Path, content: bytes, head: type[T], entry: msgspec.json.Decoder[E]
) -> tuple[T, list[E]]:
    """What a `Journal` wrote; a last line that was cut off is left out.

    Raises:
        VllmopsError: as `parse_snapshot` does.
    """
    first, *rest = content.split(b"\n")
    first_ = parse_snapshot(path, first, head)
    try:
        return first_, [entry.decode(line) for line in rest[:-1]]
    except DAMAGE as error:
        raise make_damaged_error(path, error) from error


def parse_snapshot(path: Path, content: bytes, kind: type[T]) -> T:
    """The snapshot in a file's content.

    Raises:
        VllmopsError: ``file.not-a-snapshot``, ``file.other-kind`` or ``file.newer``.
    """
    own = SnapshotHead(
        **{
            field.name: field.default
            for field in msgspec.structs.fields(kind)
            if field.name in SnapshotHead.__struct_fields__
        }
    )
    try:
        head = msgspec.json.decode(content, type=SnapshotHead)
        if head.kind != own.kind:
            raise VllmopsError(
                "file.other-kind",
                f"{path} holds {head.kind}, not {own.kind}",
                "give it to the command that wrote it",
            )
        if head.schema > own.schema:
            raise VllmopsError(
                "file.newer",
                f"{path} was written by a newer vllmops (schema {head.schema}, "
                f"this one reads up to {own.schema})",
                "install the newest vllmops",
            )
        validate_numbers(content)
        return msgspec.json.decode(content, type=kind)
    except DAMAGE as error:
        raise make_damaged_error(path, error) from error


def validate_numbers(content: bytes) -> None:
    """Check that all numbers of a stranger's JSON can be reckoned with.

    Raises:
        ValidationError: one of them is too large.
    """
    if not MANY_DIGITS.search(content):
        return
    left = [msgspec.json.decode(content)]
    while left:
        value = left.pop()
        if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
            raise msgspec.ValidationError("it has a number that is too large")
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value


def make_damaged_error(path: Path, error: Exception) -> VllmopsError:
    return VllmopsError(
        "file.not-a-snapshot",
        f"{path} is not a snapshot, or it is damaged: {error}",
        "write a new one with --save",
    )
