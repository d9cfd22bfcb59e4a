"""Files that several processes write: old or new, never half; and one writer at a time."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from .errors import needs_linux

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
ANYBODY = -1


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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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


def open_plain(path: Path, owner: int | None = None, *, follow: bool = False) -> int:
    """Open a file for reading where others might have put something else in its place.

    A FIFO, a device or a lease of somebody's keeps nobody waiting.

    Args:
        path: its name.
        owner: the uid that it must be of; None for this user's, `ANYBODY` for any.
        follow: whether it may be a link.

    Returns:
        A descriptor.

    Raises:
        OSError: PermissionError where it is no plain file, or is somebody else's.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "it is no plain file", str(path))
        owner = os.geteuid() if owner is None else owner
        if owner not in (found.st_uid, ANYBODY):
            why = f"it belongs to uid {found.st_uid}, not to uid {owner}"
            raise PermissionError(errno.EPERM, why, str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_private(path: Path, owner: int | None, limit: int) -> bytes:
    """What a file holds that is its owner's own, and nobody else's to write.

    Args:
        path: its name, as `open_plain` takes it.
        owner: the uid that it must be of; None for this user's.
        limit: bytes that it may have.

    Raises:
        OSError: as `open_plain` does; PermissionError where others may write to it; EFBIG where it
            has more bytes.
    """
    with open(open_plain(path, owner), "rb", buffering=0) as file:
        mode = os.fstat(file.fileno()).st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"others may write to it (mode {stat.S_IMODE(mode):o})"
            raise PermissionError(errno.EPERM, why, str(path))
        content = b""
        while len(content) <= limit and (part := file.read(limit + 1 - len(content))):
            content += part
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def peer(connection: socket.socket) -> int:
    """The uid at the other end of a Unix socket: who connected, or who listens."""
    size = struct.calcsize("3i")  # struct ucred: pid, uid, gid
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
