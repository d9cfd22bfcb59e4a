"""A port of a Kubernetes pod as a Unix socket of this process, which no other user can reach.

As `kubectl port-forward` does, and with its configuration; by the client of the extra `k8s`.
"""

from __future__ import annotations

import atexit
import errno
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...model.targets import Pod
from ...support.errors import ExitCode, VllmopsError
from ..machine.server_address import make_unix_url
from .endpoint import Endpoint

CHUNK = 1 << 16
PAUSE_S = 0.1
OVER = {errno.EBADF, errno.EINVAL}  # of accept(2), once the socket is closed or shut down


@cache  # a command that serves looks again and again, for months
def open_pod_endpoint(pod: Pod) -> Endpoint:
    """Forward a pod's port until this process ends.

    Raises:
        VllmopsError: ``target.k8s``.
    """
    return Endpoint(make_unix_url(str(PortForward(pod).path)), pod.text, vllm=True)


class PortForward:
    """A socket whose connections lead to a port of a pod.

    Args:
        pod: the pod.

    Raises:
        VllmopsError: ``target.k8s`` without the client, its configuration, or the pod.
    """

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        # The client's port forward changes the client for a moment.
        self.lock = threading.Lock()
        try:
            from kubernetes import client, config, stream  # noqa: PLC0415 - an extra; takes a second
        except ImportError as error:
            raise VllmopsError(
                "target.k8s",
                "the Kubernetes client is not installed",
                "pip install 'vllmops-cli[k8s]'",
            ) from error
        try:
            config.load_kube_config()
        except Exception as error:  # of several kinds, by what is wrong with the file
            try:
                config.load_incluster_config()
            except config.ConfigException:
                raise self.make_unreachable_error(error) from error
        self.core, self.forward = client.CoreV1Api(), stream.portforward
        # At once, so that a fault is reported here; the first connection takes it.
        self.ready_connections = [self.open_connection()]
        folder = Path(tempfile.mkdtemp(prefix="vllmops-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.path = folder / "pod.sock"
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(self.path))
        self.listening.listen()
        self.thread = threading.Thread(target=self.accept_connections, daemon=True)
        self.thread.start()

    def open_connection(self) -> Any:
        """A connection to the pod; raises VllmopsError."""
        pod, ask = self.pod, self.core.connect_get_namespaced_pod_portforward
        try:
            with self.lock:
                opened = self.forward(ask, pod.name, pod.namespace, ports=str(pod.port))
        except Exception as error:
            raise self.make_unreachable_error(error) from error
        return opened.socket(pod.port)

    def make_unreachable_error(self, error: Exception) -> VllmopsError:
        why = getattr(error, "reason", None) or str(error) or type(error).__name__
        return VllmopsError(
            "target.k8s",
            f"{self.pod.text} can't be reached: {str(why).splitlines()[0]}",
            f"kubectl port-forward -n {self.pod.namespace} {self.pod.name} {self.pod.port}",
            exit_code=ExitCode.NOT_FOUND,
        )

    def accept_connections(self) -> None:
        """Connect whoever connects, until the socket is closed."""
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError as error:
                if error.errno in OVER:
                    return
                time.sleep(PAUSE_S)  # no descriptor is left, for example
                continue
            threading.Thread(target=self.relay_connection, args=(near,), daemon=True).start()

    def relay_connection(self, local_socket: socket.socket) -> None:
        """Copy both ways between a connection and the pod, until one side ends it."""
        with local_socket:
            try:
                far = (
                    self.ready_connections.pop()
                    if self.ready_connections
                    else self.open_connection()
                )
            except (IndexError, VllmopsError):
                return  # the other end sees that it is closed
            back = threading.Thread(target=copy_stream, args=(far, local_socket), daemon=True)
            back.start()
            copy_stream(local_socket, far)
            back.join()


def copy_stream(source: Any, sink: Any) -> None:
    """Copy until the source ends, or the sink is closed."""
    with suppress(OSError):
        while chunk := source.recv(CHUNK):
            sink.sendall(chunk)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
