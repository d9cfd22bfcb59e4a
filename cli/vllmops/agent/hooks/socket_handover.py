"""Lets another process of this server's command take over its listening socket.

Both accept connections for a moment, from one queue in the kernel. So none is refused or reset.
"""

from __future__ import annotations

import functools
import os
import socket
import weakref
from contextlib import suppress
from types import ModuleType
from typing import Any

from ...model.socket_handover import LISTEN
from . import vllm_objects
from .import_hook import when_imported
from .request_gate import gate

# With vLLM's function that makes the socket: since 0.31, and before.
MODULES = ("vllm.entrypoints.launchers.launcher", "vllm.entrypoints.openai.api_server")
_servers: weakref.WeakSet[Any] = weakref.WeakSet()


def install_hooks() -> None:
    """Remember the servers of this process; take a socket that it was started with."""
    when_imported("uvicorn.server", vllm_objects.catch_errors(hook_uvicorn))
    if os.environ.get(LISTEN):
        for name in MODULES:
            when_imported(name, vllm_objects.catch_errors(hook_socket_creation))


def hook_uvicorn(module: ModuleType) -> None:
    construct = module.Server.__init__

    @functools.wraps(construct)
    def construct_and_remember(self: Any, *args: Any, **fields: Any) -> None:
        construct(self, *args, **fields)
        _servers.add(self)

    module.Server.__init__ = construct_and_remember


def hook_socket_creation(module: ModuleType) -> None:
    """Have vLLM take the socket in the place of a new one at that address."""
    make = vars(module).get("create_server_socket")
    if make is None or make.__module__ != module.__name__:
        return

    @functools.wraps(make)
    def create_server_socket(addr: tuple[str, int], *args: Any, **fields: Any) -> socket.socket:
        number, port, host = os.environ[LISTEN].split(" ", 2)
        if (host, int(port)) == tuple(addr):
            with suppress(OSError):  # it is not open in this process
                return socket.socket(fileno=int(number))
        made: socket.socket = make(addr, *args, **fields)
        return made

    module.create_server_socket = create_server_socket  # type: ignore[attr-defined]


def is_accepting_connections() -> bool:
    """Whether this process takes connections."""
    return any(server.started and not gate.leaving for server in list(_servers))


def stop_accepting_connections() -> bool:
    """Take no more connections, and close each after its next answer; whether that is done."""
    for server in list(_servers):
        for listening in getattr(server, "servers", ()):
            listening.get_loop().call_soon_threadsafe(listening.close)
        # Of several API servers vLLM's own tasks accept, since 0.32.
        for task in list(getattr(server, "_accept_tasks", ())):
            if task.get_coro().__name__ == "_accept":
                task.get_loop().call_soon_threadsafe(task.cancel)
    gate.leaving = bool(_servers)
    return gate.leaving
