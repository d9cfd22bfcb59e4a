"""Delivers events to a command or a URL, without making the watch wait."""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx
import msgspec

from ..collect.http.vllm_client import send_request
from ..model.json_text import encode_json
from ..model.targets import split_url
from ..model.watch_events import WatchEvent
from ..support import background
from ..support.errors import VllmopsError

HOOK_S = 30.0
POST_S, TRIES, PAUSE_S = 5.0, 3, 1.0
FLUSH_S = 60.0
LETTERS = 30_000  # Linux starts no program with 128 KiB in a variable
# Made here, on one thread: msgspec crashes where two threads decode into a type for the first time.
EVENTS = msgspec.json.Decoder(WatchEvent)


class Messenger:
    """Delivers events to receivers, one after the other, in its own thread.

    Args:
        receivers: called with each event; they raise VllmopsError on failure.
        report: called with the text of each failure.
    """

    def __init__(
        self, receivers: Sequence[Callable[[WatchEvent], None]], report: Callable[[str], None]
    ) -> None:
        self.receivers = receivers
        self.report = report
        self.events: queue.Queue[WatchEvent] = queue.Queue()
        self.undelivered_count = 0
        self.idle = threading.Condition()
        background.start_repeating_thread(
            "messenger",
            self.deliver_next,
            background.ErrorReporter("an event was not delivered", report),
        )

    def send(self, event: WatchEvent) -> None:
        """Queue an event; returns at once."""
        with self.idle:
            self.undelivered_count += 1
        self.events.put(event)

    def flush(self, seconds: float = FLUSH_S) -> None:
        """Wait until every event is delivered, or until the time is up."""
        with self.idle:
            self.idle.wait_for(lambda: not self.undelivered_count, seconds)

    def deliver_next(self) -> None:
        """Deliver one event."""
        event = self.events.get()
        try:
            event = EVENTS.decode(encode_json(event))
            for receive in self.receivers:
                self.call_receiver(receive, event)
        finally:
            with self.idle:
                self.undelivered_count -= 1
                self.idle.notify_all()

    def call_receiver(self, receive: Callable[[WatchEvent], None], event: WatchEvent) -> None:
        """Call one receiver; its failure does not affect the others."""
        try:
            receive(event)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, VllmopsError):
                text = error.message
            with suppress(Exception):  # there is nowhere else to report it
                self.report(text)


class CommandHook:
    """A command that is run with each event: in its environment, and as JSON on its input.

    Args:
        command: with its arguments, as a shell takes them apart.
        limit_s: after which it is killed.

    Raises:
        VllmopsError: ``watch.no-command`` if no such program.
    """

    def __init__(self, command: str, limit_s: float = HOOK_S) -> None:
        self.command = command
        self.limit_s = limit_s
        try:
            self.arguments = shlex.split(command)
        except ValueError as error:
            raise make_no_command_error(command, str(error).lower()) from error
        if not self.arguments or not shutil.which(self.arguments[0]):
            raise make_no_command_error(command, "no such program")

    def __call__(self, event: WatchEvent) -> None:
        """Run it.

        Raises:
            VllmopsError: ``watch.hook``.
        """
        try:
            process = subprocess.Popen(
                self.arguments,
                env={**os.environ, **build_hook_environment(event)},
                stdin=subprocess.PIPE,
                # Standard output is for the one envelope of --json.
                stdout=sys.stderr.fileno(),
                start_new_session=True,
            )
        except OSError as error:
            raise make_hook_error(self.arguments[0], f"can't be run: {error.strerror}") from error
        try:
            process.communicate(msgspec.json.encode(event), self.limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise make_hook_error(
                self.arguments[0], f"was killed after {self.limit_s:g} s"
            ) from None
        if process.returncode:
            raise make_hook_error(self.arguments[0], f"ended with {process.returncode}")


def build_hook_environment(event: WatchEvent) -> dict[str, str]:
    """An event as environment variables."""
    fields = {
        "EVENT": event.event,
        "SERVER": event.server,
        "TARGET": event.server,  # so that vllmops in the command means the same server
        "URL": event.url or "",
        "MODEL": event.model or "",
        "STALL": str(event.number or ""),
        "SECONDS": f"{event.seconds:.0f}",
        "CODE": event.code,
        "TITLE": event.title,
        "SUBJECT": event.subject,
        "EVIDENCE": event.evidence,
        "NEXT": event.next_step,
        "BUNDLE": event.bundle,
        "TEXT": event.text,
    }
    return {f"VLLMOPS_{name}": value.replace("\0", "")[:LETTERS] for name, value in fields.items()}


class Webhook:
    """A URL to which each event is posted as JSON; ``text`` is what chat services show.

    Args:
        url: http or https.
        pause_s: seconds before the second try, twice that before the third.

    Raises:
        VllmopsError: ``usage``.
    """

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        self.url = url
        self.pause_s = pause_s
        try:
            parts = split_url(url)
        except VllmopsError as error:
            error.hint = "--webhook wants an http or https URL"
            raise
        # Its path and its query may be secret.
        self.display_url = f"{parts.scheme}://{parts.hostname}/…"

    def __call__(self, event: WatchEvent) -> None:
        """Post it; what may pass is tried again.

        Raises:
            VllmopsError: ``watch.webhook``.
        """
        why = ""
        for number in range(TRIES):
            if number:
                time.sleep(number * self.pause_s)
            try:
                answer = send_request(
                    "POST",
                    self.url,
                    POST_S,
                    is_remote=True,
                    content=msgspec.json.encode(event),
                    headers={"Content-Type": "application/json"},
                )
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{type(error).__name__}"
                continue
            if answer.is_success:
                return
            why = f"it answered {answer.status_code}"
            if not (answer.is_server_error or answer.status_code in {408, 429}):
                break
        raise VllmopsError(
            "watch.webhook", f"the webhook {self.display_url} did not accept the event: {why}"
        )


def make_no_command_error(command: str, reason: str) -> VllmopsError:
    return VllmopsError(
        "watch.no-command",
        f"--exec {command!r} can't be run: {reason}",
        "a program with its arguments (sh -c '…' where it needs a shell)",
    )


def make_hook_error(program: str, reason: str) -> VllmopsError:
    """The error of a hook, without its arguments: it is logged, and they may have a token."""
    return VllmopsError("watch.hook", f"the command {program!r} {reason}")
