"""Tells systemd how a service fares: sd_notify(3)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress

from ..servers.quick_probe import read_verdict
from ..servers.record import InstanceFolder, InstanceRecord, InstanceState

SOCKET, PERIOD, FOR_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class SystemdNotifier:
    """What systemd is told of an instance; nothing where systemd did not start this process.

    Args:
        folder: of the instance.
        environment: has what systemd wants.
    """

    def __init__(self, folder: InstanceFolder, environment: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        self.socket_address = environment.get(SOCKET, "")
        period, pid = environment.get(PERIOD, ""), environment.get(FOR_PID, "")
        self.last_status = (False, "")
        self.stop_requested = threading.Event()
        if self.socket_address and period.isdecimal() and pid in {"", str(os.getpid())}:
            wait_s = int(period) / 1e6 / 3
            threading.Thread(target=self.feed_watchdog, args=(wait_s,), daemon=True).start()

    def feed_watchdog(self, wait_s: float) -> None:
        """Feed systemd's watchdog while the server makes progress; the rest stops the service.

        Args:
            wait_s: seconds between two looks.
        """
        stuck = False
        while not self.stop_requested.wait(wait_s):
            found = None
            with suppress(Exception):  # what can't be read proves no stall
                found = read_verdict(self.folder.path)
            if found and not found.live:
                self.send_status(found.format_answer("liveness"))
                stuck = True
                continue
            self.send_message("WATCHDOG=1")
            if stuck:
                self.send_status(self.last_status[1])
                stuck = False

    def send_progress(self, record: InstanceRecord) -> None:
        """Tell how far an instance is.

        Args:
            record: as it is now.
        """
        ready, said = record.state is InstanceState.READY, record.note or record.stage
        if record.state.is_over:  # it stands beside a service that failed, until that starts again
            said = f"{record.state}: {record.failure.cause}" if record.failure else record.state
        if (ready, said) != self.last_status:
            self.send_status(said, "READY=1\n" if ready else "")
        self.last_status = (ready, said)

    def send_status(self, text: str, prefix: str = "") -> None:
        """Tell one line, which `systemctl status` shows.

        Args:
            text: it may have several, say an error's; systemd would obey the others.
            prefix: what else is to be told, each with the end of its line.
        """
        self.send_message(f"{prefix}STATUS={' '.join(text.split())}")

    def send_stopping(self) -> None:
        """Tell that the service ends because somebody wants that."""
        self.send_message("STOPPING=1")

    def send_message(self, text: str) -> None:
        """Send one message; an error is ignored, for the server works all the same."""
        if not self.socket_address:
            return
        address = (
            f"\0{self.socket_address[1:]}"
            if self.socket_address.startswith("@")
            else self.socket_address
        )
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
            made.setblocking(False)
            made.sendto(text.encode(errors="replace"), address)

    def close(self) -> None:
        """Feed no more."""
        self.stop_requested.set()
