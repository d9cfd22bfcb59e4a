"""This server's processes and their agents, for admins on another machine.

``GET /v1/vllmops/processes`` lists the processes; what is below it is passed on to the agents'
Unix sockets, so that a remote vllmops sees what one on this machine sees. Only the routes in
`GETS` and `POSTS` are passed on, only to processes of this server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from .. import __version__
from ..errors import VllmopsError
from ..host import proc, processes
from ..host.processes import ROLES, Process, Table
from ..host.shape import option
from ..host.states import compilers, state
from ..protocol.place import place
from ..protocol.remote import GETS, LONGEST_S, POSTS, Member, Members
from ..protocol.server import Pulse
from ..rpc import agent

T = TypeVar("T")

GET_S = 10.0
MOST_AT_ONCE = 16
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


def members() -> Members:
    """The processes of this server on this node."""
    table = family(os.getpid())
    root = next(iter(table))
    beats = {process: beat(process) for process in processes.tree(table, [root])}
    found = [placed(process, pulse) for process, pulse in beats.items()]
    arguments = processes.serve_arguments(table[root].words) or ()
    first = next(iter(arguments), "-")
    return Members(
        vllmops=__version__,
        node=os.uname().nodename,
        model=option(arguments, "--model") or (None if first.startswith("-") else first),
        processes=tuple(map(member, found)),
        pulses=tuple(
            Pulse(**agent.shown(process), pid=process.pid, age_s=pulse.age_s, beat=pulse.beat)
            for process, pulse in zip(found, beats.values(), strict=True)
            if pulse
        ),
        compilers=tuple(compilers(found[:1])),
    )


def family(pid: int) -> Table:
    """The process table, of the tree of one server alone, its root first.

    Args:
        pid: any process of it.
    """
    root = pid
    while pid := proc.parent(pid):
        with suppress(OSError):
            words = processes.seen(pid).words
            if processes.serve_arguments(words) is not None or processes.titled(words):
                root = pid
    queue, table = [root], {}
    for known in queue:
        with suppress(OSError):
            table[known] = processes.seen(known)
            queue += [child for child in proc.children(known) if child not in queue]
    return table


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


def placed(process: Process, pulse: agent.Pulse | None) -> Process:
    """A process with its node and its ranks, as its title and its heartbeat tell them."""
    if pulse is None:
        return dataclasses.replace(process, place=replace(process.place, node=os.uname().nodename))
    said, titled = pulse.beat.standing, process.place.numbers()
    sizes = said.sizes | dict.fromkeys(titled, 2)  # in a title, so there are several
    found = place(said.node, titled | said.numbers(), sizes)
    return dataclasses.replace(process, place=found)


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
    tree = processes.tree(table := family(os.getpid()), [next(iter(table))])
    process = next((process for process in tree if process.pid == int(pid)), None)
    if process is None:
        raise VllmopsError("agent.gone", f"pid {pid} is not a process of this server")
    longest = GET_S if method == "GET" else LONGEST_S
    reached = agent.reach(process, timeout_s=min(timeout_s, longest))
    status, content = reached.exchange(method, f"/{route}", body)
    if len(content) > ANSWER_BYTES:
        most = f"{ANSWER_BYTES >> 20} MiB"
        raise VllmopsError("admin.too-large", f"the answer of {agent.name(process)} exceeds {most}")
    return status, content
