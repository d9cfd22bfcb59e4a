"""Where vllmops keeps its state; the CLI and the agent both ask here."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import Exit, VllmopsError


def home() -> Path:
    """The state directory: ``VLLMOPS_HOME``, or the user's state directory.

    Raises:
        VllmopsError: ``home.unknown``, for a user without a home directory, or of a user who is not
            there; ``home.encoding``, for a name that can't be written down as text.
    """
    chosen = os.environ.get("VLLMOPS_HOME", "")
    try:
        found = Path(chosen).expanduser().absolute() if chosen else default()
    except RuntimeError as error:
        if user := chosen.startswith("~") and chosen[1:].partition("/")[0]:
            raise VllmopsError(
                "home.unknown",
                f"VLLMOPS_HOME is {chosen}, and there is no user {user} with a home directory",
                f"export VLLMOPS_HOME=./{chosen} where the directory is called so",
                exit_code=Exit.USAGE,
            ) from error
        raise VllmopsError(
            "home.unknown",
            f"there is no telling where this user's (uid {os.getuid()}) state is kept: no HOME, "
            "and no entry in the user database",
            "export VLLMOPS_HOME=/var/lib/vllmops, say",
        ) from error
    try:
        str(found).encode()
    except UnicodeEncodeError as error:
        # Records, keyrings and answers are JSON: they could not name their own files.
        raise VllmopsError(
            "home.encoding",
            f"the state directory's name is not UTF-8: {os.fsencode(found)!r}",
            "export VLLMOPS_HOME=/var/lib/vllmops, say, or rename the directory",
            exit_code=Exit.USAGE,
        ) from error
    return found


def default() -> Path:
    # Not at the top: an attached agent runs without platformdirs and has VLLMOPS_HOME set.
    from platformdirs import user_state_path  # noqa: PLC0415

    return user_state_path("vllmops", appauthor=False)
