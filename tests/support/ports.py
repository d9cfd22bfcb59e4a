"""Ports for servers of tests, out of a range that no other test process of the machine has."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from itertools import count

LOCAL = "127.0.0.1"
FIRST_PORT = 10_000  # below the kernel's own range, so no connection gets one of them by chance
EACH = 50
CLAIMS: list[socket.socket] = []
TURN = count()


@cache
def slot() -> int:
    """The number of this process: no other test process of the machine has it at the same time.

    An abstract Unix socket is the claim, so the kernel gives it up with the process.
    """
    for number in range(100):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0vllmops-tests-{number}")
        except OSError:
            claim.close()
            continue
        CLAIMS.append(claim)
        return number
    raise AssertionError("a hundred test processes run on this machine")


def free_port() -> int:
    """A port that nobody listens on, nor gets while its server is down, too.

    The servers of a Redis cluster talk to each other on the one 10,000 above.
    """
    while True:
        port = FIRST_PORT + slot() * 2 * EACH + next(TURN) % EACH
        with suppress(OSError), socket.create_server((LOCAL, port)):
            return port


def launch_ports() -> tuple[int, int]:
    """The first and the last port that `serve` may choose from, where a test names none."""
    first = FIRST_PORT + slot() * 2 * EACH + EACH
    return first, first + EACH - 1
