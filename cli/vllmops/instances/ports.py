"""Port numbers that instances have taken, whichever home and user they are of.

Who listens on a port is told by binding. A server listens only once its model is loaded, and two
that share a port (SO_REUSEPORT, with several API servers) are told nothing even then.
"""

from __future__ import annotations

import socket


def claim(port: int) -> int | None:
    """Take the number of a port.

    An abstract Unix socket is of the same network as the port, leaves no file, and goes with the
    last process that holds it.

    Returns:
        An open file that holds it; None where another instance does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(f"\0vllmops-port-{port}")
        except OSError:
            return None
        return held.detach()
