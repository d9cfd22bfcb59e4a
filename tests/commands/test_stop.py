"""``vllmops stop`` and ``restart``, with a stand-in for vLLM (see supervision/standin.py)."""

import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllmops.collect.machine.processes import is_alive
from vllmops.commands import stop as commands
from vllmops.servers import supervisor_client
from vllmops.servers.record import InstanceFolder
from vllmops.supervision import shutdown

from ..support.commands import background
from ..support.extent import long, sample_cases
from ..support.waiting import until


def test_stop_an_instance(lab: Any) -> None:
    record = lab.serve("a")
    answer = lab.vllmops("stop", "--json")  # the only one need not be named
    assert answer.code == 0
    assert (answer.data["name"], answer.data["state"]) == ("a", "stopped")
    lab.nothing_left(record)
    answer = lab.vllmops("stop", "a", "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.over")
    assert "it is stopped" in answer.error["message"]


def test_stop_prints_that_the_server_was_drained(lab: Any) -> None:
    lab.serve("a")
    answer = lab.vllmops("stop", "a")
    assert (answer.code, answer.out) == (0, "a has stopped (drained)\n")


def test_requests_in_flight_finish(lab: Any, tmp_path: Path) -> None:
    record = lab.serve("a")
    done: list[bytes] = []
    url = f"{record.url}/until{tmp_path}/go"
    request = threading.Thread(target=lambda: done.append(urllib.request.urlopen(url).read()))
    request.start()
    until(lambda: shutdown.count_in_flight(record.processes, record.url) == 1)
    stop = background("stop", "a")
    assert stop.stderr is not None
    assert stop.stdout is not None
    assert any("flight: 1" in line for line in stop.stderr)  # the line is broken before it
    (tmp_path / "go").touch()
    assert "drained" in stop.stdout.read()
    assert stop.wait(60) == 0
    request.join(60)
    assert done == [b"done"]


@pytest.mark.parametrize(
    ("words", "note"), [(["--timeout", "0.3"], "requests cut off: 1"), (["--force"], "")]
)
def test_requests_are_cut_off(lab: Any, words: list[str], note: str) -> None:
    record = lab.serve("a")
    request = threading.Thread(target=lab.cut_off, args=(f"{record.url}/slow/600",))
    request.start()
    until(lambda: shutdown.count_in_flight(record.processes, record.url) == 1)
    answer = lab.vllmops("stop", "a", *words, "--json")
    assert (answer.code, answer.data["note"]) == (0, note)
    request.join(60)
    assert not request.is_alive()
    lab.nothing_left(record)


def test_a_second_stop_cuts_the_drain_short(lab: Any) -> None:
    record = lab.serve("a")
    request = threading.Thread(target=lab.cut_off, args=(f"{record.url}/slow/600",))
    request.start()
    until(lambda: shutdown.count_in_flight(record.processes, record.url) == 1)
    patient = threading.Thread(target=lab.vllmops, args=("stop", "a"))
    patient.start()
    until(lambda: lab.state("a") == "stopping")
    assert lab.vllmops("stop", "a", "--force").code == 0
    patient.join(60)
    request.join(60)
    lab.nothing_left(record)


def test_stop_requires_a_target_if_two_servers_run(lab: Any) -> None:
    first, second = lab.serve("a"), lab.serve("b")
    answer = lab.vllmops("stop", "--json")
    assert (answer.code, answer.error["code"]) == (2, "target.ambiguous")
    assert "a, b" in answer.error["message"]
    by_pid = str(lab.process("b", "worker").pid)
    assert lab.vllmops("stop", "--json", env={"VLLMOPS_TARGET": by_pid}).data["name"] == "b"
    lab.nothing_left(second)
    assert all(map(is_alive, first.processes))
    assert lab.vllmops("stop", "-t", first.url.replace("127.0.0.1", "localhost")).code == 0
    lab.nothing_left(first)


def test_a_server_that_vllmops_did_not_start(lab: Any) -> None:
    server = lab.stranger()
    answer = lab.vllmops("stop", "--json")  # never one that was not named
    assert (answer.code, answer.error["code"]) == (2, "target.ambiguous")
    assert server.poll() is None
    answer = lab.vllmops("stop", str(server.pid), "--json")
    assert (answer.code, answer.data["state"], answer.data["name"]) == (0, "stopped", None)
    server.wait(60)
    assert not list(Path("/dev/shm").glob(f"*_{lab.home.name}_*"))
    assert lab.bind_error(server.port) is None


@pytest.mark.parametrize(
    "target", sample_cases(["nobody", "4194400", "http://localhost:9", "1"], 2)
)
def test_stop_reports_an_unknown_target(lab: Any, target: str) -> None:
    answer = lab.vllmops("stop", target, "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.unknown")
    assert target in answer.error["message"]


def test_stop_kills_a_server_that_ignores_sigterm(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 0.3)
    server = lab.stranger(stubborn=True)
    assert lab.vllmops("stop", str(server.pid), "--force").code == 0
    assert server.wait(60) == -signal.SIGKILL


def test_a_foreground_server_can_be_stopped(lab: Any) -> None:
    serve = lab.hold("a")
    record = lab.record("a")
    assert lab.vllmops("stop", "a").code == 0
    serve.communicate(timeout=60)
    assert serve.returncode == 0
    lab.nothing_left(record)


def test_a_name_is_free_as_soon_as_its_server_has_stopped(lab: Any) -> None:
    for _ in range(3):
        lab.serve("a")
        assert lab.vllmops("stop", "a", "--force").code == 0


# -- restart -----------------------------------------------------------------------------


def test_restart(lab: Any) -> None:
    before = lab.serve("a", "--env", "MARK=1", "--", "--x")
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "ready"), answer
    after = lab.record("a")
    assert not any(map(is_alive, before.processes))
    assert after.session != before.session
    assert (after.command, after.port) == (before.command, before.port)
    assert after.environment == before.environment
    assert b"MARK=1" in Path(f"/proc/{after.session}/environ").read_bytes()
    assert urllib.request.urlopen(f"{after.url}/health").status == 200
    assert InstanceFolder("a").server_log.with_name("server.log.previous").exists()


def test_restart_what_stopped_failed_or_lost_its_supervisor(lab: Any) -> None:
    before = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    assert lab.vllmops("restart", "a").code == 0
    assert lab.record("a").port == before.port
    lab.kill(lab.record("a").session)
    until(lambda: lab.state("a") == "failed")
    until(lambda: not InstanceFolder("a").is_supervised())
    assert lab.vllmops("restart", "a").code == 0
    assert lab.record("a").failure is None
    lab.kill_supervisor("a")
    old = lab.record("a")
    assert lab.vllmops("restart", "a").code == 0
    assert lab.record("a").session != old.session
    assert not any(map(is_alive, old.processes))


def test_stopped_server_cannot_hand_over(lab: Any) -> None:
    lab.serve("a")
    assert lab.vllmops("stop", "a", "--force").code == 0
    answer = lab.vllmops("restart", "a", "--hand-over", "--json")
    assert (answer.code, answer.error["code"]) == (1, "restart.no-hand-over")
    assert answer.error["message"] == "a is stopped: only a server that is ready hands over"
    assert answer.error["hint"] == "vllmops restart a"


def test_restart_what_died_together_with_its_supervisor(lab: Any) -> None:
    """As when a machine is booted, or a container started anew: the record says it is ready."""
    before = lab.serve("a")
    lab.kill_supervisor("a")
    for process in before.processes:
        lab.kill(process.pid)
    until(lambda: not any(map(is_alive, before.processes)))
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "ready"), answer


def test_restart_what_a_successor_has_just_ended(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has a supervisor started, which finds only dead processes and ends."""
    started = commands.start_instance

    def too_early(*_: object, **__: object) -> None:
        monkeypatch.setattr(commands, "start_instance", started)
        until(
            lambda: lab.state("a") == "failed" and not InstanceFolder("a").control_socket.exists()
        )

    monkeypatch.setattr(commands, "start_instance", too_early)
    monkeypatch.setattr(
        supervisor_client, "CONNECT_TIMEOUT_S", 600.0
    )  # nor does it wait for another one
    before = lab.serve("a")
    lab.kill_supervisor("a")
    for process in before.processes:
        lab.kill(process.pid)
    answer = lab.vllmops("restart", "a", "--json")
    assert answer.code == 0, answer.out
    assert answer.data["state"] == "ready"


@pytest.mark.parametrize("seen", sample_cases(["stopping", "ready"], 2))
def test_restart_what_is_just_being_taken_down(
    lab: Any, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 2.0)
    before = lab.serve("a", stubborn=seen == "stopping")
    lab.kill(lab.process("a", "engine").pid)
    # Where this process stands still for as long, it is all over.
    until(lambda: lab.state("a") in {seen, "failed"})
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "ready"), answer
    after = lab.record("a")
    assert after.session != before.session
    assert not any(map(is_alive, before.processes))
    assert after.failure is None


@long
def test_restart_what_somebody_else_stops(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 2.0)
    lab.serve("a", stubborn=True)
    supervisor = supervisor_client.connect_supervisor(InstanceFolder("a"))
    supervisor.send_request(supervisor_client.ControlRequest(stop=0.0))
    until(lambda: lab.state("a") == "stopping")
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "ready"), answer


def test_stop_ends_where_the_supervisor_does_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "END_S", 2.0)
    record = lab.serve("a")
    stuck = lab.supervisor("a")
    lab.kill(stuck, signal.SIGSTOP)
    answer = lab.vllmops("stop", "a", "--force", "--json", timeout_s=60)
    assert (answer.code, answer.error["code"]) == (3, "supervisor.silent")
    assert "pkill -9" in answer.error["hint"]
    assert all(map(is_alive, record.processes))
    lab.kill(stuck)
    monkeypatch.setattr(commands, "END_S", 30.0)
    assert lab.vllmops("stop", "a", "--force").code == 0
    lab.nothing_left(record)


@pytest.mark.parametrize("command", ["stop", "restart"])
def test_a_supervisor_that_dies_before_it_obeys_has_a_successor_that_does(
    lab: Any, command: str
) -> None:
    record = lab.serve("a")
    stuck = lab.supervisor("a")
    lab.kill(stuck, signal.SIGSTOP)
    waiting = background(command, "a", "--force")
    time.sleep(1)
    lab.kill(stuck)
    assert waiting.wait(60) == 0
    assert not any(map(is_alive, record.processes))
    assert lab.state("a") == {"stop": "stopped", "restart": "ready"}[command]


def test_restart_in_the_foreground_keeps_its_holder(lab: Any) -> None:
    serve = lab.hold("a")
    before = lab.record("a")
    assert lab.vllmops("restart", "a").code == 0
    assert lab.record("a").session != before.session
    assert serve.poll() is None
    serve.kill()
    until(lambda: lab.state("a") == "stopped")
    assert lab.bind_error(before.port) is None


def test_restart_where_the_port_is_taken_by_now(lab: Any, listener: int) -> None:
    record = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    InstanceFolder("a").save_record(msgspec.structs.replace(lab.record("a"), port=listener))
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.error["code"]) == (1, "port.taken")
    assert lab.state("a") == "stopped"
    assert record.port != listener


def test_restart_what_vllmops_did_not_start(lab: Any) -> None:
    server = lab.stranger()
    answer = lab.vllmops("restart", str(server.pid), "--json")
    assert (answer.code, answer.error["code"]) == (1, "restart.stranger")
    assert "vllmops serve" in answer.error["hint"]
    answer = lab.vllmops("restart", "nobody", "--json")
    assert (answer.code, answer.error["code"]) == (5, "target.unknown")
    assert server.poll() is None


def test_restart_on_a_full_disk_leaves_a_server_running(full_disk: Any, lab: Any) -> None:
    record = lab.serve("a")
    full_disk()
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.error["code"]) == (1, "home.full")
    assert all(map(is_alive, record.processes))


@long
def test_an_end_on_a_full_disk_contradicts_nothing(full_disk: Any, lab: Any) -> None:
    lab.serve("a")
    full_disk()
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    answer = lab.vllmops("stop", "a", "--json")
    assert (
        answer.error["message"] == "'a' is not running: it ended while its record was still ready"
    )


@long
def test_restart_on_a_full_disk(full_disk: Any, lab: Any) -> None:
    lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    full_disk()
    answer = lab.vllmops("restart", "a", "--json")
    assert (answer.code, answer.error["code"]) == (1, "home.full")
