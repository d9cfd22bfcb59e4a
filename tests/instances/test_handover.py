"""A listening socket goes from one process to another, and no connection is refused meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from vllmops.agent import handover as adopting
from vllmops.host.processes import Process
from vllmops.host.roles import Role
from vllmops.instances import handover
from vllmops.protocol.handover import LISTEN

LISTENER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


def test_what_waits_for_a_server_that_went_is_taken_by_the_one_that_got_its_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [sys.executable, "-c", LISTENER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as first:
        assert first.stdout
        port = int(first.stdout.readline())
        tree = [Process(Role.API, first.pid, 0)]
        with pytest.raises(OSError, match=r"listens on port 1$"):
            handover.listener(tree, 1)
        number = handover.listener(tree, port)
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        first.communicate("\\n")
    module = ModuleType("launcher")
    calls = list[Any]()

    def create_server_socket(addr: tuple[str, int], *, reuse_port: bool) -> None:
        calls.append((addr, reuse_port))

    create_server_socket.__module__ = module.__name__
    module.create_server_socket = create_server_socket  # type: ignore[attr-defined]
    monkeypatch.setenv(LISTEN, f"{number} {port} 127.0.0.1")
    adopting.adopt(module)
    module.create_server_socket(("127.0.0.1", port + 1), reuse_port=False)
    assert calls == [(("127.0.0.1", port + 1), False)]
    with module.create_server_socket(("127.0.0.1", port), reuse_port=True) as listener, client:
        taken, _ = listener.accept()
        with taken:
            client.sendall(b"a")
            assert taken.recv(1) == b"a"
    assert len(calls) == 1


def test_a_second_server_needs_as_much_memory_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = [Process(Role.API, os.getpid(), 0)]
    assert handover.lacking(tree) == ""
    monkeypatch.setattr("vllmops.host.memory.room", lambda _: (10**6, 10**6))
    assert "0.0 GB of memory are free" in handover.lacking(tree)
