"""Files: atomic writes, reads up to a limit, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .error_codes import ErrorCode
from .errors import ExitCode, VllmopsError, make_platform_error

FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
ANYBODY = -1
MOST_LINKS = 40  # as the kernel follows
NAME_CHARACTERS = 50  # of a file's name that its temporary file has, too: names have 255 bytes
FULL = os.makedev(1, 7)  # /dev/full, which takes no byte
# How long to wait for a FIFO that no process writes into.
WRITER_WAIT_S = 3.0
STDIN = "-"
GZIP = b"\x1f\x8b"


def write_atomically(
    path: Path,
    content: bytes,
    *,
    overwrite: bool = True,
    group: int | None = None,
    durable: bool = True,
) -> None:
    """Write ``path`` whole; see `open_atomically`."""
    with open_atomically(path, overwrite=overwrite, group=group, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def open_atomically(
    path: Path, *, overwrite: bool = True, group: int | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """A file to write. It gets its name once it is complete; only its owner can read it.

    A link stays, and the file that it names is replaced. A character device and a FIFO are
    written into, and never replaced.

    Args:
        path: its name.
        overwrite: whether to replace a file that is there.
        group: a group that may read it, too.
        durable: whether it survives a power cut, for which the disk is waited for.

    Raises:
        OSError: with the old content intact; FileExistsError without `overwrite`, PermissionError
            for what another user has put into a directory of everybody's.
    """
    path = resolve_links(path)
    special = open_special_file(path)
    if special is not None:
        with open(special, "wb") as file:
            yield file
        return
    if overwrite:
        require_trusted_owner(path)
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name[:NAME_CHARACTERS]}."
    )
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if group is not None:
                os.fchown(descriptor, -1, group)
                os.fchmod(descriptor, 0o640)
            if durable:
                os.fsync(descriptor)
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
            os.unlink(temporary)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if not durable:
        return
    with contextlib.suppress(PermissionError):  # a directory can be writable and not readable
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def resolve_links(path: Path) -> Path:
    """The path behind a name that may be a link; the file need not exist.

    Raises:
        OSError: the links form a loop, or one belongs to another user than this one or root.
    """
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)
        # What /proc calls a link (/dev/stdout leads there) is a file that is open.
        if is_in_proc(path) or not path.is_symlink():
            return path
        require_trusted_owner(path, in_any_directory=True)
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def is_in_proc(path: Path) -> bool:
    return path.parts[:2] == ("/", "proc")


def require_trusted_owner(path: Path, *, in_any_directory: bool = False) -> None:
    """Refuse a file that another user has put into a shared directory, such as /tmp.

    Args:
        path: the file, or the link itself.
        in_any_directory: also into a directory of that user's own: a link may lead out of it.

    Raises:
        PermissionError: it was.
    """
    try:
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return
    if owner in {0, os.geteuid()}:
        return
    if in_any_directory or owner != path.parent.stat().st_uid:
        raise PermissionError(errno.EPERM, f"it belongs to uid {owner}")


def open_special_file(path: Path) -> int | None:
    """A descriptor to write into a device or a FIFO; None for a regular or missing file.

    Args:
        path: as `resolve_links` gives it.

    Raises:
        OSError: it is a directory, a socket, a block device, or a FIFO that nobody reads.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode) and not is_in_proc(path):
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, "It is a block device or a socket, not a file")
    if stat.S_ISFIFO(mode) and not is_in_proc(path):
        require_trusted_owner(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if stat.S_ISFIFO(mode) and error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "It is a FIFO, and no process reads it") from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def require_writable(path: Path) -> None:
    """Raise what `open_atomically` would, before there is anything to write.

    Raises:
        OSError: as `open_atomically`, as far as it can be known before.
    """
    path = resolve_links(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.is_file() or not path.exists():
        with tempfile.TemporaryFile(dir=path.parent) as trial:
            trial.write(bytes(4096))
    elif path.is_char_device() and path.stat().st_rdev == FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def make_not_written_error(
    path: Path,
    error: OSError,
    code: ErrorCode = "file.not-written",
    hint: str = "choose another place with --save",
) -> VllmopsError:
    """The error of a file that could not be written; an existing file is unchanged."""
    return VllmopsError(
        code,
        f"{path} can't be written: {error.strerror or error}",
        hint,
        exit_code=choose_file_exit_code(error),
    )


def read_input(path: Path, max_bytes: int) -> bytes:
    """The content of a file that a person named; ``-`` is standard input.

    Args:
        path: its name.
        max_bytes: bytes.

    Raises:
        VllmopsError: ``file.unreadable`` (exit code 1, or 4 if permission is missing), or
            ``file.too-large``.
    """
    with open_input(path) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise make_unreadable_error(path, error) from error
    if len(content) > max_bytes:
        raise make_too_large_error(path, max_bytes)
    return content


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip's do; not where it can't be read, or only once."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(GZIP)) == GZIP
    except OSError:
        return False


@contextlib.contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """A file that a person named, to be read; ``-`` is standard input.

    Raises:
        VllmopsError: ``file.unreadable`` (exit code 1, or 4 if permission is missing).
    """
    if str(path) == STDIN:
        if sys.stdin is None:
            raise make_unreadable_error(path, OSError(errno.EBADF, "it is closed"))
        yield sys.stdin.buffer
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        file = io.BufferedReader(FifoAwareFile(descriptor))  # type: ignore[type-var]
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            file.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except (OSError, ValueError) as error:
        raise make_unreadable_error(path, error) from error
    with file:
        yield file


class FifoAwareFile(io.RawIOBase):
    """A file whose read raises an error if it is a FIFO without a writer.

    Args:
        descriptor: of the file, which does not block.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.deadline = 0.0
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            self.deadline = time.monotonic() + WRITER_WAIT_S

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.descriptor

    def readinto(self, buffer: bytearray, /) -> int:  # type: ignore[override]
        while True:
            try:
                count = os.readv(self.descriptor, [buffer])
            except BlockingIOError:
                self.deadline = 0.0  # somebody has it open, and writes when they like
                select.select([self.descriptor], [], [])
                continue
            if count or not self.deadline:
                self.deadline = 0.0
                return count
            if time.monotonic() > self.deadline:
                raise OSError(errno.EPIPE, "It is a FIFO, and no process writes into it")
            time.sleep(0.02)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self.descriptor)


def format_input_name(path: Path) -> str:
    """The name of a file for messages."""
    return "standard input" if str(path) == STDIN else str(path)


def make_unreadable_error(path: Path, error: Exception) -> VllmopsError:
    """The error of a file that a person named and that can't be read, missing ones included."""
    why = getattr(error, "strerror", None) or error
    return VllmopsError(
        "file.unreadable",
        f"{format_input_name(path)} can't be read: {why}",
        "run vllmops as the owner of the file"
        if isinstance(error, PermissionError)
        else "check the name of the file",
        exit_code=choose_file_exit_code(error),
    )


def make_too_large_error(path: Path, max_bytes: int) -> VllmopsError:
    return VllmopsError(
        "file.too-large",
        f"{format_input_name(path)} is larger than the limit of {max_bytes >> 20} MiB",
        "check the name of the file",
    )


def choose_file_exit_code(error: Exception) -> ExitCode:
    """The exit code of a file that can't be read or written."""
    return ExitCode.NOT_AUTHORISED if isinstance(error, PermissionError) else ExitCode.FAILED


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file; returns the descriptor that holds it, None if somebody else does.

    An open-file-description lock: it goes along to a child that inherits the descriptor, is
    dropped with the last one, and can be asked about without being taken.

    Raises:
        VllmopsError: ``platform.linux``: other systems have no such locks.
    """
    try:
        from fcntl import F_OFD_SETLK, F_OFD_SETLKW  # noqa: PLC0415
    except ImportError:
        raise make_platform_error("to hold a file for one writer") from None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        run_lock_command(descriptor, F_OFD_SETLKW if wait else F_OFD_SETLK)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def run_lock_command(descriptor: int, command: int) -> int:
    """Ask fcntl(2) about a write lock on the whole file; returns the type of lock it answers."""
    import fcntl  # noqa: PLC0415 - Windows has none, and runs what needs no lock

    whole_file = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer: int = struct.unpack(FLOCK, fcntl.fcntl(descriptor, command, whole_file))[0]
    return answer


def open_regular_file(path: Path, owner: int | None = None, *, follow: bool = False) -> int:
    """Open a file for reading whose place other users may have filled with something else.

    A FIFO, a device or another user's lease does not block it.

    Args:
        path: its name.
        owner: the uid that it must be of; None for this user's, `ANYBODY` for any.
        follow: whether it may be a link.

    Returns:
        A descriptor.

    Raises:
        OSError: PermissionError if it is no plain file, or is somebody else's.
    """
    with open_path_handle(path, follow=follow) as (place, status):
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(errno.EPERM, "it is no plain file", str(path))
        owner = os.geteuid() if owner is None else owner
        if owner not in (status.st_uid, ANYBODY):
            why = f"it belongs to uid {status.st_uid}, not to uid {owner}"
            raise PermissionError(errno.EPERM, why, str(path))
        return os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


@contextlib.contextmanager
def open_path_handle(path: Path, *, follow: bool = False) -> Iterator[tuple[str, os.stat_result]]:
    """What another user has named, or may have put there, to be judged before it is opened.

    To open a device can be enough to do harm: a watchdog that was opened resets the machine.

    Args:
        path: its name.
        follow: whether to look behind a link.

    Yields:
        A path to open this very file by, whatever its own path leads to by then, and its status.

    Raises:
        OSError: there is no such file; also what is raised within has its name.
    """
    try:
        seen = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            yield f"/proc/self/fd/{seen}", os.fstat(seen)
        finally:
            os.close(seen)
    except OSError as error:
        error.filename = str(path)
        raise


def read_private_file(path: Path, owner: int | None, limit: int) -> bytes:
    """The content of a file that only its owner can write.

    Args:
        path: its name, as `open_regular_file` takes it.
        owner: the uid that it must be of; None for this user's.
        limit: bytes that it may have.

    Raises:
        OSError: as `open_regular_file` does; PermissionError if others may write to it; EFBIG if it
            has more bytes.
    """
    with open(open_regular_file(path, owner), "rb", buffering=0) as file:
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


def read_peer_uid(connection: socket.socket) -> int:
    """The uid at the other end of a Unix socket: who connected, or who listens."""
    size = struct.calcsize("3i")  # struct ucred: pid, uid, gid
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid: int = struct.unpack("3i", credentials)[1]
    return uid
