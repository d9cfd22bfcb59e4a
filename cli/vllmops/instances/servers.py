"""The vLLM servers of this machine, and how a person names one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ..errors import VllmopsError
from ..host import processes
from ..host.listeners import here
from ..host.nodes import unanswered
from ..host.processes import Process
from ..host.roles import Role
from ..host.shape import option, shape, unix_path
from ..numbers import whole
from ..protocol.identity import Identity, boot_id
from ..rpc import membership
from ..store.urls import shown
from ..targets import Pod, Url, access, parsed
from ..vllm_api.endpoint import Endpoint
from .control import adopt
from .record import Folder, Record, State, address, folders

if TYPE_CHECKING:
    from ..vllm_api.remote import Fleet

DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Server:
    """A vLLM server on this machine.

    Args:
        name: the instance's name, None for one that vllmops did not start.
        processes: the tree, root first, and what else on this machine belongs to the server.
        host: address it listens on, None if unknown.
        port: TCP port, None if unknown, or where it has none.
        model: the model as given to vLLM.
        scheme: ``http``, or ``https`` if it was given a certificate.
        record: what its supervisor wrote, None for one that vllmops did not start.
        supervised: whether its supervisor is alive, None for one that never had one.
        uds, headless: as in `Shape`.
        fleet: what a server on another machine is asked through, None for one on this machine.
    """

    name: str | None
    processes: tuple[Process, ...]
    host: str | None = None
    port: int | None = None
    model: str | None = None
    scheme: str = "http"
    record: Record | None = None
    supervised: bool | None = None
    uds: str | None = None
    headless: bool = False
    fleet: Fleet | None = None

    @property
    def pid(self) -> int | None:
        return self.processes[0].pid if self.processes else None

    @property
    def url(self) -> str | None:
        if self.fleet is not None:
            return self.fleet.admin.endpoint.url
        return address(self.scheme, self.host, self.port, self.uds)

    @property
    def label(self) -> str:
        """How messages name it, and what ``--target`` takes."""
        if self.fleet is not None:
            return self.fleet.admin.endpoint.name
        return self.name or str(self.pid)

    def note(self) -> str:
        """Which of its nodes do not answer, as its supervisor has found or by what can be seen."""
        if self.fleet is not None:
            try:
                return "; ".join(node.text for node in self.fleet.members().silent)
            except VllmopsError:
                return ""
        if self.record:
            return self.record.note
        silent = unanswered(self.processes, self.port) if self.processes else ()
        return ", ".join(f"node {address} does not answer" for address in sorted(silent))

    def of(self, *roles: Role) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role in roles)


def find() -> list[Server]:
    """Every vLLM server of this machine: instances first by name, then the others by age.

    An instance that is over is among them, without processes.
    """
    table = processes.table()
    instances, trees = [], []
    for folder in folders():
        try:
            record = folder.read()
        except VllmopsError:
            continue  # its processes are still found below, by the process table
        if record is not None:
            instances.append((folder, record))
            known = [p.pid for p in record.processes if is_in(table, p)]
            trees.append(processes.tree(table, known))
    trees, strangers = membership.groups(table, trees)
    servers = [
        Server(
            name=record.name,
            processes=tree,
            host=record.host,
            port=record.port,
            model=record.model,
            scheme=record.scheme,
            record=record,
            supervised=folder.supervised(),
            uds=record.uds,
            headless=record.headless,
        )
        for (folder, record), tree in zip(instances, trees, strict=True)
    ]
    return servers + [stranger(table, tree) for tree in strangers]


def is_in(table: processes.Table, process: Process) -> bool:
    seen = table.get(process.pid)
    return (
        seen is not None
        and not seen.zombie
        and process.identity == Identity(seen.pid, seen.start_ticks, boot_id())
    )


def stranger(table: processes.Table, tree: membership.Tree) -> Server:
    """A server that vllmops did not start, by its command line and its sockets."""
    pid = tree[0].pid
    arguments = processes.serve_arguments(table[pid].words)
    if arguments is None:
        return Server(name=None, processes=tree)
    port = option(arguments, "--port")
    listening = processes.listening_ports(pid)
    shape_ = shape(arguments)
    reached = not (shape_.headless or shape_.uds)
    uds = shape_.uds and processes.absolute(pid, shape_.uds)
    known = listening[0] if listening else DEFAULT_PORT
    with suppress(ValueError):  # anybody may have such a command line
        known = whole(port or "", 1, 65535)
    return Server(
        name=None,
        processes=tree,
        host=option(arguments, "--host") or "",
        port=known if reached else None,
        model=option(arguments, "--model") or positional(arguments),
        scheme="https" if option(arguments, "--ssl-certfile") else "http",
        uds=uds,
        headless=shape_.headless,
    )


def positional(arguments: Sequence[str]) -> str | None:
    first = next(iter(arguments), None)
    return None if first is None or first.startswith("-") else first


def resolve(target: str | None, *, strangers: bool = True) -> Server:
    """The running server that a target names: an instance name, a pid of its tree, or a URL.

    With an admin token, a URL is asked over HTTP, on whatever machine it is.

    Args:
        target: None means ``VLLMOPS_TARGET``, or else the only instance that runs.
        strangers: where no instance runs and none was named, take the only server that vllmops
            did not start. What does harm does not do that.

    Raises:
        VllmopsError: ``target.unknown``, ``target.none``, ``target.over`` (exit code 5),
            ``target.ambiguous``, ``target.remote`` or ``usage`` (2), or as `distant` does.
    """
    if target is None:
        target = os.environ.get("VLLMOPS_TARGET") or None
    asked = parsed(target) if target is not None else None
    if isinstance(asked, Url | Pod) and (remote := distant(asked)):
        return remote
    try:
        every = find()
    except VllmopsError:  # there is no /proc
        if target and away(asked):
            raise unknown(target, asked, "") from None
        raise
    reclaim(every)
    servers = [server for server in every if server.processes or pending(server)]
    if target is None or asked is None:
        own = [server for server in servers if server.record]
        return only(own or (servers if strangers else []), servers)
    for server in servers:
        if names(server, asked):
            return server
    for server in every:
        if server.name == target and server.record:
            raise over(server.record)
    raise unknown(target, asked, choices(servers))


def distant(asked: Url | Pod) -> Server | None:
    """The server behind a URL or in a pod, by its admin routes; None without an admin token.

    Raises:
        VllmopsError: as `admin_token.token`, `endpoint_of`, `Admin` and `Fleet.members` do.
    """
    reach = access.get()
    if reach is None or reach.token is None:
        return None
    from ..keys import admin_token  # noqa: PLC0415
    from ..vllm_api.admin import Admin  # noqa: PLC0415 - brings httpx, which most commands spare
    from ..vllm_api.remote import Fleet  # noqa: PLC0415

    token = admin_token.token(reach.token)
    fleet = Fleet(Admin(endpoint_of(asked), token))
    model = fleet.members().model
    return Server(None, fleet.processes(), port=asked.port, model=model, fleet=fleet)


def endpoint_of(asked: Url | Pod) -> Endpoint:
    """Where a server on another machine is reached; raises VllmopsError."""
    if isinstance(asked, Url):
        return Endpoint.of(asked)
    from ..vllm_api import forward  # noqa: PLC0415

    return forward.endpoint(asked)


def away(asked: str | Url | Pod | None) -> bool:
    """Whether a target is on another machine, as far as its name shows."""
    return isinstance(asked, Pod) or (isinstance(asked, Url) and not here(asked.host))


def unknown(target: str, asked: str | Url | Pod | None, why: str) -> VllmopsError:
    """The error for a target that names no server of this machine.

    Args:
        target: as it was given.
        asked: the same, parsed.
        why: what runs on this machine.
    """
    label = shown(target) if "://" in target else target
    if away(asked):
        there = f"{label} is on another machine"
        if access.get() is None:
            return VllmopsError(
                "target.remote",
                f"{there}, and this command works on the server's own machine only",
                "run it there, with the name of the instance or its pid after -t",
            )
        return VllmopsError(
            "target.remote",
            f"{there}, and its admin token is missing",
            "--admin-token FILE: a copy of the file that vllmops serve --admin-token has there",
        )
    # What somebody exported hours ago is forgotten.
    whence = " of VLLMOPS_TARGET" if target == os.environ.get("VLLMOPS_TARGET") else ""
    return VllmopsError(
        "target.unknown",
        f"no running vLLM server matches {label!r}{whence}; {why}",
        "vllmops ps --all",
    )


def reclaim(servers: Sequence[Server]) -> list[str]:
    """Start new supervisors for instances whose supervisor has died; returns their names."""
    names = []
    for server in servers:
        if server.name and server.supervised is False:
            control = adopt(Folder(server.name))
            if control:
                control.close()
                names.append(server.name)
    return names


def pending(server: Server) -> bool:
    """Whether a server has no process yet but will have one soon."""
    return bool(server.supervised and server.record and not server.record.state.over)


def only(candidates: Sequence[Server], servers: Sequence[Server]) -> Server:
    if len(candidates) == 1:
        return candidates[0]
    if servers:
        raise VllmopsError(
            "target.ambiguous",
            f"several servers run: name one; {choices(servers)}",
            f"for example --target {servers[0].label}",
        )
    raise VllmopsError(
        "target.none",
        "no vLLM server runs on this machine",
        "vllmops serve MODEL, or vllmops serve --demo vision",
    )


def choices(servers: Sequence[Server]) -> str:
    if not servers:
        return "no server runs on this machine"
    return "running: " + ", ".join(server.label for server in servers)


def names(server: Server, target: str | Url | Pod) -> bool:
    if isinstance(target, Pod):
        return False
    if isinstance(target, Url):
        return target.port == server.port and is_local(target.host, server.host or "")
    if server.name == target:
        return True
    if target.isdigit():
        return int(target) in {process.pid for process in server.processes}
    if path := target.removeprefix("unix:") if target.startswith("unix:") else unix_path(target):
        return server.uds is not None and os.path.realpath(path) == os.path.realpath(server.uds)
    return False


def is_local(asked: str, listening: str) -> bool:
    """Whether a URL's host can mean a server here that listens on that address."""
    loopback = {"localhost", "127.0.0.1", "::1"}
    if asked in loopback:
        return listening in loopback | {"", "0.0.0.0", "::"}
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return asked == listening or (asked in own and listening in {"", "0.0.0.0", "::"})


def over(record: Record) -> VllmopsError:
    if record.state is State.FAILED and record.failure:
        what = f"{record.name!r} is not running: it failed: {record.failure.cause}"
    elif record.state.over:
        what = f"{record.name!r} is not running: it is {record.state}"
    else:  # the disk was full, and so the end is not in the record
        what = f"{record.name!r} is not running: it ended while its record was still {record.state}"
    return VllmopsError(
        "target.over",
        what,
        f"vllmops logs {record.name} shows its log, vllmops restart {record.name} starts it again",
    )
