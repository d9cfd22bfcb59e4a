"""The nodes of a server among themselves.

A node without an API server listens at one port, the same on every node, and the API server's agent
asks there what it asks its own node. Both need the admin token: it makes the keys of their TLS
(`node_certificate.derive_identity`), so nobody else gets an answer, or is believed. Without a token
nobody listens. vLLM's own channels can't be used: a process that hangs does not serve them.

Of a headless node its launcher listens, which runs no model. Ray's actors have none above them:
they listen side by side, at the same port, and the kernel gives a connection to one of them.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import Any, cast

import msgspec

from ...collect.agents import admin_token, agent_client
from ...collect.machine.server_address import parse_serving_mode
from ...model.admin_api import NODE_PORT, SERVERS, TIMEOUT, USUAL_NODE_PORT
from ...model.agent_socket import BODY_BYTES
from ...model.environment import ADMIN_TOKEN_FILE
from ...support import background
from ...support.background import ErrorReporter
from .. import identity
from ..hooks import vllm_objects
from ..log import log
from .threaded_server import DaemonThreadingMixIn

MOST_AT_ONCE = 32  # connections that a node answers
HANDSHAKE_S = 5.0
LEAST_S = 0.05
APART_S = 0.15  # between two connections of which one is used
MOST_BEGUN = 8
TRIES = 8
SLACK_S = 1.0  # for the network, on top of what the other node may take
ANSWER_BYTES = 64 << 20  # as many as who asks the API server takes
STRANGER = 421  # the status of a process of another server
IDS = msgspec.json.Decoder(list[str])

# What answers: method, path, body, seconds, and the ids of the server; the status and JSON.
Respond = Callable[[str, str, bytes | None, float, list[str]], tuple[int, bytes]]

_respond: Respond | None = None
_listening: NodeListener | None = None


def set_responder(respond: Respond) -> None:
    """Keep what answers for this node; `start_listening` begins to listen."""
    global _respond  # noqa: PLW0603
    _respond = respond


def start_listening() -> None:
    """Listen, where this process answers for its node; reports an error, raises none."""
    global _listening  # noqa: PLW0603
    if _listening or _respond is None or not (place := os.environ.get(ADMIN_TOKEN_FILE)):
        return
    if not (
        identity.is_ray_worker()
        or (identity.detect_role() == "launcher" and parse_serving_mode(sys.argv).headless)
    ):
        return
    try:
        _listening = NodeListener(Path(place), _respond)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        vllm_objects.report_problem(
            f"the other nodes can't ask this one: {error}; {NODE_PORT} is its port"
        )


def reset_after_fork() -> None:
    """In a forked child: close the inherited socket, which nobody would serve."""
    global _listening  # noqa: PLW0603
    if _listening:
        with suppress(OSError):
            _listening.server.socket.close()
    _listening = None


def read_node_port() -> int:
    """The port of all nodes; raises ValueError."""
    return int(os.environ.get(NODE_PORT) or USUAL_NODE_PORT)


class NodeListener:
    """The port of this node, open."""

    def __init__(self, token: Path, respond: Respond) -> None:
        reporter = ErrorReporter("the other nodes can't ask this one", log.warning)
        self.server = NodeServer(read_node_port(), reporter, token, respond)
        background.start_repeating_thread(
            "vllmops-node", partial(self.server.serve_forever, 3600), reporter
        )


class NodeServer(DaemonThreadingMixIn, TCPServer):
    """Answers whoever has the admin token, each connection in a thread of its own.

    Nobody without it keeps another one out: of too many whose other end has not shown it, the
    oldest ends.
    """

    allow_reuse_address = True
    allow_reuse_port = True  # Ray's actors listen side by side; the kernel lets one user do that

    def __init__(self, port: int, reporter: ErrorReporter, token: Path, respond: Respond) -> None:
        self.reporter = reporter
        self.token = token
        self.respond = respond
        self.connection_slots = threading.BoundedSemaphore(MOST_AT_ONCE)
        self.lock = threading.Lock()
        self.unverified_connections: dict[socket.socket, None] = {}
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), NodeHandler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.unverified_connections[request] = None
            if len(self.unverified_connections) > MOST_AT_ONCE:
                oldest = next(iter(self.unverified_connections))
                del self.unverified_connections[oldest]
                with suppress(OSError):  # its other end has gone
                    # Not the method of TLS, which forgets the encryption at once.
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer on a connection once its other end has shown that it has the token."""
        from ...collect.agents.node_certificate import make_tls_context  # noqa: PLC0415 - slow, and seldom needed

        made = make_tls_context(admin_token.read_admin_token(self.token), server=True)
        request.settimeout(HANDSHAKE_S)
        with self.lock:
            if request not in self.unverified_connections:
                return  # it was the oldest
            del self.unverified_connections[request]
            secured = made.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            self.unverified_connections[secured] = None
        with secured:
            try:
                secured.do_handshake()
            finally:
                with self.lock:  # another connection may get the descriptor
                    self.unverified_connections.pop(secured, None)
            if self.connection_slots.acquire(blocking=False):
                try:
                    super().finish_request(secured, client_address)
                finally:
                    self.connection_slots.release()

    def close_request(self, request: Any) -> None:
        with self.lock:
            self.unverified_connections.pop(request, None)
            super().close_request(request)


class NodeHandler(BaseHTTPRequestHandler):
    """Answers one question of the API server's node."""

    timeout = 10  # seconds that the other end may stay silent
    wbufsize = 1 << 16

    def do_GET(self) -> None:
        self.answer_request(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if 0 <= length <= BODY_BYTES:
            self.answer_request(self.rfile.read(length))

    def answer_request(self, body: bytes | None) -> None:
        ids = IDS.decode(self.headers.get(SERVERS, "[]"))
        timeout_s = float(self.headers.get(TIMEOUT, "2"))
        respond = cast(NodeServer, self.server).respond
        status, content = respond(self.command, self.path, body, timeout_s, ids)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log requests."""


class NodeConnection(agent_client.DeadlineSocket, ssl.SSLSocket):
    """A connection to another node, with a deadline."""


def connect_to_node(address: str, token: str, end: float) -> NodeConnection:
    """A connection to a process of another node that has the token.

    A process that is stopped takes connections, too. So further ones are begun while the first has
    not shown its token: the kernel gives each to any process of the node.

    Args:
        address: of the node.
        token: the admin token.
        end: until when, by the monotonic clock.

    Raises:
        OSError: there is none.
    """
    from ...collect.agents.node_certificate import make_tls_context  # noqa: PLC0415

    made = make_tls_context(token, server=False)
    made.sslsocket_class = NodeConnection
    with selectors.DefaultSelector() as begun:
        try:
            for number in range(MOST_BEGUN):
                plain = socket.create_connection(
                    (address, read_node_port()), compute_remaining_s(end)
                )
                plain.setblocking(False)
                secured = made.wrap_socket(plain, do_handshake_on_connect=False)
                begun.register(secured, selectors.EVENT_WRITE)
                # The last one has all the time that is left.
                until = time.monotonic() + APART_S if number < MOST_BEGUN - 1 else end
                while ready := begun.select(min(until, end) - time.monotonic()):
                    for one, _ in ready:
                        connection = cast(NodeConnection, one.fileobj)
                        try:
                            connection.do_handshake()
                        except ssl.SSLWantReadError:
                            begun.modify(connection, selectors.EVENT_READ)
                        except ssl.SSLWantWriteError:
                            begun.modify(connection, selectors.EVENT_WRITE)
                        else:
                            begun.unregister(connection)
                            connection.deadline = end
                            connection.settimeout(compute_remaining_s(end))
                            return connection
        finally:
            for one in list(begun.get_map().values()):
                cast(NodeConnection, one.fileobj).close()
    raise TimeoutError


def compute_remaining_s(end: float) -> float:
    """Seconds until then, for a socket: 0 would mean that it does not wait."""
    return max(end - time.monotonic(), LEAST_S)


def request_from_node(
    address: str,
    method: str,
    path: str,
    body: bytes | None,
    *,
    token: Path,
    servers: list[str],
    timeout_s: float,
) -> tuple[int, bytes]:
    """What another node answers: the status, and JSON.

    Args:
        address: of the node.
        method: of the request.
        path: of it.
        body: of it; None without one.
        token: the file with the admin token.
        servers: the ids of the server.
        timeout_s: seconds that the other node may take.

    Raises:
        VllmopsError: the token can't be read.
        OSError: there is no answer, also because the other end has another token.
        http.client.HTTPException: it is no proper answer.
    """
    secret = admin_token.read_admin_token(token)
    headers = {SERVERS: msgspec.json.encode(servers).decode(), TIMEOUT: f"{timeout_s:g}"}
    end = time.monotonic() + timeout_s + SLACK_S
    for tries in range(TRIES - 1, -1, -1):
        secured = connect_to_node(address, secret, end)
        with closing(HTTPConnection("localhost")) as connection:
            connection.sock = secured
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read(ANSWER_BYTES + 1)
        if len(content) > ANSWER_BYTES:
            raise HTTPException(f"the answer has more than {ANSWER_BYTES >> 20} MiB")
        if response.status != STRANGER or not tries:
            break
    return response.status, content
