"""Ports for servers of tests."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

LOCAL = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on, nor gets for a connection, while its server is down too.

    By chance, as several test processes look for one in the same second. The servers of a Redis
    cluster talk to each other on the one 10,000 above.
    """
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server((LOCAL, port)):
            return port
