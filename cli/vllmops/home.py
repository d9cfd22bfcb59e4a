"""Where vllmops keeps its state; the CLI and the agent both ask here."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import VllmopsError


def home() -> Path:
    """The state directory: ``VLLMOPS_HOME``, or the user's state directory.

    Raises:
        VllmopsError: ``home.unknown``, for a user without a home directory.
    """
    try:
        if chosen := os.environ.get("VLLMOPS_HOME"):
            return Path(chosen).expanduser().absolute()
        # Not at the top: an attached agent runs without platformdirs and has VLLMOPS_HOME set.
        from platformdirs import user_state_path  # noqa: PLC0415

        return user_state_path("vllmops", appauthor=False)
    except RuntimeError as error:
        raise VllmopsError(
            "home.unknown",
            f"there is no telling where this user's (uid {os.getuid()}) state is kept: no HOME, "
            "and no entry in the user database",
            "export VLLMOPS_HOME=/var/lib/vllmops, say",
        ) from error
