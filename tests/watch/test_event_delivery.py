"""Telling events to real commands and real HTTP servers, and what comes in between."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from vllmops.commands import watch
from vllmops.model.watch_events import WatchEvent
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.watch import event_delivery as messenger
from vllmops.watch.event_delivery import CommandHook, Messenger, Webhook

from ..support.waiting import until

EVENT = WatchEvent(
    event="stalled",
    happened_at=1e9,
    server="demo",
    url="http://127.0.0.1:8000",
    text="demo has stalled; 'quoted' $HOME",
    number=3,
    seconds=12.4,
    code="engine.no-progress",
    evidence="a\0b",
    bundle="/tmp/b.tar.gz",
)


def catch_send_error(receiver: Callable[[WatchEvent], None]) -> tuple[str, str]:
    with pytest.raises(VllmopsError) as caught:
        receiver(EVENT)
    return caught.value.code, caught.value.message


def test_a_command_gets_it_twice_over(tmp_path: Path) -> None:
    script = tmp_path / "hook.sh"
    script.write_text(f"cat > {tmp_path}/stdin; env > {tmp_path}/env; echo $1 > {tmp_path}/word")
    CommandHook(f"sh {script} 'two words'")(EVENT)
    found = json.loads((tmp_path / "stdin").read_text())
    assert (found["event"], found["number"], found["text"]) == ("stalled", 3, EVENT.text)
    lines = (tmp_path / "env").read_text().splitlines()
    for line in (
        "VLLMOPS_EVENT=stalled",
        "VLLMOPS_TARGET=demo",
        "VLLMOPS_STALL=3",
        "VLLMOPS_SECONDS=12",
        "VLLMOPS_EVIDENCE=ab",
        "VLLMOPS_BUNDLE=/tmp/b.tar.gz",
        f"VLLMOPS_TEXT={EVENT.text}",
    ):
        assert line in lines
    assert (tmp_path / "word").read_text() == "two words\n"


def test_the_example_of_the_help_mails_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = tmp_path / "mail"
    mail.write_text(f"#!/bin/sh\necho $* > {tmp_path}/words\ncat > {tmp_path}/stdin\n")
    mail.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (command,) = watch.app.registered_commands
    assert command.epilog
    words = shlex.split(command.epilog)
    CommandHook(words[words.index("--exec") + 1])(EVENT)
    assert (tmp_path / "words").read_text() == "-s vllmops ops\n"
    assert EVENT.text in (tmp_path / "stdin").read_text()


def test_a_command_that_reads_nothing_is_fine() -> None:
    CommandHook("true")(EVENT)


@pytest.mark.parametrize("command", ["", "no-such-program-anywhere", "sh -c 'unbalanced"])
def test_a_command_that_is_none(command: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        CommandHook(command)
    assert (caught.value.code, caught.value.exit_code) == ("watch.no-command", ExitCode.USAGE)


def test_a_command_that_fails_or_can_not_be_run(tmp_path: Path) -> None:
    # Its arguments may hold a token, and this is logged.
    hook = CommandHook("sh -c 'exit 7' --token secret")
    assert catch_send_error(hook) == ("watch.hook", "the command 'sh' ended with 7")
    script = tmp_path / "hook"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    code, message = catch_send_error(CommandHook(str(script)))
    assert (code, "can't be run" in message) == ("watch.hook", True)


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    for limit_s in (0.5, 5.0, 50.0):
        # It holds our end of no pipe: its child has its output.
        hook = CommandHook(f"sh -c 'sleep 600 & echo $$ $! > {pids}; wait'", limit_s=limit_s)
        code, message = catch_send_error(hook)
        assert (code, f"killed after {limit_s:g} s" in message) == ("watch.hook", True)
        if pids.read_text():  # on a busy machine it may not have come so far
            break
    assert pids.read_text()
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not is_pid_alive(pid))  # type: ignore[misc]


def is_pid_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# By `end`.
ENDED = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Receiver:
    """An HTTP server that answers as told, and keeps what it got."""

    def __init__(self, *statuses: int, silent: bool = False) -> None:
        self.got: list[Any] = []
        self.over = threading.Event()
        left = iter(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.headers["Content-Type"], json.loads(body)))
                if silent:
                    receiver.over.wait()
                self.send_response(next(left, 200))
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-path?token=secret"


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []
    monkeypatch.setattr(messenger, "POST_S", 60.0)  # a busy machine is no failure

    def start(*statuses: int, **options: bool) -> Receiver:
        made.append(Receiver(*statuses, **options))
        return made[-1]

    yield start
    for item in made:
        item.over.set()
        item.server.shutdown()
        item.server.server_close()


def test_a_url_is_posted_to(receive: Callable[..., Receiver]) -> None:
    receiver = receive()
    Webhook(receiver.url)(EVENT)
    ((kind, found),) = receiver.got
    assert (kind, found["text"], found["code"]) == (
        "application/json",
        EVENT.text,
        "engine.no-progress",
    )


def test_webhook_retries_temporary_errors_a_limited_number_of_times(
    receive: Callable[..., Receiver],
) -> None:
    receiver = receive(503, 429, 200)
    Webhook(receiver.url, pause_s=0.01)(EVENT)
    assert len(receiver.got) == 3
    receiver = receive(*[500] * 9)
    code, message = catch_send_error(Webhook(receiver.url, pause_s=0.01))
    assert (code, len(receiver.got)) == ("watch.webhook", messenger.TRIES)
    assert "it answered 500" in message
    assert "secret" not in message
    receiver = receive(404)
    assert "404" in catch_send_error(Webhook(receiver.url, pause_s=0.01))[1]
    assert len(receiver.got) == 1


def test_webhook_reports_refused_connections_and_timeouts(
    receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ConnectError" in catch_send_error(Webhook("http://127.0.0.1:1/x", pause_s=0.01))[1]
    monkeypatch.setattr(messenger, "POST_S", 0.1)
    monkeypatch.setattr(messenger, "TRIES", 2)
    # Which part of it takes too long, the machine decides.
    assert "Timeout" in catch_send_error(Webhook(receive(silent=True).url, pause_s=0.01))[1]


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x/y", "http://", "file:///etc/passwd"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(VllmopsError) as caught:
        Webhook(url)
    assert (caught.value.code, caught.value.exit_code) == ("usage", ExitCode.USAGE)


@ENDED
def test_events_are_sent_in_order_without_blocking_the_caller() -> None:
    order: list[int] = []
    trouble: list[str] = []
    gate = threading.Event()

    def slow(event: WatchEvent) -> None:
        gate.wait()
        order.append(event.number)

    def fail_to_send(event: WatchEvent) -> None:
        if event.number == 1:
            raise VllmopsError("watch.hook", "no luck")
        raise ZeroDivisionError("nobody foresaw it")

    carrier = Messenger([fail_to_send, slow], trouble.append)
    for number in range(3):
        carrier.send(
            WatchEvent(event="stalled", happened_at=0.0, server="demo", text="", number=number)
        )
    carrier.flush(0.1)
    assert order == []
    gate.set()
    carrier.flush()
    assert order == [0, 1, 2]
    assert trouble[1] == "no luck"
    assert "nobody foresaw it" in trouble[0]
    end(carrier)


@ENDED
def test_trouble_that_can_not_be_told_costs_no_later_event() -> None:
    got: list[WatchEvent] = []

    def receive(event: WatchEvent) -> None:
        got.append(event)
        raise TypeError("a defect")

    def nobody(_: str) -> None:
        raise BrokenPipeError

    messenger = Messenger([receive, got.append], nobody)
    for _ in range(2):
        messenger.send(EVENT)
    messenger.flush()
    assert len(got) == 4
    end(messenger)


def end(messenger: Messenger) -> None:
    """End its thread, which else ends with its process."""

    def leave(_: WatchEvent) -> None:
        raise SystemExit

    messenger.receivers = [leave]
    messenger.send(EVENT)


@ENDED
def test_surrogates_are_sent_as_escapes(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    """A model's path may have any bytes, as may what a client has sent."""
    receiver, trouble = receive(), list[str]()
    hook = CommandHook(f"sh -c 'cat > {tmp_path}/got'")
    carrier = Messenger([hook, Webhook(receiver.url)], trouble.append)
    carrier.send(msgspec.structs.replace(EVENT, model="/m/\udcff", evidence="\ud800"))
    carrier.flush()
    assert trouble == []
    ((_, found),) = receiver.got
    assert (found["model"], found["evidence"]) == ("/m/\\udcff", "\\ud800")
    assert json.loads((tmp_path / "got").read_text()) == found
    end(carrier)


def test_a_command_is_told_however_long_the_text_is(tmp_path: Path) -> None:
    """Linux starts no program with 128 KiB in a variable."""
    hook = CommandHook(
        f"sh -c 'cat > {tmp_path}/got; printf %s \"$VLLMOPS_TEXT\" > {tmp_path}/text'"
    )
    hook(msgspec.structs.replace(EVENT, text="ü" * 200_000))
    assert json.loads((tmp_path / "got").read_text())["text"] == "ü" * 200_000
    assert set((tmp_path / "text").read_text()) == {"ü"}
