"""How a server is reached, from vLLM's arguments: a TCP port, a Unix socket, or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import string
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

UNIX = "http+unix://"  # and the socket's path, every "/" and capital of it as %XX
PLAIN = set(string.ascii_lowercase + string.digits + "-._")
ONE_SECOND_S = 1.0


@dataclass(frozen=True)
class ServingMode:
    """What a vLLM server listens on.

    Args:
        uds: path of the Unix socket that it serves HTTP on, None for TCP.
        headless: whether it has no API server: its engines work for one on another node.
    """

    uds: str | None = None
    headless: bool = False


def parse_serving_mode(arguments: Sequence[str]) -> ServingMode:
    """The shape of a server that gets these arguments; a relative path stays one."""
    count = find_option(arguments, "--api-server-count", "-asc")
    none = count is not None and count.lstrip("+-0") == "" and count != ""
    flags = {word.replace("_", "-") for word in arguments if word.startswith("--")}
    headless = "--headless" in flags or none
    return ServingMode(None if headless else find_option(arguments, "--uds") or None, headless)


def find_option(arguments: Sequence[str], name: str, *others: str) -> str | None:
    """The value of the last ``--name value`` or ``--name=value``; vLLM takes ``_`` for ``-``.

    Args:
        arguments: as vLLM gets them.
        name: of the option.
        others: further names of it.
    """
    value = None
    for index, word in enumerate(arguments):
        head, equals, tail = word.partition("=")
        if (head.replace("_", "-") if head.startswith("--") else head) in {name, *others}:
            value = tail if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return value


def make_unix_url(path: str) -> str:
    """The URL of a server behind a Unix socket.

    The socket is the URL's host, and URLs make a host's capitals small: they are written as %XX.
    """
    return UNIX + "".join(
        chr(byte) if chr(byte) in PLAIN else f"%{byte:02X}" for byte in os.fsencode(path)
    )


def parse_unix_url(url: str) -> str | None:
    """The socket's path in a URL of `make_unix_url`'s, None for any other URL."""
    if not url.startswith(UNIX):
        return None
    return os.fsdecode(unquote_to_bytes(url.removeprefix(UNIX).partition("/")[0]))


def format_url(url: str) -> str:
    """A URL for a person: of a Unix socket, its path as it is."""
    path = parse_unix_url(url)
    return url if path is None else f"unix:{path}"


def has_listener(path: str) -> bool:
    """Whether somebody takes connections on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(ONE_SECOND_S)
        try:
            trial.connect(path)
        except (TimeoutError, BlockingIOError):
            return True  # its queue is full
        except OSError:
            return False
    return True


def remove_stale_socket(path: str) -> None:
    """Remove a Unix socket that a server left: vLLM does not start if it exists.

    Only this user's socket, and only if nobody listens on it.
    """
    with contextlib.suppress(OSError):
        at = os.lstat(path)
        if stat.S_ISSOCK(at.st_mode) and at.st_uid == os.geteuid() and not has_listener(path):
            os.unlink(path)
