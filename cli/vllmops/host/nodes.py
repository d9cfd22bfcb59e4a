"""The other nodes of a server, as the kernel knows them: by the connections of its processes."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from .processes import Process, Role

MAPPED = "::ffff:"  # IPv4 as a socket of IPv6 shows it


def connected(tree: Sequence[Process], port: int | None) -> set[str]:
    """The addresses of other hosts that a server is connected with, clients and stores excepted.

    API servers connect to stores, and clients to them; other processes to other nodes.
    """
    own = {one.address for found in psutil.net_if_addrs().values() for one in found}
    addresses = set()
    for process in tree:
        try:
            sockets = psutil.Process(process.pid).net_connections("tcp")
        except psutil.Error:
            continue
        listening = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN} - {port}
        addresses |= {
            s.raddr.ip.removeprefix(MAPPED)
            for s in sockets
            if s.raddr and (process.role is not Role.API or s.laddr.port in listening)
        }
    return {a for a in addresses if a not in own and not a.startswith("127.")}
