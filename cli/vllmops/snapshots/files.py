"""Snapshots in files: JSON, told apart by their ``kind`` and their ``schema``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import Exit, VllmopsError
from ..files import write_atomically

T = TypeVar("T", bound=msgspec.Struct)


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
        raise VllmopsError(
            "file.not-written",
            f"{path} can't be written: {error.strerror or error}",
            "choose another place with --save",
        ) from error


def load(path: Path, kind: type[T]) -> T:
    """Read a snapshot of one kind.

    Raises:
        VllmopsError: ``file.missing`` (exit code 5), ``file.unreadable``, ``file.not-a-snapshot``,
            ``file.other-kind`` or ``file.newer``.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise VllmopsError(
            "file.missing", f"there is no file {path}", exit_code=Exit.NOT_FOUND
        ) from error
    except OSError as error:
        raise VllmopsError(
            "file.unreadable", f"{path} can't be read: {error.strerror or error}"
        ) from error
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
                "pip install --upgrade vllmops-cli",
            )
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise VllmopsError(
            "file.not-a-snapshot",
            f"{path} is no snapshot, or a damaged one: {error}",
            "write it anew with --save",
        ) from error
