"""The unit of ``vllmops integrate systemd``, under a real systemd, with a stand-in for vLLM.

tests/live has a real server, and the unit's own times; here they are shorter.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..support.extent import long
from ..support.systemd import Service, install_service
from ..support.waiting import until

pytestmark = pytest.mark.programs
QUICK = "RestartSec=300ms\nRestartMaxDelaySec=2s\nWatchdogSec=3s"
GROWS = 254  # the version whose pauses grow
PORT = 8000  # the network is its own
REQUEST = """
import socket
made = socket.create_connection(("127.0.0.1", {port}))
made.sendall(b"GET /slow/{seconds} HTTP/1.1\\r\\n\\r\\n")
print("asked", flush=True)
made.recv(1)
"""


@pytest.fixture(scope="module")
def shared_service(standin: Path) -> Iterator[Service]:
    with install_service(QUICK, standin) as made:
        yield made


@pytest.fixture
def service(shared_service: Service, model: Path) -> Iterator[Service]:
    model.parent.parent.chmod(0o755)
    yield shared_service
    shared_service.end()
    shared_service.manager.run("rm", "-f", "/var/log/a.log")


def play(service: Service, model: Path, **what: object) -> None:
    """What the server is to do, from its next start on."""
    table = json.dumps(what)
    service.configure(f"model = '{model}'\nport = {PORT}\nenv.STANDIN = '{table}'\n")


@contextmanager
def hold_request(service: Service, seconds: float) -> Iterator[None]:
    """A request in flight that takes so long."""
    code = REQUEST.format(port=PORT, seconds=seconds)
    with service.manager.start_program(sys.executable, "-c", code) as output:
        assert output.readline() == "asked\n"
        yield


def test_a_service_lives_and_stops(service: Service, model: Path) -> None:
    play(service, model, ready_s=2)
    service.begin()
    until(lambda: service.status == "loading weights")
    assert service.state == "activating"
    until(service.is_up)
    assert service.status == "ready"
    assert service.record.state == "ready"
    assert service.shows("User") == "vllm"
    for process in service.record.processes:
        owner = service.manager.run("stat", "--format=%U", f"/proc/{process.pid}").stdout
        assert owner == "vllm\n"
    assert "Application startup complete" in service.log
    with hold_request(service, 60):
        service.begin("stop")
        until(lambda: "requests in flight: 1" in service.status)
        assert service.shows("SubState") == "stop-sigterm"
        service.kill("serve", signal.SIGTERM)  # a second one ends the drain
        until(lambda: service.state == "inactive")
    assert service.shows("Result") == "success"
    assert (service.record.state, service.restarts) == ("stopped", 0)


def test_a_wrong_option_is_not_tried_again(service: Service) -> None:
    service.configure("modle = 'm'\n")
    ran = service.manager.run("systemctl", "start", service.unit)
    assert ran.returncode == 1
    until(lambda: service.state == "failed")
    assert service.restarts == 0
    assert "modle" in service.log


@long
@pytest.mark.parametrize("victim", ["engine", "api", "worker", "serve"])
def test_server_restarts_after_any_process_is_killed(
    service: Service, model: Path, victim: str
) -> None:
    play(service, model)
    service.start()
    before = service.record
    service.kill(victim)
    until(lambda: service.has_restarted(1))
    assert service.record.session != before.session
    # Nothing of the earlier one is left.
    until(
        lambda: service.manager.run("ls", "/dev/shm").stdout.split() == [*service.record.segments]
    )
    until(lambda: service.status == "ready")


@long
def test_a_crash_loop_ends(service: Service, model: Path) -> None:
    play(service, model, exits=7)
    service.begin()
    until(lambda: service.state == "failed", 60)
    assert service.log.count("a: launched") == 6
    assert "failed: vLLM exited with status 7" in service.status
    if service.manager.version >= GROWS:
        assert service.shows("RestartUSecNext") == "2s"
    assert service.manager.run("systemctl", "start", service.unit).returncode == 1
    service.manager.ctl("reset-failed", service.unit)
    play(service, model)
    service.start()
    assert service.is_up()


@long
def test_a_stall_that_is_sure_is_restarted(service: Service, model: Path) -> None:
    """Nothing but a sure stall is: for half a minute the watchdog of 3 s is fed."""
    play(service, model)
    service.start()
    before = service.record
    with hold_request(service, 300):
        service.kill("engine", signal.SIGSTOP)
        until(lambda: service.status.startswith("not live: "), 90)
        (kept,) = service.bundles
        until(lambda: service.shows("Result") == "watchdog", 30)
    until(lambda: service.has_restarted(1), 60)
    assert service.record.session != before.session
    assert service.bundles == [kept]


@long
def test_a_serve_that_stands_is_restarted(service: Service, model: Path) -> None:
    play(service, model)
    service.start()
    service.kill("serve", signal.SIGSTOP)
    until(lambda: service.shows("Result") == "watchdog", 30)
    service.kill("serve", signal.SIGCONT)
    until(lambda: service.has_restarted(1), 60)
