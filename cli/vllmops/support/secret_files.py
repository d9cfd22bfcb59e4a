"""Files with secrets, which only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from shlex import join

from .errors import VllmopsError
from .files import choose_file_exit_code

MOST_BYTES = 1 << 20  # of a keyring; an admin token is shorter


def read_secret_file(path: Path) -> bytes:
    """The content of a file that nobody else may read or change; of a large one, its beginning.

    A caller sees by `MOST_BYTES` + 1 bytes that there are more.

    Raises:
        FileNotFoundError: there is none.
        VllmopsError: ``keys.unreadable`` or ``keys.unsafe`` (exit code 4).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise make_unreadable_secret_error(path, error) from error
    try:
        require_secret_file(path, os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise make_unreadable_secret_error(path, error) from error
    finally:
        os.close(descriptor)


def require_secret_file(path: Path, file_stat: os.stat_result) -> None:
    """Check that a file's content is its owner's own, and the owner this user or root.

    Root's may be read by a group: it is the only way for others to be given it.
    """
    mode, own = stat.S_IMODE(file_stat.st_mode), os.geteuid()
    if not stat.S_ISREG(file_stat.st_mode):
        wrong, hint = "is not a file", "name a file"
    elif file_stat.st_uid not in {0, own}:
        wrong = f"belongs to uid {file_stat.st_uid}, but this is uid {own}"
        hint = f"run this as its owner, or {join(['chown', str(own), str(path)])}"
    elif mode & (0o077 if file_stat.st_uid else 0o037):
        wrong = f"can be read or changed by others (mode {mode:o})"
        hint = join(["chmod", "600", str(path)])
    else:
        return
    raise VllmopsError("keys.unsafe", f"{path} {wrong}", hint)


def make_unreadable_secret_error(path: Path, error: OSError) -> VllmopsError:
    return VllmopsError(
        "keys.unreadable",
        f"{path} cannot be read: {error.strerror or error}",
        "run this as the file's owner",
        exit_code=choose_file_exit_code(error),
    )
