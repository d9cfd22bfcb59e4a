"""The exceptions of vllmops: what is wrong, and the command that corrects it."""

from __future__ import annotations

import sys
from enum import IntEnum

from .error_codes import EXITS, ErrorCode


class ExitCode(IntEnum):
    """Exit codes, the same for every command.

    A named file that is missing or unreadable is FAILED, or NOT_AUTHORISED if permission is
    missing. An invalid URL or number is USAGE. NOT_FOUND is for servers and what they hold.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    TIMED_OUT = 3
    NOT_AUTHORISED = 4
    NOT_FOUND = 5
    INTERRUPTED = 130


MOST, TAIL = 2_000, 200  # characters of a message, and those of its end where it is cut


def shorten_message(text: str) -> str:
    """A message without its middle, where it quotes what nobody can read any more."""
    return text if len(text) <= MOST else f"{text[: MOST - TAIL]} … {text[-TAIL:]}"


class VllmopsError(Exception):
    """An error that a person can act on.

    Args:
        code: a stable word for scripts, such as ``target.unknown``; the name of its page, too.
        message: what is wrong, naming the thing that is.
        hint: what to do, best as a command; empty if nothing helps.
        exit_code: the process's exit code; that of the error code if not given.
        data: more for a ``--json`` reader, as plain data.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        hint: str = "",
        *,
        exit_code: ExitCode | None = None,
        data: object = None,
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = shorten_message(message)
        self.hint = shorten_message(hint)
        self.exit_code = ExitCode(EXITS[code]) if exit_code is None else exit_code
        self.data = data


def make_usage_error(message: str, hint: str) -> VllmopsError:
    """The error of a command line, or of a setting, that can't be meant."""
    return VllmopsError("usage", message, hint)


def make_platform_error(activity: str) -> VllmopsError:
    """The error of a command that this system can't run, because it has no /proc.

    Args:
        activity: what can't be done, as in "looking into processes".
    """
    where = "no /proc is mounted here" if sys.platform == "linux" else f"this is {sys.platform}"
    return VllmopsError(
        "platform.linux",
        f"{activity} needs Linux and its /proc, and {where}",
        "run it on the machine of the server; --help, keygen, -t URL, --store URL and commands "
        "that read a file also work here",
    )
