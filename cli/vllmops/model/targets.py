"""How a person names a server: an instance name, a pid, or a URL; and how it may be reached."""

from __future__ import annotations

import re
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..support.errors import VllmopsError, make_usage_error

if TYPE_CHECKING:
    from urllib.parse import SplitResult

# Of an instance; a pid has this form, too.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LONGEST_HOST, LONGEST_PART = 253, 63  # characters of a host name, and between its dots
HOST = re.compile(r"[A-Za-z0-9._-]+")
SCHEMES = {"http": 80, "https": 443}
POD = re.compile(r"k8s:([a-z0-9-]{1,63})/([a-z0-9.-]{1,253})(?::([0-9]{1,5}))?")
POD_PORT = 8000
UNIX = ("unix:/", "http+unix://")  # a server's Unix socket
FORMS = "-t NAME, -t PID, -t http://HOST:PORT or -t k8s:NAMESPACE/POD[:PORT]"


class RemoteAccess(NamedTuple):
    """How a command may reach servers on other machines.

    Args:
        token: the file with the admin token, None without one.
    """

    token: Path | None = None


# What the command that runs may use; None for a command that works on this machine only.
access: ContextVar[RemoteAccess | None] = ContextVar("access", default=None)


class ServerUrl(NamedTuple):
    """A server's URL.

    Args:
        text: the URL without ``/v1`` or a slash at its end.
        host: a name or an address, without brackets.
        port: the scheme's own where none was given.
    """

    text: str
    host: str
    port: int


class Pod(NamedTuple):
    """A port of a Kubernetes pod.

    Args:
        text: as it was given.
        namespace, name: of the pod.
        port: where the server listens in it.
    """

    text: str
    namespace: str
    name: str
    port: int


def parse_target(target: str) -> str | ServerUrl | Pod:
    """An instance name, a pid or a Unix socket as it was given, a URL, or a pod.

    Raises:
        VllmopsError: ``usage``.
    """
    if target.startswith(UNIX):
        return target
    if "://" in target:
        return parse_server_url(target)
    if match := POD.fullmatch(target):
        port = int(match[3] or POD_PORT)
        if 0 < port < 1 << 16:
            return Pod(target, match[1], match[2], port)
    if NAME.fullmatch(target):
        return target
    raise make_target_error(f"{target!r} is not an instance name, a pid, a URL or a pod")


def parse_server_url(text: str) -> ServerUrl:
    """The URL of a server.

    Raises:
        VllmopsError: ``usage``.
    """
    parts = split_url(text)
    if parts.username is not None or parts.password is not None:
        # Not the URL itself: a message must not contain a password.
        raise make_target_error(
            "a server's URL has no user and no password; set VLLM_API_KEY for its key"
        )
    if parts.query or parts.fragment:
        raise make_target_error("a server's URL has no query and no fragment")
    assert parts.hostname
    base = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")
    return ServerUrl(base, parts.hostname, parts.port or SCHEMES[parts.scheme])


def split_url(text: str) -> SplitResult:
    """The parts of an http or https URL that can be one.

    Raises:
        VllmopsError: ``usage``; the message names only host and port of the URL.
    """
    from urllib.parse import urlsplit  # noqa: PLC0415 - slow, and most targets are names

    try:
        if not text.isprintable() or " " in text:
            raise ValueError("it has a space or a control character")
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise ValueError("it does not begin with http:// or https://")
        host = parts.hostname or ""
        if not host.isascii() or "xn--" in host:
            import idna  # noqa: PLC0415 - it comes with httpx, which would raise no error of its own

            host = idna.encode(idna.decode(host)).decode()
        if len(host) > LONGEST_HOST or any(len(part) > LONGEST_PART for part in host.split(".")):
            raise ValueError("its host name is too long")
        address = parts.netloc.rpartition("@")[2]
        if not host or not (HOST.fullmatch(host) or address.startswith("[")):
            raise ValueError(f"{host!r} is not a host name")
        if address.startswith("["):
            from ipaddress import IPv6Address  # noqa: PLC0415 - seldom needed

            IPv6Address(host)
        if parts.port == 0 or address.endswith(":"):
            raise ValueError("its port is not valid")
        if "\\" in text:
            raise ValueError("it has a backslash")
    except ValueError as error:
        raise make_target_error(f"this is not the URL of a server: {error}") from error
    return parts


def make_target_error(message: str) -> VllmopsError:
    return make_usage_error(message, FORMS)
