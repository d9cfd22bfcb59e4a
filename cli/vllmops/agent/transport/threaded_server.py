"""What the agent's listeners share: a daemon thread for each connection."""

from __future__ import annotations

import threading
import time
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any

from ...support.background import ErrorReporter
from ..cost import wrap_with_cpu_accounting
from ..log import log

if TYPE_CHECKING:
    from socketserver import TCPServer as Base
else:
    Base = object

REST_S = 1.0  # after a failed accept(), for example without free file descriptors


class DaemonThreadingMixIn(ThreadingMixIn, Base):
    """One thread for each connection; a stuck one does not delay the process's exit.

    Attributes:
        reporter: gets what keeps it from taking connections.
    """

    daemon_threads = True
    request_queue_size = 64
    # The process does not wait for open connections when it ends.
    block_on_close = False
    reporter: ErrorReporter

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            # The caller is still waiting, so the base class would try again at once, without end.
            self.reporter.report(error)
            time.sleep(REST_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, whose name says whose it is."""
        work = partial(
            wrap_with_cpu_accounting(self.process_request_thread), request, client_address
        )
        threading.Thread(target=work, name="vllmops-request", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        # The default prints a traceback into the server's log, also when a caller just hangs up.
        log.debug("vllmops: a request failed", exc_info=True)
