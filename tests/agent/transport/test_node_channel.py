"""The port of a node, by which its API server's agent asks it."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from vllmops.agent.transport import node_channel
from vllmops.model.admin_api import NODE_PORT
from vllmops.support.background import ErrorReporter

from ...support.ports import free_port

HOST = "127.0.0.1"


def test_silent_connections_do_not_block_other_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, port = tmp_path / "token", free_port()
    token.write_text("a" * 40)
    token.chmod(0o600)
    monkeypatch.setenv(NODE_PORT, str(port))
    monkeypatch.setattr(node_channel, "HANDSHAKE_S", 60.0)  # a busy machine
    reporter = ErrorReporter("it does not listen", print)
    server = node_channel.NodeServer(port, reporter, token, lambda *_: (200, b"{}"))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    with ExitStack() as held:
        held.callback(thread.join)
        held.callback(server.server_close)
        held.callback(server.shutdown)
        for _ in range(3):
            for _ in range(2 * node_channel.MOST_AT_ONCE):
                held.enter_context(socket.create_connection((HOST, port)))
            answer = node_channel.request_from_node(
                HOST, "GET", "/x", None, token=token, servers=["s"], timeout_s=60
            )
            assert answer == (200, b"{}")
        assert len(server.unverified_connections) <= node_channel.MOST_AT_ONCE
