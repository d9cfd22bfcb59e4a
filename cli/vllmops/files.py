"""Files that several processes write: old or new, never half; and one writer at a time."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

from .errors import needs_linux

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


def write_atomically(
    path: Path, content: bytes, *, overwrite: bool = True, group: int | None = None
) -> None:
    """Write ``path`` whole, private to its owner.

    Args:
        path: its name.
        content: what is to be in it.
        overwrite: whether to replace a file that is there.
        group: a group that may read it, too.

    Raises:
        OSError: with the old content intact; FileExistsError without `overwrite`.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if group is not None:
                os.fchown(descriptor, -1, group)
                os.fchmod(descriptor, 0o640)
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
            os.unlink(temporary)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def take(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file; returns the descriptor that holds it, None where somebody else does.

    An open-file-description lock: it goes along to a child that inherits the descriptor, is
    dropped with the last one, and can be asked about without being taken.

    Raises:
        VllmopsError: ``platform.linux``: other systems have no such locks.
    """
    try:
        from fcntl import F_OFD_SETLK, F_OFD_SETLKW  # noqa: PLC0415
    except ImportError:
        raise needs_linux("to hold a file for one writer") from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        asked(descriptor, F_OFD_SETLKW if wait else F_OFD_SETLK)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def asked(descriptor: int, command: int) -> int:
    """Ask fcntl(2) about a write lock on the whole file; returns the type of lock it answers."""
    import fcntl  # noqa: PLC0415 - Windows has none, and runs what needs no lock

    whole_file = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer: int = struct.unpack(FLOCK, fcntl.fcntl(descriptor, command, whole_file))[0]
    return answer
