"""This server's processes and their agents, for admins on another machine.

``GET /v1/vllmops/processes`` lists the processes; what is below it is passed on to the agents'
Unix sockets, or to another node (see `nodes`), so that a remote vllmops sees what one on those
machines sees. Only the routes in `GETS` and `POSTS` are passed on, only to this server's processes.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

import msgspec

from ... import __version__
from ...collect.agents import agent_client, agent_files, membership
from ...collect.machine import proc, processes
from ...collect.machine.connected_nodes import find_node_addresses
from ...collect.machine.process_states import find_compilers, observe_process
from ...collect.machine.processes import Process, format_process_name
from ...collect.machine.server_address import find_option
from ...model.admin_api import (
    GETS,
    LONGEST_S,
    NODE_PORT,
    POSTS,
    PROCESSES,
    USUAL_NODE_PORT,
    NodeGap,
    RefusalBody,
    ServerProcess,
    ServerProcesses,
)
from ...model.environment import ADMIN_TOKEN_FILE
from ...model.ranks import DIMENSIONS
from ...model.roles import ROLES, Role, find_title_role
from ...model.server_snapshot import ProcessHeartbeat
from ...model.snapshot_files import DAMAGE
from ...support import background
from ...support.errors import VllmopsError
from ..identity import can_span_nodes, detect_role, find_standing
from . import node_channel

T = TypeVar("T")

GET_S = 10.0
MOST_AT_ONCE = 16
FRESH_S = 0.5  # a look at the process table serves the questions of one moment
WAIT_S = 0.02
BUSY_S = 1.0  # a request waits for its turn
NODE_S = 2.0  # another node lists its processes within
AGAIN_S = 5.0  # before a node is asked again that did not answer
LEARN_S = 15.0  # between two looks for the addresses of nodes
HTTP_PORT = 8000  # vLLM's default
ANSWER_BYTES = 64 << 20  # as many as the other end takes

OK = 200
NO_ANSWER = (OSError, HTTPException, ValueError)
REFUSALS = msgspec.json.Decoder(RefusalBody)

_seats = threading.BoundedSemaphore(MOST_AT_ONCE)


async def run_in_thread(work: Callable[[], T]) -> T:
    """Do blocking work beside the event loop.

    A thread of its own: those of a pool hold up the end of the process, and the event loop's own
    pool is vLLM's.

    Raises:
        VllmopsError: ``admin.busy``, or what `work` raises.
    """
    end = time.monotonic() + BUSY_S
    while not _seats.acquire(blocking=False):
        if time.monotonic() > end:
            raise VllmopsError(
                "admin.busy", f"{MOST_AT_ONCE} admin requests are being answered", "try again later"
            )
        await asyncio.sleep(WAIT_S)

    def run_and_release() -> T:
        try:
            return work()
        finally:
            _seats.release()

    return await asyncio.wrap_future(background.call_in_thread(run_and_release, "vllmops-admin"))


class LocalProcesses:
    """The processes of this server on this node, as they were a moment ago."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tree: tuple[Process, ...] = ()
        self.listed_at = -FRESH_S

    def list_processes(self) -> tuple[Process, ...]:
        """Its processes, root first; Ray's actors and headless engines are among them."""
        with self.lock:
            if time.monotonic() - self.listed_at > FRESH_S:
                table = processes.read_process_table()
                if detect_role() == "api":
                    tree = processes.build_process_tree(table, [find_root_pid(os.getpid())])
                    self.tree = membership.complete_tree(table, tree)
                else:
                    self.tree = membership.collect_server_processes(
                        table, find_standing().servers, os.geteuid()
                    )
                self.listed_at = time.monotonic()
            return self.tree

    def find_process(self, pid: int) -> Process | None:
        """The process with that pid, None if it is gone, or none of this server's."""
        process = next((process for process in self.list_processes() if process.pid == pid), None)
        return process if process and processes.is_alive(process) else None


_nearby = LocalProcesses()


def observe_node_processes() -> ServerProcesses:
    """The processes of this server on this node."""
    local = _nearby.list_processes()
    beats = {process: read_heartbeat(process) for process in local}
    arguments = read_serve_arguments()
    first = next(iter(arguments), "-")
    return ServerProcesses(
        vllmops=__version__,
        node=os.uname().nodename,
        model=find_option(arguments, "--model") or (None if first.startswith("-") else first),
        processes=tuple(map(export_process, local)),
        heartbeats=tuple(
            ProcessHeartbeat(
                **agent_client.get_process_fields(process),
                pid=process.pid,
                age_s=pulse.age_s,
                heartbeat=pulse.heartbeat,
            )
            for process, pulse in beats.items()
            if pulse
        ),
        compilers=tuple(find_compilers(local[:1])),
    )


def read_serve_arguments() -> Sequence[str]:
    """What the server was given on its command line on this node."""
    nearby = _nearby.list_processes()
    return (
        (processes.parse_serve_arguments(proc.read_command_line(nearby[0].pid)) or ())
        if nearby
        else ()
    )


class RemoteNode:
    """Another node of this server, and its last answer.

    Args:
        address: of the node.
        token: the file with the admin token.
    """

    def __init__(self, address: str, token: Path) -> None:
        self.address = address
        self.token = token
        self.servers: list[str] = []
        self.members: ServerProcesses | None = None
        self.no_answer_reason = ""  # it does not answer, in words
        self.has_refused = False  # so the host is there, and its agents are not
        self.last_request_at = -AGAIN_S

    def make_gap(self, reason: str) -> NodeGap:
        return NodeGap(self.address, self.members.node if self.members else "", reason)

    def refresh_processes(self, servers: list[str]) -> None:
        """Ask what it has; not again right after it did not answer."""
        self.servers = servers
        if time.monotonic() - self.last_request_at < (
            AGAIN_S if self.no_answer_reason else FRESH_S
        ):
            return
        try:
            status, content = self.send_request("GET", PROCESSES, None, NODE_S)
            if status != OK:
                raise VllmopsError("admin.failed", REFUSALS.decode(content).error.message)
            self.members = agent_client.decode_answer(
                f"the agent of {self.address}", content, ServerProcesses
            )
            self.no_answer_reason, self.has_refused = "", False
        except (VllmopsError, *NO_ANSWER, *DAMAGE) as error:
            self.no_answer_reason, self.has_refused = (
                explain_no_answer(error),
                isinstance(error, ConnectionRefusedError),
            )
        self.last_request_at = time.monotonic()

    def send_request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """What it answers; raises as `node_channel.request_from_node` does."""
        return node_channel.request_from_node(
            self.address,
            method,
            path,
            body,
            token=self.token,
            servers=self.servers,
            timeout_s=timeout_s,
        )

    def make_lost_error(self, reason: str) -> VllmopsError:
        return VllmopsError(
            "agent.node-lost", self.make_gap(reason).text, "vllmops help agent.node-lost"
        )

    def forward_request(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """What one of its processes answers; raises VllmopsError ``agent.node-lost``."""
        if self.no_answer_reason and time.monotonic() - self.last_request_at < AGAIN_S:
            raise self.make_lost_error(self.no_answer_reason)
        try:
            return self.send_request(method, f"{PROCESSES}/{path}", body, timeout_s)
        except NO_ANSWER as error:
            raise self.make_lost_error(explain_no_answer(error)) from error


class RemoteNodes:
    """The other nodes of this server, by their addresses."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.nodes: dict[str, RemoteNode] = {}
        self.learnt = -LEARN_S

    def list_nodes(self, heartbeats: Sequence[ProcessHeartbeat]) -> list[RemoteNode]:
        """The nodes that the server is connected with, or was; all have been asked just now.

        Args:
            heartbeats: of its processes on this node.
        """
        place = os.environ.get(ADMIN_TOKEN_FILE)
        if not place or detect_role() != "api" or not can_span_nodes():
            return []
        servers = sorted({one for pulse in heartbeats for one in pulse.heartbeat.standing.servers})
        with self.lock:
            if time.monotonic() - self.learnt > LEARN_S:
                self.learnt = time.monotonic()
                self.discover_nodes(Path(place))
            looks = [
                threading.Thread(target=node.refresh_processes, args=[servers], daemon=True)
                for node in self.nodes.values()
            ]
            for look in looks:  # no pool: its threads hold up the end of the process
                look.start()
            for look in looks:
                look.join(NODE_S + node_channel.SLACK_S + 1)
            return list(self.nodes.values())

    def find_node(self, address: str) -> RemoteNode | None:
        """The node with that address; None if it is none of this server's."""
        if address not in self.nodes:  # another API server has listed its processes
            self.list_nodes(observe_node_processes().heartbeats)
        return self.nodes.get(address)

    def discover_nodes(self, token: Path) -> None:
        """Look for connections; who has none any more is kept if its network may be cut."""
        port = find_option(read_serve_arguments(), "--port") or ""
        addresses = find_node_addresses(
            _nearby.list_processes(), int(port) if port.isdecimal() else HTTP_PORT
        )
        kept = {
            a: node
            for a, node in self.nodes.items()
            if a in addresses or (node.members and not node.has_refused)
        }
        self.nodes = {a: kept.get(a) or RemoteNode(a, token) for a in {*addresses, *kept}}


_afar = RemoteNodes()


def observe_server_processes() -> ServerProcesses:
    """The processes of this server: of this node, and of those others that can be asked."""
    own = observe_node_processes()
    seen = identify_processes(own)
    names = {own.node}
    processes_, pulses, silent = list(own.processes), list(own.heartbeats), list[NodeGap]()
    for node in _afar.list_nodes(own.heartbeats):
        there, at = node.members, node.address
        if node.no_answer_reason:
            silent.append(node.make_gap(node.no_answer_reason))
        if there is None or seen & (
            new := identify_processes(there)
        ):  # a node may have several addresses
            continue
        seen |= new
        name = there.node if there.node not in names else f"{there.node} ({at})"
        names.add(name)
        state = {"state": "?"} if node.no_answer_reason else {}
        processes_ += (
            msgspec.structs.replace(process, node=name, node_address=at, **state)
            for process in there.processes
        )
        if not node.no_answer_reason:
            pulses += (msgspec.structs.replace(pulse, node=name) for pulse in there.heartbeats)
    if has_all_ranks(processes_, pulses):
        # Who was never heard is a host of something else, as the head of Ray's cluster may be.
        silent = [node for node in silent if node.node]
    return msgspec.structs.replace(
        own, processes=tuple(processes_), heartbeats=tuple(pulses), gaps=tuple(silent)
    )


def has_all_ranks(ranks: Sequence[ServerProcess], heartbeats: Sequence[ProcessHeartbeat]) -> bool:
    """Whether all ranks of a server are there, as far as its agents know how many there are."""
    sizes = dict.fromkeys(DIMENSIONS, 1)
    for pulse in heartbeats:
        for name, size in pulse.heartbeat.standing.sizes.items():
            sizes[name] = max(size, sizes.get(name, 1))
    count = math.prod(sizes.values())
    workers = {(p.dp_rank, p.tp_rank, p.pp_rank) for p in ranks if p.role == Role.WORKER}
    # An engine that has one worker may be that itself.
    alone = {p.dp_rank for p in ranks if p.role == Role.ENGINE} if count == sizes["DP"] else ()
    return max(len(workers), len(alone)) >= count


def identify_processes(answer: ServerProcesses) -> set[tuple[str, int, int]]:
    """Which processes a node has, whatever address it was asked at."""
    return {(answer.node, p.pid, p.start_ticks) for p in answer.processes}


def explain_no_answer(error: Exception) -> str:
    """Why there is no answer, for a person."""
    if isinstance(error, VllmopsError):
        return error.message
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ConnectionRefusedError):
        port = os.environ.get(NODE_PORT) or USUAL_NODE_PORT
        return f"nobody listens at port {port}; its vllmops needs the admin token, too"
    if isinstance(error, ssl.SSLError | ConnectionResetError):
        return f"it has another admin token, or is none of this server: {error}"
    return str(error) or type(error).__name__


def find_root_pid(pid: int) -> int:
    """The topmost vLLM process above one, or that one itself."""
    top = pid
    while pid := proc.read_parent_pid(pid):
        with suppress(OSError):
            words = processes.read_process_entry(pid).arguments
            if processes.parse_serve_arguments(words) is not None or find_title_role(words):
                top = pid
    return top


def export_process(process: Process) -> ServerProcess:
    """A process, for the other machine; without a command line, which may hold keys."""
    seen = msgspec.structs.asdict(observe_process(process))
    return ServerProcess(**seen, start_ticks=process.start_ticks, boot=process.boot)


def read_heartbeat(process: Process) -> agent_files.TimedHeartbeat | None:
    """The heartbeat of a process, None if it has none."""
    with suppress(VllmopsError):
        return agent_files.read_heartbeat(process) if process.role in ROLES else None
    return None


def forward_to_agent(
    method: str, path: str, body: bytes | None, timeout_s: float
) -> tuple[int, bytes]:
    """What the agent of a process answers: the status, and JSON.

    Args:
        method: ``GET`` or ``POST``.
        path: from the pid on: the pid, ``@`` and the address if it is on another node, the route.
        body: of a ``POST``.
        timeout_s: seconds that the caller waits.

    Raises:
        VllmopsError: ``admin.no-route``, ``agent.gone``, ``agent.node-lost``, or as
            `agent_client.open_agent` does.
    """
    where, _, route = path.partition("/")
    pid, _, address = where.partition("@")
    if route not in (GETS if method == "GET" else POSTS) or not pid.isdecimal():
        raise VllmopsError("admin.no-route", "there is no such admin route")
    timeout_s = min(timeout_s, GET_S if method == "GET" else LONGEST_S)
    if address and (node := _afar.find_node(address)):
        return node.forward_request(method, f"{pid}/{route}", body, timeout_s)
    process = None if address else _nearby.find_process(int(pid))
    if process is None:
        raise VllmopsError("agent.gone", f"pid {where} is not a process of this server")
    reached = agent_client.open_agent(process, timeout_s=timeout_s)
    status, content = reached.send_request(method, f"/{route}", body)
    if len(content) > ANSWER_BYTES:
        most = f"{ANSWER_BYTES >> 20} MiB"
        raise VllmopsError(
            "admin.too-large",
            f"the answer of {format_process_name(process)} exceeds {most}",
        )
    return status, content
