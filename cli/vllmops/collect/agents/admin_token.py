"""The admin token: it permits remote what the server's own user can do on its machine.

It is what a file holds, so that it is in no environment and no list of processes, and can be
changed while the server runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from shlex import join

from ...support.errors import VllmopsError
from ...support.files import make_unreadable_error
from ...support.secret_files import read_secret_file

# Random characters; so many can't be guessed.
TOKEN = re.compile(r"[!-~]{32,1024}")


def read_admin_token(path: Path) -> str:
    """The token that a file holds.

    Raises:
        VllmopsError: ``file.unreadable``, ``admin.bad-token``, ``keys.unreadable`` or
            ``keys.unsafe`` (4).
    """
    try:
        text = read_secret_file(path).decode("ascii", "replace").strip()
    except FileNotFoundError as error:
        failure = make_unreadable_error(path, error)
        failure.hint = join(["vllmops", "keygen", "--out", str(path)])
        raise failure from error
    if not TOKEN.fullmatch(text):
        raise VllmopsError(
            "admin.bad-token",
            f"{path} does not hold an admin token: at least 32 characters, without spaces",
            "vllmops keygen --out FILE makes one",
        )
    return text
