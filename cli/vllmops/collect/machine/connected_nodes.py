"""The other nodes of a server, as the kernel knows them: by the connections of its processes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ...model.roles import Role
from .processes import Process

MAPPED = "::ffff:"  # IPv4 as a socket of IPv6 shows it
ESTABLISHED = "01"
# Sent again so often, each time after twice the time: 3 s at least, and a lost packet is none.
SENT_AGAIN = 4


def find_node_addresses(tree: Sequence[Process], port: int | None) -> set[str]:
    """The addresses of other hosts that a server is connected with, clients and stores excepted.

    API servers connect to stores, and clients to them; other processes to other nodes.
    """
    own = {one.address for interface in psutil.net_if_addrs().values() for one in interface}
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


def find_unresponsive_nodes(tree: Sequence[Process], port: int | None) -> set[str]:
    """The addresses among `find_node_addresses` that the kernel sends something to again and again.

    It says nothing of a node that is sent nothing.
    """
    peers = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{tree[0].pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and int(fields[6], 16) >= SENT_AGAIN:
                    peers.add(parse_kernel_address(fields[2].partition(":")[0]))
    return peers & find_node_addresses(tree, port) if peers else peers


def parse_kernel_address(hex_text: str) -> str:
    """An address as the kernel's tables have it: words of four bytes, each in the CPU's order."""
    raw = b"".join(
        int(hex_text[at : at + 8], 16).to_bytes(4, sys.byteorder)
        for at in range(0, len(hex_text), 8)
    )
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw).removeprefix(MAPPED)
