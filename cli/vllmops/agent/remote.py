"""This server's processes on this node and their agents, for admins on another machine.

``GET /v1/vllmops/processes`` lists the processes; what is below it is passed on to the agents'
Unix sockets, so that a remote vllmops sees what one on this machine sees. Only the routes in
`GETS` and `POSTS` are passed on, only to processes of this server.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from .. import __version__
from ..errors import VllmopsError
from ..host import proc, processes
from ..host.processes import ROLES, Process
from ..host.roles import titled
from ..host.shape import option
from ..host.states import compilers, state
from ..protocol.remote import GETS, LONGEST_S, POSTS, Member, Members
from ..protocol.server import Pulse
from ..rpc import agent, membership

T = TypeVar("T")

GET_S = 10.0
MOST_AT_ONCE = 16
FRESH_S = 0.5  # a look at the process table serves the questions of one moment
ANSWER_BYTES = 64 << 20  # as many as the other end takes

_seats = threading.BoundedSemaphore(MOST_AT_ONCE)


async def aside(work: Callable[[], T]) -> T:
    """Do blocking work beside the event loop.

    A thread of its own: those of a pool hold up the end of the process, and the event loop's own
    pool is vLLM's.

    Raises:
        VllmopsError: ``admin.busy``, or what `work` raises.
    """
    if not _seats.acquire(blocking=False):
        raise VllmopsError(
            "admin.busy", f"{MOST_AT_ONCE} admin requests are being answered", "try again later"
        )
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            _seats.release()

    threading.Thread(target=run, name="vllmops-admin", daemon=True).start()
    return await asyncio.wrap_future(done)


class Nearby:
    """The processes of this server on this node, as they were a moment ago."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tree: tuple[Process, ...] = ()
        self.at = -FRESH_S

    def all(self) -> tuple[Process, ...]:
        """Its processes, root first; Ray's actors and headless engines are among them."""
        with self.lock:
            if time.monotonic() - self.at > FRESH_S:
                table = processes.table()
                tree = processes.tree(table, [root(os.getpid())])
                self.tree = membership.complete(table, tree)
                self.at = time.monotonic()
            return self.tree

    def find(self, pid: int) -> Process | None:
        """The process with that pid, None if it is gone, or none of this server's."""
        process = next((process for process in self.all() if process.pid == pid), None)
        return process if process and processes.alive(process) else None


_nearby = Nearby()


def members() -> Members:
    """The processes of this server on this node."""
    found = _nearby.all()
    beats = {process: beat(process) for process in found}
    arguments = processes.serve_arguments(proc.command_line(found[0].pid)) or ()
    first = next(iter(arguments), "-")
    return Members(
        vllmops=__version__,
        node=os.uname().nodename,
        model=option(arguments, "--model") or (None if first.startswith("-") else first),
        processes=tuple(map(member, found)),
        pulses=tuple(
            Pulse(**agent.shown(process), pid=process.pid, age_s=pulse.age_s, beat=pulse.beat)
            for process, pulse in beats.items()
            if pulse
        ),
        compilers=tuple(compilers(found[:1])),
    )


def root(pid: int) -> int:
    """The topmost vLLM process above one, or that one itself."""
    found = pid
    while pid := proc.parent(pid):
        with suppress(OSError):
            words = processes.seen(pid).words
            if processes.serve_arguments(words) is not None or titled(words):
                found = pid
    return found


def member(process: Process) -> Member:
    """A process, for the other machine; without a command line, which may hold keys."""
    seen = state(process)
    fields = {name: getattr(seen, name) for name in seen.__struct_fields__}
    return Member(**fields, start_ticks=process.start_ticks, boot=process.boot)


def beat(process: Process) -> agent.Pulse | None:
    """The heartbeat of a process, None if it has none."""
    with suppress(VllmopsError):
        return agent.beat(process) if process.role in ROLES else None
    return None


def passed_on(method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    """What the agent of a process answers: the status, and JSON.

    Args:
        method: ``GET`` or ``POST``.
        path: from the pid on: the pid and the route.
        body: of a ``POST``.
        timeout_s: seconds that the caller waits.

    Raises:
        VllmopsError: ``admin.no-route``, ``agent.gone``, or as `agent.reach` does.
    """
    pid, _, route = path.partition("/")
    if route not in (GETS if method == "GET" else POSTS) or not pid.isdecimal():
        raise VllmopsError("admin.no-route", "there is no such admin route")
    if (process := _nearby.find(int(pid))) is None:
        raise VllmopsError("agent.gone", f"pid {pid} is not a process of this server")
    longest = GET_S if method == "GET" else LONGEST_S
    reached = agent.reach(process, timeout_s=min(timeout_s, longest))
    status, content = reached.exchange(method, f"/{route}", body)
    if len(content) > ANSWER_BYTES:
        most = f"{ANSWER_BYTES >> 20} MiB"
        raise VllmopsError("admin.too-large", f"the answer of {agent.name(process)} exceeds {most}")
    return status, content
