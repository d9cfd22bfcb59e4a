"""Who listens on a port of this machine: secrets go only to this user's processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ...support.home import format_user
from . import proc
from .server_address import parse_unix_url

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTEN = "0A"  # TCP_LISTEN
ANSWER_S = 1.0
FRESH_S = 0.2


def explain_distrust(url: str) -> str:
    """Why a key or a token must not be sent to a URL; empty if it may be.

    On this machine it goes to a listener of this user's or of root's alone: on any port any user
    can listen. A server on another machine is the one that was named.
    """
    if (path := parse_unix_url(url)) is not None:
        with suppress(OSError):  # without it nothing can be sent
            uid = os.stat(path).st_uid
            return "" if uid in {0, os.geteuid()} else f"{path} belongs to {format_user(uid)}"
        return ""
    with suppress(ValueError):
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not is_this_machine(parts.hostname or ""):
            return ""
        users = find_listener_uids(port)
        if others := users - {0, os.geteuid()}:
            return f"the process that listens on port {port} belongs to {format_user(min(others))}"
        if users or not is_port_open(parts.hostname or "", port):
            return ""  # where nobody listens, nothing can be sent
        return f"the owner of the process on port {port} is unknown"
    return f"{url} is not an address"


def is_this_machine(host: str, *, exclusive: bool = False) -> bool:
    """Whether a host name can be this machine; with ``exclusive``, can be no other one."""
    if host in {"", "localhost"}:
        return True
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    own = {
        parse_address(address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
    }
    named = {parse_address(str(address[0])) for *_, address in resolved}
    judge = all if exclusive else any
    return judge(
        address.is_loopback or address.is_unspecified or address in own for address in named
    )


def is_port_open(host: str, port: int) -> bool:
    """Whether anybody listens on a port, though the kernel's tables name nobody."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def parse_address(address: str) -> IPv4Address | IPv6Address:
    """An address, without its scope, and as of version 4 where it stands for one."""
    ip = ip_address(address.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def find_listener_uids(port: int) -> set[int]:
    """The uids of those who listen on a port, on whatever address."""
    return OWNERS.find_uids(port)


class PortOwners:
    """Who listens on which port; those who ask at the same moment share a look.

    The kernel takes some 40 ms for it on a busy machine, and a command may have many targets.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read_at = -FRESH_S
        self.uids: dict[int, set[int]] = {}

    def find_uids(self, port: int) -> set[int]:
        """The uids of those who listen on a port."""
        with self.lock:
            if port not in self.uids or time.monotonic() - self.read_at > FRESH_S:
                self.uids, self.read_at = {}, time.monotonic()
                for number, uid in list_listener_uids():
                    self.uids.setdefault(number, set()).add(uid)
            return self.uids.get(port, set())


def list_listener_uids() -> Iterator[tuple[int, int]]:
    """Ports, each with a uid of those who listen on it.

    Without the kernel's tables, as on a Mac, only this user's own processes are known.
    """
    if not any(table.exists() for table in TABLES):
        yield from list_own_listeners()
    for table in TABLES:
        with suppress(OSError):
            for line in proc.read_lossy_text(table).splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == LISTEN:
                    yield int(local.rpartition(":")[2], 16), int(uid)


def list_own_listeners() -> Iterator[tuple[int, int]]:
    uid = os.geteuid()
    with suppress(OSError):
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.uids().effective == uid:
                    for connection in process.net_connections("tcp"):
                        if connection.status == psutil.CONN_LISTEN:
                            yield connection.laddr.port, uid


OWNERS = PortOwners()
