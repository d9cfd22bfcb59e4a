"""The vLLM servers of this machine, and how a person names one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ..collect.agents import membership
from ..collect.http.endpoint import Endpoint
from ..collect.machine import processes
from ..collect.machine.listeners import is_this_machine
from ..collect.machine.processes import Process
from ..collect.machine.server_address import find_option, parse_serving_mode, parse_unix_url
from ..model.process_identity import ProcessIdentity, read_boot_id
from ..model.roles import Role
from ..model.targets import Pod, ServerUrl, access, parse_target
from ..support.errors import VllmopsError
from ..support.numbers import parse_whole_number
from ..support.urls import redact_url
from .record import InstanceFolder, InstanceRecord, InstanceState, list_instance_folders, make_url

if TYPE_CHECKING:
    from ..collect.http.remote_processes import RemoteServer

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
        uds, headless: as in `ServingMode`.
        fleet: what a server on another machine is asked through, None for one on this machine.
    """

    name: str | None
    processes: tuple[Process, ...]
    host: str | None = None
    port: int | None = None
    model: str | None = None
    scheme: str = "http"
    record: InstanceRecord | None = None
    supervised: bool | None = None
    uds: str | None = None
    headless: bool = False
    fleet: RemoteServer | None = None

    @property
    def pid(self) -> int | None:
        return self.processes[0].pid if self.processes else None

    @property
    def url(self) -> str | None:
        if self.fleet is not None:
            return self.fleet.admin.endpoint.url
        return make_url(self.scheme, self.host, self.port, self.uds)

    @property
    def label(self) -> str:
        """How messages name it, and what ``--target`` takes."""
        if self.fleet is not None:
            return self.fleet.admin.endpoint.name
        return self.name or str(self.pid)

    def describe_silent_nodes(self) -> str:
        """Which of its nodes do not answer, as its supervisor has found or by what can be seen."""
        if self.fleet is not None:
            try:
                return "; ".join(node.text for node in self.fleet.fetch_snapshot().gaps)
            except VllmopsError:
                return ""
        if self.record:
            return self.record.note
        if not self.processes:
            return ""
        from ..collect.machine.connected_nodes import find_unresponsive_nodes  # noqa: PLC0415 - slow

        silent = find_unresponsive_nodes(self.processes, self.port)
        return ", ".join(f"node {address} does not answer" for address in sorted(silent))

    def select_processes(self, *roles: Role) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.role in roles)


def list_servers() -> list[Server]:
    """Every vLLM server of this machine: instances first by name, then the others by age.

    An instance that is over is among them, without processes.
    """
    table = processes.read_process_table()
    instances, trees = [], []
    for folder in list_instance_folders():
        try:
            record = folder.load_record()
        except VllmopsError:
            continue  # its processes are still found below, by the process table
        if record is not None:
            instances.append((folder, record))
            known = [p.pid for p in record.processes if is_in_table(table, p)]
            trees.append(processes.build_process_tree(table, known))
    trees, strangers = membership.group_server_trees(table, trees)
    servers = [
        Server(
            name=record.name,
            processes=tree,
            host=record.host,
            port=record.port,
            model=record.model,
            scheme=record.scheme,
            record=record,
            supervised=folder.is_supervised(),
            uds=record.uds,
            headless=record.headless,
        )
        for (folder, record), tree in zip(instances, trees, strict=True)
    ]
    return servers + [build_unmanaged_server(table, tree) for tree in strangers]


def is_in_table(table: processes.Table, process: Process) -> bool:
    seen = table.get(process.pid)
    return (
        seen is not None
        and not seen.zombie
        and process.identity == ProcessIdentity(seen.pid, seen.start_ticks, read_boot_id())
    )


def build_unmanaged_server(table: processes.Table, tree: membership.Tree) -> Server:
    """A server that vllmops did not start, by its command line and its sockets."""
    pid = tree[0].pid
    arguments = processes.parse_serve_arguments(table[pid].arguments)
    if arguments is None:
        return Server(name=None, processes=tree)
    port = find_option(arguments, "--port")
    listening = processes.list_listening_ports(pid)
    shape_ = parse_serving_mode(arguments)
    reached = not (shape_.headless or shape_.uds)
    uds = shape_.uds and processes.try_resolve_path(pid, shape_.uds)
    known = listening[0] if listening else DEFAULT_PORT
    with suppress(ValueError):  # anybody may have such a command line
        known = parse_whole_number(port or "", 1, 65535)
    return Server(
        name=None,
        processes=tree,
        host=find_option(arguments, "--host") or "",
        port=known if reached else None,
        model=find_option(arguments, "--model") or find_first_positional(arguments),
        scheme="https" if find_option(arguments, "--ssl-certfile") else "http",
        uds=uds,
        headless=shape_.headless,
    )


def find_first_positional(arguments: Sequence[str]) -> str | None:
    first = next(iter(arguments), None)
    return None if first is None or first.startswith("-") else first


def resolve_server(target: str | None, *, allow_foreign: bool = True) -> Server:
    """The running server that a target names: an instance name, a pid of its tree, or a URL.

    With an admin token, a URL is asked over HTTP, on whatever machine it is.

    Args:
        target: None means ``VLLMOPS_TARGET``, or else the only instance that runs.
        allow_foreign: where no instance runs and none was named, take the only server that vllmops
            did not start. What does harm does not do that.

    Raises:
        VllmopsError: ``target.unknown``, ``target.none``, ``target.over`` (exit code 5),
            ``target.ambiguous``, ``target.remote`` or ``usage`` (2), or as `find_remote_server`
            does.
    """
    if target is None:
        target = os.environ.get("VLLMOPS_TARGET") or None
    asked = parse_target(target) if target is not None else None
    if isinstance(asked, ServerUrl | Pod) and (remote := find_remote_server(asked)):
        return remote
    try:
        every = list_servers()
    except VllmopsError:  # there is no /proc
        if target and is_remote_target(asked):
            raise make_unknown_target_error(target, asked, "") from None
        raise
    restart_dead_supervisors(every)
    servers = [server for server in every if server.processes or is_pending(server)]
    if target is None or asked is None:
        own = [server for server in servers if server.record]
        return require_single_server(own or (servers if allow_foreign else []), servers)
    for server in servers:
        if matches_target(server, asked):
            return server
    for server in every:
        if server.name == target and server.record:
            raise make_over_error(server.record)
    raise make_unknown_target_error(target, asked, format_choices(servers))


def find_remote_server(target: ServerUrl | Pod) -> Server | None:
    """The server behind a URL or in a pod, by its admin routes; None without an admin token.

    Raises:
        VllmopsError: as `admin_token.read_admin_token`, `open_remote_endpoint`, `AdminClient` and
            `RemoteServer.fetch_snapshot` do.
    """
    reach = access.get()
    if reach is None or reach.token is None:
        return None
    from ..collect.agents import admin_token  # noqa: PLC0415
    from ..collect.http.admin_client import AdminClient  # noqa: PLC0415 - brings httpx, which most commands spare
    from ..collect.http.remote_processes import RemoteServer  # noqa: PLC0415

    token = admin_token.read_admin_token(reach.token)
    fleet = RemoteServer(AdminClient(open_remote_endpoint(target), token))
    model = fleet.fetch_snapshot().model
    return Server(None, fleet.list_processes(), port=target.port, model=model, fleet=fleet)


def open_remote_endpoint(target: ServerUrl | Pod) -> Endpoint:
    """Where a server on another machine is reached; raises VllmopsError."""
    if isinstance(target, ServerUrl):
        return Endpoint.from_url(target)
    from ..collect.http import kubernetes_forward  # noqa: PLC0415

    return kubernetes_forward.open_pod_endpoint(target)


def is_remote_target(target: str | ServerUrl | Pod | None) -> bool:
    """Whether a target is on another machine, as far as its name shows."""
    return isinstance(target, Pod) or (
        isinstance(target, ServerUrl) and not is_this_machine(target.host)
    )


def make_unknown_target_error(
    target: str, parsed_target: str | ServerUrl | Pod | None, choices: str
) -> VllmopsError:
    """The error for a target that names no server of this machine.

    Args:
        target: as it was given.
        parsed_target: the same, parsed.
        choices: what runs on this machine.
    """
    label = redact_url(target) if "://" in target else target
    if is_remote_target(parsed_target):
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
        f"no running vLLM server matches {label!r}{whence}; {choices}",
        "vllmops ps --all",
    )


def restart_dead_supervisors(servers: Sequence[Server]) -> list[str]:
    """Start new supervisors for instances whose supervisor has died; returns their names."""
    names = []
    for server in servers:
        if server.name and server.supervised is False:
            from .supervisor_client import restart_dead_supervisor  # noqa: PLC0415 - rarely needed

            control = restart_dead_supervisor(InstanceFolder(server.name))
            if control:
                control.close()
                names.append(server.name)
    return names


def is_pending(server: Server) -> bool:
    """Whether a server has no process yet but will have one soon."""
    return bool(server.supervised and server.record and not server.record.state.is_over)


def require_single_server(candidates: Sequence[Server], servers: Sequence[Server]) -> Server:
    if len(candidates) == 1:
        return candidates[0]
    if servers:
        raise VllmopsError(
            "target.ambiguous",
            f"several servers run: name one; {format_choices(servers)}",
            f"for example --target {servers[0].label}",
        )
    raise VllmopsError(
        "target.none",
        "no vLLM server runs on this machine",
        "vllmops serve MODEL, or vllmops serve --demo vision",
    )


def format_choices(servers: Sequence[Server]) -> str:
    if not servers:
        return "no server runs on this machine"
    return "running: " + ", ".join(server.label for server in servers)


def matches_target(server: Server, target: str | ServerUrl | Pod) -> bool:
    if isinstance(target, Pod):
        return False
    if isinstance(target, ServerUrl):
        return target.port == server.port and is_local(target.host, server.host or "")
    if server.name == target:
        return True
    if target.isdigit():
        return int(target) in {process.pid for process in server.processes}
    if (
        path := target.removeprefix("unix:")
        if target.startswith("unix:")
        else parse_unix_url(target)
    ):
        return server.uds is not None and os.path.realpath(path) == os.path.realpath(server.uds)
    return False


def is_local(url_host: str, listening: str) -> bool:
    """Whether a URL's host can mean a server here that listens on that address."""
    loopback = {"localhost", "127.0.0.1", "::1"}
    if url_host in loopback:
        return listening in loopback | {"", "0.0.0.0", "::"}
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return url_host == listening or (url_host in own and listening in {"", "0.0.0.0", "::"})


def make_over_error(record: InstanceRecord) -> VllmopsError:
    if record.state is InstanceState.FAILED and record.failure:
        what = f"{record.name!r} is not running: it failed: {record.failure.cause}"
    elif record.state.is_over:
        what = f"{record.name!r} is not running: it is {record.state}"
    else:  # the disk was full, and so the end is not in the record
        what = f"{record.name!r} is not running: it ended while its record was still {record.state}"
    return VllmopsError(
        "target.over",
        what,
        f"vllmops logs {record.name} shows its log, vllmops restart {record.name} starts it again",
    )
