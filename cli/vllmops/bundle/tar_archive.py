"""A gzipped tar file of a few small files: written from memory, read without trusting it."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from ..support.errors import VllmopsError
from ..support.files import make_unreadable_error, open_input

# Bundles of real servers have some MB; what a stranger packed may unfold to any size.
LIMIT_BYTES = 256 << 20
LIMIT_READ = 24 << 20  # of the parts that are read, which are in memory, together
LIMIT_FILES = 1000
MODE = 0o600
DAMAGE = (
    *(tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError),
    *(ValueError, OverflowError, RecursionError),
)


def pack_archive(files: Mapping[str, bytes], modified_at: float) -> bytes:
    """An archive of files, in their order.

    Args:
        files: content by name.
        modified_at: their time, in seconds since the epoch.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), MODE, int(modified_at)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class LimitedReader(io.RawIOBase):
    """A stream that refuses to give more than `LIMIT_BYTES`.

    Args:
        source: what it reads from.
    """

    def __init__(self, source: gzip.GzipFile) -> None:
        self.source = source
        self.remaining_bytes = LIMIT_BYTES

    def read(self, size: int = -1, /) -> bytes:
        content = self.source.read(size)
        self.remaining_bytes -= len(content)
        if self.remaining_bytes < 0:
            raise tarfile.TarError(f"it unfolds to more than {LIMIT_BYTES >> 20} MiB")
        return content


def unpack_archive(path: Path, is_wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Files of an archive, in memory: nothing of it comes on the disk.

    Args:
        path: of the archive.
        is_wanted: tells by its name whether a file is to be read.

    Raises:
        VllmopsError: ``file.unreadable``, or ``bundle.damaged`` where it is broken, too large, or
            holds what no bundle holds: links, devices, names that lead out of it.
    """
    parts: dict[str, bytes] = {}
    left = LIMIT_READ
    try:
        with (
            open_input(path) as file,
            gzip.open(file) as unfolded,
            tarfile.open(fileobj=(stream := LimitedReader(unfolded)), mode="r|") as archive,
        ):
            for number, member in enumerate(archive):
                if number >= LIMIT_FILES:
                    raise tarfile.TarError(f"it holds more than {LIMIT_FILES} files")
                if member.isdir():
                    continue
                if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE} or member.issparse():
                    raise tarfile.TarError(f"{member.name!r} is no plain file")
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts or str(name) in parts:
                    raise tarfile.TarError(f"{member.name!r} does not belong in it")
                if not 0 <= member.size <= LIMIT_BYTES:
                    raise tarfile.TarError(f"{member.name!r} has {member.size} bytes")
                if is_wanted(str(name)) and (part := archive.extractfile(member)):
                    left -= member.size
                    if left < 0:
                        raise tarfile.TarError(
                            f"{name} and others have over {LIMIT_READ >> 20} MiB"
                        )
                    parts[str(name)] = part.read()
            # To the end, where the checksum stands.
            while stream.read(tarfile.RECORDSIZE):
                pass
    except DAMAGE as error:
        raise make_damaged_error(path, str(error)) from error
    except OSError as error:
        raise make_unreadable_error(path, error) from error
    return parts


def make_damaged_error(path: Path, reason: str) -> VllmopsError:
    return VllmopsError(
        "bundle.damaged",
        f"{path} is not a bundle, or it is damaged: {reason}",
        "vllmops bundle makes one",
    )
