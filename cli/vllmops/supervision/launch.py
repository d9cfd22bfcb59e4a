"""Prepare the start of an instance: checks, command, name and port."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil

from ..collect.machine import shared_memory
from ..collect.machine.processes import is_alive
from ..collect.machine.server_address import (
    ServingMode,
    find_option,
    has_listener,
    parse_serving_mode,
)
from ..model.agent_socket import PATH_BYTES
from ..model.environment import STORE, STORE_CLASS
from ..model.targets import NAME
from ..servers import logs
from ..servers.discovery import list_servers
from ..servers.record import (
    InstanceFolder,
    InstanceRecord,
    InstanceState,
    create_instances_root,
    get_instance_folder,
    list_instance_folders,
)
from ..support import urls
from ..support.errors import VllmopsError
from ..support.files import lock_file, read_input
from ..support.home import resolve_home
from . import claimed_ports as ports

FIRST_PORT, LAST_PORT = 8000, 8999
PLUGIN = "vllmops"
# What makes a directory a model for vLLM: Hugging Face's, Mistral's.
MODEL_FILES = ("config.json", "params.json")
YAML_BYTES = 1 << 20


@dataclass(frozen=True)
class LaunchOptions:
    """What ``serve`` was asked for.

    Args:
        model: path or hub id.
        arguments: for vLLM, untouched.
        name: None picks one after the model.
        port: None picks a free one.
        environment: added to ours.
        watch: what `vllmops watch` is given that runs beside it; None for none.
    """

    model: str
    arguments: tuple[str, ...] = ()
    name: str | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    detached: bool = False
    default_name: str = ""
    watch: tuple[str, ...] | None = None

    @cached_property
    def all_arguments(self) -> tuple[str, ...]:
        """What vLLM is given: by the YAML file that ``--config`` names, then by the command line.

        The file is read once, so that a check and the start see the same. One that can't be read
        is left to vLLM, which says what is wrong.
        """
        path = find_option(self.arguments, "--config")
        words = list[str]()
        if path:
            # PyYAML comes with vLLM; of what its constructors raise not all is a YAMLError.
            with contextlib.suppress(Exception):
                import yaml  # noqa: PLC0415

                table = yaml.safe_load(read_input(Path(path), YAML_BYTES))
                for key, value in table.items():
                    if value is not False:
                        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return (*words, *self.arguments)

    @cached_property
    def serving_mode(self) -> ServingMode:
        """How the server is to be reached."""
        return parse_serving_mode(self.all_arguments)


@dataclass(frozen=True)
class Reservation:
    """An instance whose name and port are reserved: its record is written, both are held.

    Args:
        folder: the instance's.
        record: what is written there.
        lock: an open file that holds the name.
        port: one that holds the port.
        claimant_by_port: by port, who else has claimed it: of the ports that were passed over, and
            of the instance's own if it was asked for, or if there was no other.
    """

    folder: InstanceFolder
    record: InstanceRecord
    lock: int
    port: int | None
    claimant_by_port: Mapping[int, str]


def validate_options(order: LaunchOptions) -> None:
    """Refuse what can't work before a minute of loading.

    Raises:
        VllmopsError: ``usage``, ``vllm.missing``, ``model.missing``, ``model.unreadable``,
            ``host.unknown`` or ``port.taken``.
    """
    logs.read_size_limit()
    require_vllm()
    require_readable_model(order.model)
    shape = order.serving_mode
    if shape.uds:
        require_usable_socket(shape.uds)
    elif not shape.headless:
        # Any port shows whether the host is an address of this machine.
        require_usable_port(order.host, order.port or 0)


def require_usable_socket(path: str) -> None:
    """Raises ``uds.unusable`` if no server could listen on a Unix socket of that path."""
    place = Path(path).absolute()
    problem = ""
    if len(os.fsencode(path)) > PATH_BYTES:
        problem = f"it has more than {PATH_BYTES} bytes"
    elif not place.parent.is_dir():
        problem = f"{place.parent} is not a directory"
    elif not os.access(place.parent, os.W_OK | os.X_OK):
        problem = f"{place.parent} is not writable for this user"
    elif has_listener(path):
        problem = "another server listens on it"
    elif place.exists() and not place.is_socket():
        problem = "it is not a socket"
    if problem:
        raise VllmopsError(
            "uds.unusable",
            f"no server can listen on {path}: {problem}",
            "-- --uds with another path",
        )


def require_vllm() -> None:
    """There must be a vLLM in this environment."""
    if find_spec("vllm") is None:
        raise VllmopsError(
            "vllm.missing",
            f"vLLM is not installed in this environment ({sys.prefix})",
            "pip install 'vllmops-cli[gpu]', or without a GPU 'vllmops-cli[cpu]'",
        )


def require_readable_model(model: str) -> None:
    """A model that is a path must be there and readable; a hub id is vLLM's business."""
    looks_like_path = model.startswith(("/", "./", "../", "~"))
    path = Path(os.path.expanduser(model))  # as it is where there is no such user
    if not looks_like_path and not path.exists():
        return
    try:
        is_folder = path.is_dir()
        if not path.exists():
            raise VllmopsError(
                "model.missing",
                f"there is no model at {path}",
                "give a directory with a config.json, or a hub id such as Qwen/Qwen3-0.6B",
            )
        if (
            is_folder
            and not any((path / name).is_file() for name in MODEL_FILES)
            and not any(path.glob("*.gguf"))
        ):
            raise VllmopsError(
                "model.missing",
                f"{path} is a directory without a config.json",
                "give the directory that has the model's config.json",
            )
        config = path / MODEL_FILES[0] if (path / MODEL_FILES[0]).is_file() else path
        if not os.access(config, os.R_OK):
            raise PermissionError(13, "Permission denied", str(config))
    except PermissionError as error:
        raise VllmopsError(
            "model.unreadable",
            f"{error.filename or path} can't be read by this user",
            f"give this user access: chmod -R u+rX {shlex.quote(str(path))}",
        ) from error


# Of another machine, or no host name at all.
NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EINVAL)


def require_usable_port(host: str, port: int) -> None:
    """Raises ``port.taken`` if the port can't be used; the message names its user."""
    problem = try_bind(host, port)
    if problem is None:
        # A server that loads its model is bound, and shares the port where it has several API
        # servers. What lingers of connections looks the same, but the kernel lists it.
        problem = try_bind(host, port, strict=True)
        if problem is None or has_lingering_connections(port):
            return
    if isinstance(problem, socket.gaierror) or problem.errno in NO_ADDRESS:
        raise VllmopsError(
            "host.unknown", f"{host!r} is not an address of this machine", "--host 127.0.0.1"
        )
    raise VllmopsError(
        "port.taken",
        f"nothing can listen on {host}:{port}: {problem.strerror}{describe_port_user(port)}",
        f"use a free port: --port {find_free_port(host, set())}, or omit --port",
    )


def claim_requested_port(host: str, port: int) -> int:
    """Take a port that was asked for; returns an open file that holds it.

    Raises:
        VllmopsError: ``port.taken`` if it is another instance's of this user.
    """
    held = ports.claim_port(port)
    if held is None:
        raise make_port_claimed_error(host, port, set())
    return held


def make_port_claimed_error(host: str, port: int, claimed_ports: set[int]) -> VllmopsError:
    return VllmopsError(
        "port.taken",
        f"port {port} belongs to another instance, which is starting{describe_port_user(port)}",
        f"use a free port: --port {find_free_port(host, claimed_ports)}",
    )


def try_bind(host: str, port: int, *, strict: bool = False) -> OSError | None:
    """Try to listen; returns the error, None if it works.

    Args:
        host: the address.
        port: the port.
        strict: take the port for taken where a socket is bound that does not listen yet, a server's
            that loads its model, or where connections of an earlier one linger.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not strict)
        try:
            trial.bind((host, port))
            trial.listen()
        except OSError as error:
            return error
        except TypeError as error:  # a host name that cannot be encoded
            return OSError(errno.EINVAL, str(error))
    return None


def has_lingering_connections(port: int) -> bool:
    """Whether connections are known that have, or had, a port."""
    with contextlib.suppress(psutil.Error):
        addresses = (connection.laddr for connection in psutil.net_connections("tcp"))
        return any(address and address.port == port for address in addresses)
    return False


def describe_port_user(port: int) -> str:
    """The process that uses a port, or will; empty if unknown."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port == port:
                if connection.pid is None:
                    break
                return f" ({psutil.Process(connection.pid).name()}, pid {connection.pid}, uses it)"
    pids = [server.pid for server in list_servers() if server.processes and server.port == port]
    return f" (a vLLM server, pid {pids[0]}, was started with it)" if pids else ""


def find_free_port(host: str, claimed_ports: set[int]) -> int:
    """A port that is free now; raises as `claim_free_port`."""
    port, held, _ = claim_free_port(host, claimed_ports)
    os.close(held)
    return port


def claim_free_port(host: str, claimed_ports: set[int]) -> tuple[int, int, dict[int, str]]:
    """A free port, an open file that holds it, and the ports whose claim another user holds.

    Those are passed over. Where there are no others, the first of them is taken.

    Args:
        host: the address.
        claimed_ports: ports of instances, even if no process holds them.

    Raises:
        VllmopsError: ``port.none``.
    """
    strangers: dict[int, str] = {}
    for port in range(FIRST_PORT, LAST_PORT + 1):
        if port in claimed_ports or try_bind(host, port, strict=True) is not None:
            continue
        held = ports.claim_port(port)
        if held is None:
            continue
        if stranger := ports.find_other_claimant(port):
            os.close(held)
            strangers[port] = stranger
            continue
        return port, held, strangers
    for port in strangers:
        held = ports.claim_port(port)
        if held is not None:
            return port, held, strangers
    raise VllmopsError(
        "port.none", f"no port from {FIRST_PORT} to {LAST_PORT} is free on {host}", "--port N"
    )


def build_command(order: LaunchOptions, port: int | None) -> tuple[str, ...]:
    """The exact command; arguments after ``--`` come last, so that they win.

    vLLM takes no ``~``, which a shell leaves alone in quotes, and a file has as it is.

    -P: a ``vllm`` in the working directory, a checkout say, is not the one that is installed.
    """
    model = os.path.expanduser(order.model)
    return (
        *(sys.executable, "-P", "-m", "vllmops.agent.launch", "serve", model),
        *(("--host", order.host, "--port", str(port)) if port is not None else ()),
        *order.arguments,
    )


def build_environment(order: LaunchOptions, name: str) -> dict[str, str]:
    """What is added to the environment: the options of `serve`, the home, the plug-in, a store."""
    added = {"VLLMOPS_HOME": str(resolve_home()), **order.environment}
    merged = {**os.environ, **added}
    if merged.get(STORE) or not merged.get(STORE_CLASS):
        # Written down, so that a restart from another shell finds the same.
        added[STORE] = merged.get(STORE) or urls.make_sqlite_url(
            get_instance_folder(name).path / "responses.db"
        )
    allowed = added.get("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    if allowed is not None:
        kept = [name for name in allowed.split(",") if name]
        added["VLLM_PLUGINS"] = ",".join(kept if PLUGIN in kept else [*kept, PLUGIN])
    return added


def build_record(order: LaunchOptions, name: str, port: int | None) -> InstanceRecord:
    now = time.time()
    shape = order.serving_mode
    return InstanceRecord(
        name=name,
        model=order.model,
        command=build_command(order, port),
        environment=build_environment(order, name),
        directory=str(Path.cwd()),
        host=order.host,
        port=port,
        scheme="https" if find_option(order.all_arguments, "--ssl-certfile") else "http",
        detached=order.detached,
        watch=order.watch,
        created_at=now,
        stage_at=now,
        uds=shape.uds and str(Path(shape.uds).absolute()),
        headless=shape.headless,
    )


def preview_record(order: LaunchOptions) -> InstanceRecord:
    """What would be started; nothing is written."""
    claimed = {record.port for record in list_live_records() if record.port is not None}
    port: int | None = None
    if order.serving_mode == ServingMode():
        port = order.port if order.port is not None else find_free_port(order.host, claimed)
    return build_record(order, order.name or suggest_name(order), port)


def prepare_home() -> None:
    """Make the state directory, where it is missing.

    Raises:
        VllmopsError: ``home.unusable``, ``home.full``.
    """
    place = create_instances_root()
    try:
        with tempfile.NamedTemporaryFile(dir=place) as trial:
            trial.write(b"x" * 4096)
            trial.flush()
    except OSError as error:
        raise make_home_full_error(error) from error


def reserve_instance(order: LaunchOptions) -> Reservation:
    """Take a name and a port, against everybody who does so at the same time.

    Raises:
        VllmopsError: ``name.taken``, ``name.invalid``, ``port.taken``, ``port.none``,
            ``home.unusable``, ``home.full``, ``home.path-too-long``.
    """
    gate = lock_file(create_instances_root() / ".lock", wait=True)
    assert gate is not None
    try:
        ours = {record.port for record in list_live_records() if record.port is not None}
        if listen := find_option(order.watch or (), "--listen"):
            ours.add(int(listen.rpartition(":")[2]))
        port: int | None = None
        held: int | None = None
        strangers: dict[int, str] = {}
        if order.serving_mode != ServingMode():
            pass
        elif order.port is None:
            port, held, strangers = claim_free_port(order.host, ours)
        elif order.port in ours:
            raise make_port_claimed_error(order.host, order.port, ours)
        else:
            port, held = order.port, claim_requested_port(order.host, order.port)
            if stranger := ports.find_other_claimant(port):
                strangers[port] = stranger
        try:
            folder, lock = create_locked_folder(order)
        except VllmopsError:
            if held is not None:
                os.close(held)
            raise
        remove_leftover_segments(folder)
        record = build_record(order, folder.name, port)
        try:
            folder.save_record(record)
        except OSError as error:
            os.close(lock)
            if held is not None:
                os.close(held)
            raise make_home_full_error(error) from error
        return Reservation(folder, record, lock, held, strangers)
    finally:
        os.close(gate)


def make_home_full_error(error: OSError) -> VllmopsError:
    return VllmopsError(
        "home.full",
        f"the state directory {resolve_home()} can't be written: {error.strerror}",
        "free some space there, or set VLLMOPS_HOME to another directory",
    )


def create_locked_folder(order: LaunchOptions) -> tuple[InstanceFolder, int]:
    """The instance's folder and its lock; a name that was not asked for gets a number."""
    name = order.name or suggest_name(order)
    for number in range(1, 1000):
        folder = get_instance_folder(name if number == 1 else f"{name[:58]}-{number}")
        folder.path.mkdir(mode=0o700, exist_ok=True)
        lock = folder.take_lock()
        if lock is not None:
            if not has_live_processes(folder):
                return folder, lock
            os.close(lock)
        if order.name:
            break
    raise VllmopsError(
        "name.taken",
        f"an instance named {name!r} is already running",
        f"use another --name, or vllmops stop {name}",
    )


def has_live_processes(folder: InstanceFolder) -> bool:
    """Whether an instance without a supervisor still has processes."""
    record = folder.load_record()
    return record is not None and any(map(is_alive, record.processes))


def remove_leftover_segments(folder: InstanceFolder) -> None:
    """Remove the shared memory of an instance that was killed together with its supervisor.

    Only that: its pids may be those of other servers by now, as in a container that starts anew.
    """
    record = folder.load_record()
    if record is not None and not record.state.is_over:
        shared_memory.remove_unused_segments(record.segments)


def list_live_records() -> list[InstanceRecord]:
    records = []
    for folder in list_instance_folders():
        with contextlib.suppress(VllmopsError):
            record = folder.load_record()
            if (
                record
                and not record.state.is_over
                and (folder.is_supervised() or has_live_processes(folder))
            ):
                records.append(record)
    return records


def suggest_name(order: LaunchOptions) -> str:
    word = order.default_name or Path(order.model.rstrip("/")).name
    name = re.sub(r"[^a-z0-9._-]+", "-", word.lower()).strip("-.")[:63]
    return name if NAME.fullmatch(name) else "vllm"


def make_restart_record(record: InstanceRecord, *, rerun: bool = False) -> InstanceRecord:
    """The record of the same instance before a new start, detached from now on.

    Args:
        record: of an instance that has ended.
        rerun: whether the background responses that ran when it ended are run again.
    """
    now = time.time()
    return msgspec.structs.replace(
        record,
        detached=True,
        created_at=now,
        state=InstanceState.STARTING,
        stage="launching",
        stage_at=now,
        session=None,
        processes=(),
        segments=(),
        failure=None,
        ready_s=None,
        rerun=record.run if rerun else "",
    )
