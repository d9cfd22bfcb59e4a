"""Ports that this user's instances have claimed, in any VLLMOPS_HOME.

Binding shows whether somebody listens on a port. But a server listens only once its model is
loaded, and two servers that share a port (SO_REUSEPORT, with several API servers) get no error even
then. Any user can take the name of any claim. Such a port is passed over where there is another; it
is not refused, or other users could block ports.
"""

from __future__ import annotations

import os
import socket

from ..files import peer
from ..home import user

ASKING = 4096  # connections that ask for the owner of a claim; the kernel allows fewer


def stranger(port: int) -> str:
    """The other user who holds the name of a port that was just claimed; empty if none does."""
    uid = holder(name_of(port))
    if uid == os.geteuid():
        return ""
    return "another user" if uid is None else f"user {user(uid)}"


def name_of(port: int) -> str:
    return f"\0vllmops-port-{port}-of-{os.geteuid()}"


def claim(port: int) -> int | None:
    """Claim a port.

    An abstract Unix socket is of the same network as the port, leaves no file, and goes with the
    last process that holds it. It listens, so that the kernel knows its owner: any user can take
    any name.

    Returns:
        An open file that holds it; None if another instance of this user's does.
    """
    name = name_of(port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(name)
            held.listen(ASKING)
        except OSError:
            if holder(name) == os.geteuid():
                return None
        return held.detach()


def holder(name: str) -> int | None:
    """The uid of the process that listens by a name; None if unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # whose queue is full would keep it waiting
        try:
            asking.connect(name)
            return peer(asking)
        except OSError:
            return None
