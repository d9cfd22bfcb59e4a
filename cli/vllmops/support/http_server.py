"""What the HTTP servers of commands share: no client keeps another one out."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from socketserver import TCPServer as Base
else:
    Base = object

MOST = 64  # connections; each takes a thread and a file descriptor
SILENT_S = 5.0  # that a client may be


class BoundedServerMixin(ThreadingMixIn, Base):
    """A thread for each connection; of too many the oldest ends.

    An answer takes a moment, so the oldest is one whose client sends nothing, or little by little.
    """

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self.lock = threading.Lock()
        self.open_connections: dict[socket.socket, None] = {}
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open_connections[request] = None
            if len(self.open_connections) > MOST:
                oldest = next(iter(self.open_connections))
                del self.open_connections[oldest]
                with suppress(OSError):  # the client has gone
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self.lock:  # another connection may get the descriptor
            self.open_connections.pop(request, None)
            super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or says nothing, is no error."""
