"""A process of one thread that forks commands for a test that has several.

A fork has the locks of other threads, and nobody who would release them. To start an interpreter
takes ten times as long as to fork one that has all imports.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

PARTS: Final = 4  # open files that come with each request
NUMBER: Final = 4  # bytes


class Forking:
    """The process; it ends with the one that made it, at the latest."""

    def __init__(self, child: Callable[..., object]) -> None:
        """Fork it; this process has no threads of tests yet.

        Args:
            child: what each of its forks calls, with what `start` got; its output is a file.
        """
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                shut(theirs.fileno())
                serve(theirs, child)
            finally:
                os._exit(70)
        theirs.close()

    def close(self) -> None:
        """End it."""
        self.socket.close()
        os.waitpid(self.pid, 0)

    def start(self, out: int, err: int, *given: Any) -> tuple[int, Callable[[], int]]:
        """Start a child.

        Args:
            out: the file that is its standard output.
            err: the file that it complains to.
            given: what it is called with; pickled.

        Returns:
            Its pid, and what waits for its end, and gives its exit code.
        """
        request = os.memfd_create("request")
        ended, theirs = os.pipe()
        try:
            os.write(request, pickle.dumps(given))
            socket.send_fds(self.socket, [b"1"], [request, out, err, theirs])
        finally:
            os.close(request)
            os.close(theirs)

        def end() -> int:
            code = number(ended)
            os.close(ended)
            return code

        return number(ended), end


def number(file: int) -> int:
    """The next number that the process wrote."""
    words = os.read(file, NUMBER)
    assert len(words) == NUMBER, "the forking process has died"
    return int.from_bytes(words, "little", signed=True)


def shut(kept: int) -> None:
    """Close what the parent's peers would wait for."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file != kept:
            try:
                os.close(file)
            except OSError:
                continue
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve(near: socket.socket, child: Callable[..., object]) -> None:
    """Fork what is asked for, and tell how it ended, until nobody can ask any more."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([near.fileno(), *running], [], [])[0]:
            if ready != near.fileno():
                pid, shown = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                tell(shown, code)
                os.close(shown)
                os.close(ready)
                continue
            words, files, _, _ = socket.recv_fds(near, 1, PARTS)
            if not words:
                return
            request, out, err, shown = files
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                given = pickle.loads(os.pread(request, os.fstat(request).st_size, 0))
                os.dup2(out, 1)
                os.dup2(err, 2)
                child(*given)
            tell(shown, pid)
            running[os.pidfd_open(pid)] = pid, shown
            for file in (request, out, err):
                os.close(file)


def tell(file: int, value: int) -> None:
    try:
        os.write(file, value.to_bytes(NUMBER, "little", signed=True))
    except BrokenPipeError:
        return
