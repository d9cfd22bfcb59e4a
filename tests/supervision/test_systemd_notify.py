"""What systemd is told, by a socket like its own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.model.probe import ProbeResult
from vllmops.servers.record import InstanceFolder, InstanceState
from vllmops.supervision import launch, systemd_notify
from vllmops.supervision.systemd_notify import SystemdNotifier

from ..support.waiting import until


class Manager:
    """systemd's end."""

    def __init__(self, place: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{place[1:]}" if place.startswith("@") else place)
        self.socket.setblocking(False)
        self.told: list[str] = []

    def read_lines(self) -> list[str]:
        """All lines so far."""
        try:
            while True:
                self.told += self.socket.recv(4096).decode().splitlines()
        except BlockingIOError:
            return self.told


def statuses(manager: Manager) -> list[str]:
    return [line for line in manager.read_lines() if line.startswith("STATUS=")]


@pytest.fixture(params=["path", "abstract"])
def place(request: pytest.FixtureRequest, home: Path) -> str:
    return str(home / "notify") if request.param == "path" else f"@vllmops-{home.name}"


@pytest.fixture
def manager(place: str) -> Iterator[Manager]:
    made = Manager(place)
    yield made
    made.socket.close()


def test_a_service(lab: Any, manager: Manager, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(systemd_notify.SOCKET, place)
    loaded = lab.home / "loaded"
    lab.start_in_foreground("a", ready_with=str(loaded))
    serve = lab.foreground[-1]
    until(manager.read_lines)  # a busy machine skips a status that does not stay
    loaded.touch()
    until(lambda: "READY=1" in manager.read_lines())
    shown = manager.read_lines()
    before = shown[: shown.index("READY=1")]
    assert before
    assert all(line.startswith("STATUS=") for line in before)
    assert "STOPPING=1" not in shown
    serve.send_signal(signal.SIGTERM)
    serve.communicate(timeout=60)
    until(lambda: "STOPPING=1" in manager.read_lines())
    assert lab.state("a") == "stopped"


def test_a_server_that_fails_leaves_its_cause(
    lab: Any, manager: Manager, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(systemd_notify.SOCKET, place)
    serve = lab.hold("a")
    lab.kill(lab.process("a", "engine").pid)
    serve.communicate(timeout=60)
    last = statuses(manager)[-1]
    assert last.startswith("STATUS=failed: engine (pid ")
    lab.hold("b", exits=7).communicate(timeout=60)
    assert "STATUS=failed: vLLM exited with status 7" in manager.read_lines()[-1]


def test_a_status_is_one_line(manager: Manager, place: str) -> None:
    notifier = SystemdNotifier(InstanceFolder("a"), {systemd_notify.SOCKET: place})
    notifier.send_status("it failed:\n  no memory\nMAINPID=1")
    assert manager.read_lines() == ["STATUS=it failed: no memory MAINPID=1"]


def test_watchdog_abort_takes_the_server_down(lab: Any) -> None:
    record = lab.hold("a") and lab.record("a")
    serve = lab.foreground[-1]
    serve.send_signal(signal.SIGABRT)
    serve.communicate(timeout=60)
    lab.nothing_left(record)


def test_the_watchdog_is_fed_by_progress(
    manager: Manager, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [ProbeResult(live=True, ready=True, started=True)]
    monkeypatch.setattr(systemd_notify, "read_verdict", lambda _: now[0])
    environment = {systemd_notify.SOCKET: place, systemd_notify.PERIOD: "300000"}
    other = SystemdNotifier(
        InstanceFolder("a"), {**environment, systemd_notify.FOR_PID: "1"}
    )  # it is for another process
    notifier = SystemdNotifier(
        InstanceFolder("a"), {**environment, systemd_notify.FOR_PID: str(os.getpid())}
    )
    plan = launch.build_record(launch.LaunchOptions("m", name="a", port=1), "a", 1)
    notifier.send_progress(msgspec.structs.replace(plan, state=InstanceState.READY, stage="ready"))
    try:
        until(lambda: manager.read_lines().count("WATCHDOG=1") >= 3)
        now[0] = ProbeResult(live=False, ready=False, started=True, reason="stuck", evidence="b")
        until(lambda: "STATUS=not live: stuck" in manager.read_lines())
        fed = manager.read_lines().count("WATCHDOG=1")
        seen = len(manager.read_lines())
        until(lambda: len(manager.read_lines()) >= seen + 3)
        assert manager.read_lines().count("WATCHDOG=1") == fed
        now[0] = ProbeResult(live=True, ready=True, started=True)
        until(lambda: manager.read_lines().count("WATCHDOG=1") > fed)
        # As before; it is told after that.
        until(lambda: statuses(manager)[-1] == "STATUS=ready")
    finally:
        notifier.close()
        other.close()


def test_watchdog_is_fed_if_the_verdict_cannot_be_read(
    manager: Manager, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_key_error(_: Path) -> ProbeResult:
        raise KeyError("state")  # a record of another version, say

    monkeypatch.setattr(systemd_notify, "read_verdict", raise_key_error)
    notifier = SystemdNotifier(
        InstanceFolder("a"), {systemd_notify.SOCKET: place, systemd_notify.PERIOD: "300000"}
    )
    try:
        until(lambda: manager.read_lines().count("WATCHDOG=1") >= 2)
    finally:
        notifier.close()


def test_without_systemd_nothing_is_told(home: Path) -> None:
    SystemdNotifier(InstanceFolder("a"), {}).send_message("READY=1")
    SystemdNotifier(InstanceFolder("a"), {systemd_notify.SOCKET: str(home / "gone")}).send_message(
        "READY=1"
    )
