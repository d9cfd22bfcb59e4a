"""Ports that this user's instances have claimed, in any VLLMOPS_HOME.

Binding shows whether somebody listens on a port. But a server listens only once its model is
loaded, and two servers that share a port (SO_REUSEPORT, with several API servers) get no error even
then. Any user can take the name of any claim. Such a port is passed over where there is another; it
is not refused, or other users could block ports.
"""

from __future__ import annotations

import os
import socket

from ..support.files import read_peer_uid
from ..support.home import format_user

ASKING = 4096  # connections that ask for the owner of a claim; the kernel allows fewer


def find_other_claimant(port: int) -> str:
    """The other user who holds the name of a port that was just claimed; empty if none does."""
    uid = find_claimant_uid(get_claim_name(port))
    if uid == os.geteuid():
        return ""
    return "another user" if uid is None else f"user {format_user(uid)}"


def get_claim_name(port: int) -> str:
    return f"\0vllmops-port-{port}-of-{os.geteuid()}"


def claim_port(port: int) -> int | None:
    """Claim a port.

    An abstract Unix socket is of the same network as the port, leaves no file, and goes with the
    last process that holds it. It listens, so that the kernel knows its owner: any user can take
    any name.

    Returns:
        An open file that holds it; None if another instance of this user's does.
    """
    name = get_claim_name(port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(name)
            held.listen(ASKING)
        except OSError:
            if find_claimant_uid(name) == os.geteuid():
                return None
        return held.detach()


def find_claimant_uid(name: str) -> int | None:
    """The uid of the process that listens by a name; None if unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # whose queue is full would keep it waiting
        try:
            asking.connect(name)
            return read_peer_uid(asking)
        except OSError:
            return None
