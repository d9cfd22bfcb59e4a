"""Where a watch shows its verdict: in the instance's folder, and over HTTP."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import AF_INET6
from urllib.parse import parse_qs, urlsplit

from ..model.probe import WORDS, ProbeResult
from ..model.process_identity import read_boot_id
from ..servers.quick_probe import FILE
from ..servers.record import InstanceFolder
from ..support.errors import VllmopsError
from ..support.http_server import SILENT_S, BoundedServerMixin

HOLDS_S = 30.0  # a watch collects evidence for as long, and does not look meanwhile
REST_S = 5.0  # between two writes of the same verdict
PATHS = {"/livez": "liveness", "/readyz": "readiness", "/startupz": "startup"}


class ProbeBoard:
    """The last verdict of a watch.

    Args:
        folder: of the instance; None for a server that vllmops did not start.
        interval_s: seconds between two looks.
    """

    def __init__(self, folder: InstanceFolder | None, interval_s: float) -> None:
        self.folder = folder
        self.holds_s = HOLDS_S + 2 * interval_s
        self.result = ProbeResult(live=True, ready=False, started=False, reason="nobody has looked")
        self.valid_until = 0.0
        self.written_at = 0.0

    def publish(self, result: ProbeResult, started_at: float | None) -> None:
        """Show a verdict from now on; on a full disk the file stays as it is, and grows old.

        Args:
            result: the verdict.
            started_at: which start of the instance it is about, as in its record.
        """
        now = time.monotonic()
        same, self.result, self.valid_until = result == self.result, result, now + self.holds_s
        if self.folder is None or (same and now - self.written_at < REST_S):
            return
        path = self.folder.path / FILE
        new = path.with_suffix(".new")
        content = {
            "start": started_at,
            "boot": read_boot_id(),
            "until": self.valid_until,
            "verdict": result,
        }
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(new, flags, 0o600), "w") as file:
                json.dump(content, file)
            new.replace(path)
            self.written_at = now

    def get_current_result(self) -> ProbeResult:
        """The verdict; a server that is not looked at any more is not said to be ready."""
        if self.valid_until and time.monotonic() > self.valid_until:
            return self.result._replace(ready=False, reason="its watch does not look any more")
        return self.result


class ProbeServer(BoundedServerMixin, HTTPServer):
    """Answers ``/livez``, ``/readyz`` and ``/startupz`` from threads of its own.

    Args:
        address: host and port.
        get_result: gives the verdict, quickly.

    Raises:
        VllmopsError: ``port.taken`` or ``host.unknown``.
    """

    def __init__(self, address: tuple[str, int], get_result: Callable[[], ProbeResult]) -> None:
        host, port = address
        self.get_result = get_result
        if ":" in host:
            self.address_family = AF_INET6
        try:
            super().__init__(address, ProbeHandler)
        except OSError as error:
            unknown = not error.errno or error.errno < 0  # of getaddrinfo
            raise VllmopsError(
                "host.unknown" if unknown else "port.taken",
                f"nothing can listen on {host}:{port}: {error.strerror or error}",
                "use another port, or another address of this machine",
            ) from error
        threading.Thread(target=self.serve_forever, daemon=True).start()


class ProbeHandler(BaseHTTPRequestHandler):
    """Answers one probe: 200, or 503 and why."""

    timeout = SILENT_S
    wbufsize = 1 << 12
    server: ProbeServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        kind = PATHS.get(url.path)
        if kind is None:
            self.send_text(404, f"there are {', '.join(PATHS)}\n")
            return
        found = self.server.get_result()
        text = f"{found.format_answer(kind)}\n"
        if "verbose" in parse_qs(url.query, keep_blank_values=True):
            text += "".join(f"[{'+' if found.has_passed(k) else '-'}] {WORDS[k]}\n" for k in WORDS)
        self.send_text(200 if found.has_passed(kind) else 503, text)

    def send_text(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nobody reads a line for each probe."""
