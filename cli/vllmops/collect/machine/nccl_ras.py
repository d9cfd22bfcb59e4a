"""Asks NCCL's own view of its communicators: the RAS service of the server's processes.

Every process with NCCL 2.24 or newer listens on TCP port 28028 (``NCCL_RAS_ADDR``,
``NCCL_RAS_ENABLE``), all on one port: the kernel picks who answers, so an answer counts only if it
is about this server. NCCL gives JSON since 2.28.7. The protocol is that of ``ncclras``, see
``src/ras/client.cc`` of NCCL.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ...model.server_snapshot import RasCapture
from . import proc
from .processes import Process, find_listener_pids
from .processes import list_listening_addresses as ports

PORT = 28028
ASKED_S = 2  # for the ranks of other nodes
ANSWER_S = 4.0  # for all answers
ANSWER_BYTES = 8 << 20
PID = re.compile(r'(?:"pid": ?|managed by process )(\d+)')


def collect_captures(server_processes: Iterable[Process], began: float) -> Iterator[RasCapture]:
    """What the RAS services of a server answer; nothing where NCCL has none.

    Args:
        server_processes: the processes of the server; a service of anybody else is not asked.
        began: of the examination, by the monotonic clock.
    """
    pids, asked = set[int](), dict[tuple[str, int], int]()
    for process in server_processes:
        with suppress(OSError, ValueError):
            pids |= {process.pid, proc.read_namespace_pid(process.pid)}
            for address in find_service_addresses(process.pid):
                asked.setdefault(address, process.pid)
    until = time.monotonic() + ANSWER_S
    for address, pid in asked.items():
        with suppress(OSError, ValueError):
            text, port = fetch_status(address, until), address[1]
            # Of ranks that are not behind, text names no process.
            named = parse_pids(text)
            if named & pids or (not named and find_listener_pids(port) <= pids):
                at_s = time.monotonic() - began
                yield RasCapture(at_s=at_s, pid=pid, port=port, text=text)


def parse_pids(text: str) -> set[int]:
    """The pids that an answer names, as their own nodes and containers have them."""
    return {int(pid) for pid in PID.findall(text)}


def find_service_addresses(pid: int) -> list[tuple[str, int]]:
    """Where a process's RAS service listens: at most one address."""
    port = find_service_port(proc.read_environment(pid))
    addresses = ports(pid) if port else []
    return [(get_client_address(address), port) for address, at in addresses if at == port][:1]


def find_service_port(environment: dict[str, str]) -> int:
    """The port that NCCL's variables name; 0 if they turn the service off."""
    if environment.get("NCCL_RAS_ENABLE", "1").strip() != "1":
        return 0
    _, _, port = environment.get("NCCL_RAS_ADDR", "").rpartition(":")
    return int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else PORT


def get_client_address(address: str) -> str:
    """An address to connect to, of one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def fetch_status(address: tuple[str, int], deadline: float) -> str:
    """The status of all communicators: JSON, or text of an older NCCL.

    Args:
        address: of the service.
        deadline: when it is given up, by the monotonic clock.

    Raises:
        OSError: nobody answers in time.
        ValueError: it is another service.
    """
    with socket.create_connection(address, timeout=1.0) as peer:
        exchange_line(peer, "CLIENT PROTOCOL 2", b"SERVER PROTOCOL", deadline)
        exchange_line(peer, f"TIMEOUT {ASKED_S}", b"OK", deadline)
        # Older ones refuse it, and go on in text.
        with suppress(ValueError):
            exchange_line(peer, "SET FORMAT json", b"OK", deadline)
        peer.sendall(b"VERBOSE STATUS\n")
        content = b""
        while part := receive_part(peer, deadline):
            content += part
            if len(content) > ANSWER_BYTES:
                raise ValueError("the answer is too long")
    return content.decode("utf-8", "replace")


def exchange_line(peer: socket.socket, line: str, answer: bytes, deadline: float) -> None:
    """Send one line, and expect one.

    Raises:
        OSError: as `fetch_status` does.
        ValueError: the answer begins otherwise.
    """
    peer.sendall(f"{line}\n".encode())
    content = b""
    while not content.endswith(b"\n") and len(content) < 1 << 10:
        part = receive_part(peer, deadline)
        if not part:
            raise ConnectionError("the service hung up")
        content += part
    if not content.upper().startswith(answer):
        raise ValueError(f"it answered {content[:60]!r}")


def receive_part(peer: socket.socket, deadline: float) -> bytes:
    """The next part of an answer; empty at its end."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    peer.settimeout(left_s)
    return peer.recv(1 << 16)
