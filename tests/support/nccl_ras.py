"""A process whose RAS service speaks NCCL's protocol; run as a program.

It stands for NCCL, which needs GPUs. Its words are how it behaves, and files with the answers, in
turn; the last one again and again. PID in them becomes its own. It prints its port.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from itertools import chain, repeat
from pathlib import Path


def serve(kind: str, answers: list[bytes]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    for answer in chain(answers, repeat(answers[-1])):
        peer, _ = listener.accept()
        with peer, peer.makefile("rwb") as lines:
            try:
                talk(kind, lines, answer)
            except (OSError, ValueError):
                continue


def talk(kind: str, lines: object, answer: bytes) -> None:
    read, write = lines.readline, lines.write  # type: ignore[attr-defined]
    flush = lines.flush  # type: ignore[attr-defined]
    while words := read().strip():
        if kind == "silent":
            time.sleep(60)
        if kind == "other":
            write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            return
        if words.startswith(b"CLIENT PROTOCOL"):
            write(b"SERVER PROTOCOL 2\n")
        elif words.startswith(b"SET FORMAT") and kind == "old":
            write(b"ERROR: Unknown command\n")
        elif words.endswith(b"STATUS"):
            write(answer)
            while kind == "endless":
                write(b"x" * (1 << 16))
            flush()
            return
        else:
            write(b"OK\n")
        flush()


if __name__ == "__main__":
    own = str(os.getpid()).encode()
    texts = [Path(name).read_bytes().replace(b"PID", own) for name in sys.argv[2:]]
    serve(sys.argv[1], texts or [b""])
