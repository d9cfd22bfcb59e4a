"""The admin token: with it a server does from afar what its user's commands have it do here.

It is what a file holds, so that it is in no environment and no list of processes, and can be
changed while the server runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import VllmopsError
from ..files import unreadable

PLACE = "VLLMOPS_ADMIN_TOKEN_FILE"
ROUTES = "/v1/vllmops/"
KEYS = f"{ROUTES}keys"
# Nobody guesses so many characters, if they are random.
TOKEN = re.compile(r"[!-~]{32,1024}")


def token(path: Path) -> str:
    """The token that a file holds.

    Raises:
        VllmopsError: ``file.unreadable``, ``admin.bad-token``, ``keys.unreadable`` or
            ``keys.unsafe`` (4).
    """
    from .file import private  # noqa: PLC0415 - slow, and every command knows the place

    try:
        text = private(path).decode("ascii", "replace").strip()
    except FileNotFoundError as error:
        failure = unreadable(path, error)
        failure.hint = f"vllmops keygen --out {path}"
        raise failure from error
    if not TOKEN.fullmatch(text):
        raise VllmopsError(
            "admin.bad-token",
            f"{path} does not hold an admin token: at least 32 characters, without spaces",
            "vllmops keygen --out FILE makes one",
        )
    return text
