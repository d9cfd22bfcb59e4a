"""Real supervisors over a stand-in for vLLM: whatever dies, nothing of the server is left.

tests/live does the same with a real vLLM; here are the corner cases, which need many servers.
"""

import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process, is_alive
from vllmops.model import process_identity
from vllmops.model.agent_socket import get_socket_directory
from vllmops.model.roles import Role
from vllmops.servers import logs, supervisor_client
from vllmops.servers.record import InstanceFolder, InstanceState
from vllmops.servers.supervisor_client import ControlRequest
from vllmops.supervision import claimed_ports, handover, shutdown, supervisor
from vllmops.supervision.supervisor import Supervisor
from vllmops.support.home import create_folder

from ..support.extent import long, sample_cases
from ..support.own_processes import in_home
from ..support.ports import free_port
from ..support.waiting import until


@pytest.mark.parametrize("role", sample_cases(["engine", "api", "worker"], 3))
def test_killed_process_takes_the_whole_server_down(
    lab: Any, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 600.0)  # none of them is waited for in vain
    record = lab.serve("a")
    assert [p.role for p in record.processes] == ["api", "engine", "worker"]
    victim = lab.process("a", role)
    lab.kill(victim.pid)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    until(lambda: not InstanceFolder("a").is_supervised())
    failure = lab.record("a").failure
    assert failure
    assert f"{role} (pid {victim.pid})" in failure.cause
    assert ("SIGKILL" if role == "api" else "died") in failure.cause


def test_all_processes_are_recorded_once_the_server_is_ready(lab: Any) -> None:
    answer = lab.vllmops(*lab.words("a"), "--detach")
    assert answer.code == 0, answer
    assert [p.role for p in lab.record("a").processes] == ["api", "engine", "worker"]


def test_it_is_a_program_of_its_own_and_so_is_a_watch(programs: None, lab: Any) -> None:
    """All other tests fork them from the test process, which is far cheaper."""
    hook = f"http://127.0.0.1:{free_port()}/PLANTED"
    record = lab.serve("a", "--watch-webhook", hook)
    supervisor = lab.supervisor("a")
    until(lambda: "watching a every" in InstanceFolder("a").server_log.read_text())
    commands = {pid: cmdline(pid) for pid in psutil.pids() if in_home(pid, lab.home)}
    python = [sys.executable, "-P", "-m"]
    assert commands[supervisor][:5] == [*python, "vllmops.supervision.supervisor", "a"]
    assert [*python, "vllmops", "watch"] in [words[:5] for words in commands.values()]
    # Everybody sees these, and a webhook is a secret.
    assert "PLANTED" not in str(commands)
    assert os.getsid(supervisor) == supervisor
    assert lab.vllmops("stop", "a").code == 0
    lab.nothing_left(record)
    until(lambda: not InstanceFolder("a").is_supervised() and not InstanceFolder("a").has_watch())


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # it has just ended
        return []


@long
def test_killed_api_server_of_several_takes_the_server_down(lab: Any) -> None:
    record = lab.serve("a", api_servers=2)
    roles = sorted(p.role for p in record.processes)
    assert roles == ["api", "api", "engine", "launcher", "worker"]
    lab.kill(next(p.pid for p in record.processes if "APIServer_1" in p.title))
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


def test_the_launcher_of_several_api_servers_killed(lab: Any) -> None:
    record = lab.serve("a", api_servers=2)
    lab.kill(record.session)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    expected = f"launcher (pid {record.session}) was killed by SIGKILL"
    assert lab.record("a").failure.cause == expected


def test_a_real_time_signal_kills_the_root(lab: Any) -> None:
    """Python has no name for most of these."""
    record = lab.serve("a")
    lab.kill(record.session, signal.SIGRTMIN + 6)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    assert "was killed by signal 40" in lab.record("a").failure.cause


def test_a_cause_that_can_not_be_told_does_not_keep_it_from_its_end(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_value_error(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(logs, "find_failure", raise_value_error)
    record = lab.serve("a")
    lab.kill(lab.process("a", "engine").pid)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    assert lab.record("a").failure.cause == "a process has died; why is not known"


def test_told_to_stop_by_somebody_else(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill(record.session, signal.SIGTERM)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    assert lab.record("a").exit_code == 0
    assert lab.record("a").failure.cause == "vLLM was stopped by a signal that vllmops did not send"


@long
def test_a_segment_that_somebody_else_maps_stays(lab: Any) -> None:
    record = lab.serve("a")
    (name,) = record.segments
    with Path("/dev/shm", name).open("r+b"):
        lab.kill(record.session)
        until(lambda: lab.state("a") == "failed")
        assert Path("/dev/shm", name).exists()
    assert not any(map(is_alive, record.processes))


def test_a_stray_process_goes_too(lab: Any) -> None:
    record = lab.serve("a", stray=True)
    (stray,) = [p for p in psutil.pids() if p != record.session and is_stray(p, record.session)]
    lab.kill(lab.process("a", "worker").pid)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    assert not is_alive(Process(Role.OTHER, stray, 0))


def is_stray(pid: int, session: int) -> bool:
    try:
        words = psutil.Process(pid).cmdline()
        return os.getsid(pid) == session and "-c" in words
    except (psutil.Error, OSError):
        return False


# -- the supervisor dies -------------------------------------------------------------------


def test_serving_goes_on_without_the_supervisor_of_a_detached_server(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    time.sleep(0.3)
    assert all(map(is_alive, record.processes))
    assert urllib.request.urlopen(f"{record.url}/health").status == 200

    first = lab.vllmops("ps", "--json")
    (row,) = first.data["instances"]
    assert (row["supervised"], row["state"]) == (False, "ready")
    assert "a had no supervisor; a new one has started" in first.err
    until(lambda: InstanceFolder("a").control_socket.exists() and lab.supervisor("a"))
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["supervised"], row["state"], row["pid"]) == (True, "ready", record.session)

    lab.kill(lab.process("a", "engine").pid)  # the successor watches as the first one did
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


@long
def test_a_port_is_its_instance_s_for_as_long_as_that_is_supervised(lab: Any) -> None:
    port = lab.serve("a").port
    assert claimed_ports.claim_port(port) is None
    lab.kill_supervisor("a")
    successor = supervisor_client.connect_supervisor(InstanceFolder("a"))
    next(successor.follow_records())
    assert claimed_ports.claim_port(port) is None
    successor.close()
    assert lab.vllmops("restart", "a").code == 0
    assert claimed_ports.claim_port(port) is None
    assert lab.vllmops("stop", "a", "--force").code == 0
    held = claimed_ports.claim_port(port)
    assert held is not None
    again = lab.vllmops("restart", "a", "--json")
    assert (again.code, again.error["code"]) == (1, "port.taken")
    os.close(held)


def test_stop_works_without_the_supervisor(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    answer = lab.vllmops("stop", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "stopped")
    lab.nothing_left(record)


def test_unsupervised_death_of_all_processes_is_recorded(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    for process in record.processes:
        lab.kill(process.pid)
    assert lab.vllmops("ps").code == 0
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)
    assert "while it had no supervisor" in lab.record("a").failure.cause


def test_next_start_removes_shared_memory_of_a_killed_server(lab: Any) -> None:
    """As systemd does it, at once to all, if `serve` itself dies; then it starts the next one."""
    record = lab.serve("a")
    assert record.segments
    lab.kill_supervisor("a")
    for process in reversed(record.processes):
        lab.kill(process.pid)
    until(lambda: not any(is_alive(process) for process in record.processes))
    # Another server's agent may have one of these pids by now.
    socket = create_folder(get_socket_directory(lab.home)) / f"{record.processes[0].pid}.sock"
    socket.touch()
    lab.serve("a")
    assert socket.exists()
    lab.nothing_left(msgspec.structs.replace(record, port=None))


@long
def test_unsupervised_death_of_the_root_process_ends_the_server(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    lab.kill(record.session)
    lab.vllmops("ps")
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


def test_the_supervisor_died_while_it_stopped_the_server(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    folder = InstanceFolder("a")
    folder.save_record(msgspec.structs.replace(lab.record("a"), state=InstanceState.STOPPING))
    lab.vllmops("ps")
    until(lambda: lab.state("a") == "stopped")
    lab.nothing_left(record)


def test_a_reused_pid_is_never_taken_for_the_instance(lab: Any) -> None:
    """Its pids, and its session, are somebody else's by now: they must live on."""
    record = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        reused = tuple(
            Process(p.role, bystander.pid, p.start_ticks - 6000) for p in record.processes
        )
        folder = InstanceFolder("a")
        long_ago = msgspec.structs.replace(
            record, processes=reused, session=bystander.pid, started_at=record.started_at - 3600
        )
        folder.save_record(long_ago)
        (row,) = lab.vllmops("ps", "--all", "--json").data["instances"]
        assert row["processes"] == []
        until(lambda: lab.state("a") == "failed")
        until(lambda: not folder.is_supervised())
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("hours", sample_cases([-1, 1], 2))
def test_a_clock_that_is_set_does_not_lose_the_server(lab: Any, hours: int) -> None:
    """To set the machine's clock would disturb all that runs on it: the record is shifted instead.

    That is the same: what is in it in seconds since the epoch no longer agrees with what the
    kernel's boot time, which moves with the clock, and a process's age make of a start.
    """
    record = lab.serve("a", stray=True)
    lab.kill_supervisor("a")
    times = ("created_at", "stage_at", "started_at", "ready_at")
    shifted = {name: getattr(record, name) + 3600 * hours for name in times}
    folder = InstanceFolder("a")
    content = msgspec.json.decode(folder.record_file.read_bytes())
    for process in content["processes"]:
        if "create_time" in process:
            process["create_time"] += 3600 * hours
    folder.record_file.write_bytes(msgspec.json.encode({**content, **shifted}))
    lab.kill(record.session)  # what is left has the session as its only bond
    assert lab.vllmops("ps").code == 0
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


STEPPED = """
import os, time
real, step = time.time, float(os.environ["CLOCK_STEP_S"])
time.time = lambda: real() + step
time.time_ns = lambda: int(time.time() * 1e9)
import psutil._pslinux as linux
booted = linux.boot_time
linux.boot_time = lambda: booted() + step
"""


@pytest.mark.parametrize("step_s", sample_cases([-3600, -3, 3, 3600], 4))
def test_a_clock_that_steps_after_the_start_does_not_lose_the_server(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    """Who looks later has another clock, and another boot time, as the kernel would tell it."""
    record = lab.serve("a", stray=True)
    lab.kill_supervisor("a")
    (tmp_path / "sitecustomize.py").write_text(STEPPED)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CLOCK_STEP_S", str(step_s))
    before = time.time()
    shown = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], capture_output=True, check=True
    )
    assert before + step_s <= float(shown.stdout) <= time.time() + step_s
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert {item["pid"] for item in row["processes"]} >= {item.pid for item in record.processes}
    lab.kill(record.session)
    assert lab.vllmops("ps").code == 0
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


@long
def test_a_session_of_an_earlier_boot_is_nobody_s(lab: Any) -> None:
    record = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    until(lambda: not InstanceFolder("a").is_supervised())
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        # The same numbers, even the same start after boot, and another boot.
        there = process_identity.read_identity(bystander.pid)
        old = Process(Role.API, there.pid, there.start_ticks, boot="another")
        folder = InstanceFolder("a")
        folder.save_record(msgspec.structs.replace(record, processes=(old,), session=bystander.pid))
        lab.vllmops("ps", "--all")
        until(lambda: lab.state("a") == "failed")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_supervisors_that_end_as_soon_as_they_are_started(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example of an installation that is broken in part."""
    monkeypatch.setattr(Supervisor, "run", None)
    answer = lab.vllmops(*lab.words("a"), "--detach", "--json", timeout_s=60)
    assert (answer.code, answer.error["code"]) == (5, "supervisor.unreachable")
    assert "supervisor.log shows why" in answer.error["hint"]


def test_an_error_right_after_the_start_leaves_no_server(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a process table that can't be read."""
    start = Supervisor.start_server

    def start_and_fail(self: Supervisor) -> None:
        start(self)
        raise RuntimeError("of all things")

    monkeypatch.setattr(Supervisor, "start_server", start_and_fail)
    answer = lab.vllmops(*lab.words("a"), "--detach", "--json", timeout_s=60)
    assert (answer.code, answer.error["code"]) == (1, "serve.failed")
    assert "of all things" in answer.error["message"]
    assert not shutdown.find_session_members(
        processes.read_process_table(), lab.record("a").session
    )


# -- hand-over -----------------------------------------------------------------------------


@pytest.fixture
def hand_over_lab(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that can be handed over: what its agents would say is seen from outside."""

    def serves(tree: tuple[Process, ...]) -> bool:
        return any(process.role is Role.WORKER for process in tree)

    monkeypatch.setattr(handover, "is_accepting_connections", serves)
    monkeypatch.setattr(handover, "drain_first_server", lambda *_: "no request was lost")
    return lab


def has_only_its_processes(lab: Any) -> bool:
    """Whether the instance has all its processes, and no others run here."""
    known = {process.pid for process in lab.record("a").processes}
    rows = lab.vllmops("ps", "--json").data["instances"]
    found = {process["pid"] for row in rows for process in row["processes"]}
    return len(known) == 3 and found == known


def test_a_hand_over(hand_over_lab: Any) -> None:
    first = hand_over_lab.serve("a")
    assert hand_over_lab.vllmops("restart", "a", "--hand-over").code == 0
    second = hand_over_lab.record("a")
    assert (second.state, second.hand_over_processes, second.session != first.session) == (
        "ready",
        (),
        True,
    )
    assert not any(map(is_alive, first.processes))
    until(lambda: has_only_its_processes(hand_over_lab) and hand_over_lab.record("a").segments)
    second = hand_over_lab.record("a")
    assert hand_over_lab.vllmops("stop", "a").code == 0
    hand_over_lab.nothing_left(second)


def test_an_error_in_a_hand_over_leaves_no_second_server(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fail_for_second_server(tree: tuple[Process, ...]) -> bool:
        asked.append(tree)
        if len(asked) == 1:  # of the first server
            return True
        raise RuntimeError("of all things")

    monkeypatch.setattr(handover, "is_accepting_connections", fail_for_second_server)
    first = hand_over_lab.serve("a")
    answer = hand_over_lab.vllmops("restart", "a", "--hand-over", "--json", timeout_s=60)
    assert (answer.code, answer.error["code"]) == (1, "restart.no-hand-over")
    assert "of all things" in answer.error["message"]
    assert (hand_over_lab.record("a").hand_over_processes, hand_over_lab.state("a")) == (
        (),
        "ready",
    )
    assert has_only_its_processes(hand_over_lab)
    assert hand_over_lab.vllmops("stop", "a").code == 0
    hand_over_lab.nothing_left(first)


def test_an_error_while_the_first_server_finishes_leaves_the_second_one(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_runtime_error(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(handover, "drain_first_server", raise_runtime_error)
    first = hand_over_lab.serve("a")
    assert hand_over_lab.vllmops("restart", "a", "--hand-over", timeout_s=60).code == 0
    assert not any(map(is_alive, first.processes))
    until(lambda: has_only_its_processes(hand_over_lab))


def test_a_supervisor_that_dies_while_the_first_server_leaves_has_the_second_one_serve(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes no more connections by then."""

    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(handover, "drain_first_server", dies)
    first = hand_over_lab.serve("a")
    answer = hand_over_lab.vllmops("restart", "a", "--hand-over", timeout_s=60)
    assert answer.code == 0, answer
    assert not hand_over_lab.record("a").hand_over_processes
    assert not any(map(is_alive, first.processes))
    assert hand_over_lab.record("a").session != first.session
    assert urllib.request.urlopen(f"{first.url}/health").status == 200


def test_a_supervisor_that_dies_before_there_is_a_second_server(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(handover, "explain_insufficient_memory", dies)
    hand_over_lab.serve("a")
    answer = hand_over_lab.vllmops("restart", "a", "--hand-over", "--json", timeout_s=60)
    assert (answer.code, answer.error["code"]) == (1, "restart.no-hand-over")
    assert "its supervisor died" in answer.error["message"]


def test_two_hand_overs_at_once(hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits for the first one, and is told its own end."""
    fails, goes_on = hand_over_lab.home / "fails", hand_over_lab.home / "goes-on"

    def explain_memory_lack_once(_: object) -> str:
        until(goes_on.exists)
        with suppress(FileNotFoundError):
            fails.unlink()
            return "there is no memory"
        return ""

    monkeypatch.setattr(handover, "explain_insufficient_memory", explain_memory_lack_once)
    fails.touch()
    hand_over_lab.serve("a")
    with ThreadPoolExecutor(2) as pool:
        words = ("restart", "a", "--hand-over", "--json")
        first = pool.submit(hand_over_lab.vllmops, *words, timeout_s=60)
        until(lambda: hand_over_lab.record("a").hand_over)
        second = pool.submit(hand_over_lab.vllmops, *words, timeout_s=60)
        time.sleep(1)
        goes_on.touch()
    assert "there is no memory" in first.result().error["message"]
    assert second.result().code == 0, second.result()
    assert second.result().data["pid"] == hand_over_lab.record("a").session


def test_a_hand_over_says_what_it_cut_off(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "drain_first_server", lambda *_: "requests cut off: 3")
    monkeypatch.setattr(supervisor, "PEERS_S", 0.01)
    hand_over_lab.serve("a")
    answer = hand_over_lab.vllmops("restart", "a", "--hand-over")
    assert (answer.code, "requests cut off: 3" in answer.out) == (0, True), answer


def test_a_hand_over_knows_how_long_an_exported_variable_keeps_connections(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has it from there, too."""

    def save_keep_alive(*given: Any) -> str:
        (hand_over_lab.home / "kept").write_text(given[-1][handover.KEEP_ALIVE])
        return ""

    monkeypatch.setattr(handover, "drain_first_server", save_keep_alive)
    monkeypatch.setenv(handover.KEEP_ALIVE, "75")
    hand_over_lab.serve("a")
    assert hand_over_lab.vllmops("restart", "a", "--hand-over").code == 0
    assert (hand_over_lab.home / "kept").read_text() == "75"


def test_a_hand_over_of_an_earlier_boot_ends_nobody_s_session(lab: Any) -> None:
    record = lab.serve("a")
    lab.kill_supervisor("a")
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        there = process_identity.read_identity(bystander.pid)
        old = Process(Role.API, there.pid, there.start_ticks, boot="another")
        beside = {
            "hand_over_processes": (old,),
            "beside_session": bystander.pid,
            "hand_over": "it starts",
        }
        InstanceFolder("a").save_record(msgspec.structs.replace(record, **beside))
        assert lab.vllmops("ps").code == 0
        until(lambda: lab.record("a").hand_over.startswith("failed: "))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# -- the holder dies -----------------------------------------------------------------------


def hold(lab: Any, name: str) -> supervisor_client.ControlConnection:
    """Connect to an instance and hold it, as a foreground ``serve`` does."""
    found: supervisor_client.ControlConnection = supervisor_client.connect_supervisor(
        InstanceFolder(name), ControlRequest(hold=True)
    )
    next(found.follow_records())
    return found


def test_a_holder_that_disconnects_takes_the_server_with_it(lab: Any) -> None:
    record = lab.serve("a")
    hold(lab, "a").close()
    until(lambda: lab.state("a") == "stopped")
    lab.nothing_left(record)


def test_a_client_that_only_watches_does_not(lab: Any) -> None:
    record = lab.serve("a")
    watcher = supervisor_client.connect_supervisor(InstanceFolder("a"))
    assert next(watcher.follow_records()).state == InstanceState.READY
    watcher.close()
    mumbler = supervisor_client.connect_supervisor(InstanceFolder("a"))
    mumbler.connection.sendall(b"this is no request\n")
    assert (
        list(mumbler.follow_records())[-1].state == InstanceState.READY
    )  # it is hung up on, no more
    time.sleep(0.6)
    assert lab.state("a") == "ready"
    assert all(map(is_alive, record.processes))


def test_watchers_receive_the_final_record_at_stop(lab: Any) -> None:
    lab.serve("a")
    watchers = [supervisor_client.connect_supervisor(InstanceFolder("a")) for _ in range(3)]
    assert lab.vllmops("stop", "a", "--force").code == 0
    assert [list(item.follow_records())[-1].state for item in watchers] == [
        InstanceState.STOPPED
    ] * 3
    until(lambda: not InstanceFolder("a").is_supervised())
    assert "Traceback" not in InstanceFolder("a").supervisor_log.read_text()


# -- somebody harms the supervisor -----------------------------------------------------------


@pytest.mark.parametrize("number", sample_cases([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], 3))
def test_signals_do_not_end_the_supervisor(lab: Any, number: int) -> None:
    record = lab.serve("a")
    supervisor = lab.supervisor("a")
    lab.kill(supervisor, number)
    time.sleep(0.6)
    assert lab.supervisor("a") == supervisor
    assert lab.vllmops("stop", "a").code == 0
    lab.nothing_left(record)


def test_the_server_is_not_made_deaf_to_signals(lab: Any) -> None:
    """A signal that its supervisor ignores, it would ignore too."""
    record = lab.serve("a")
    status = Path(f"/proc/{record.session}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert not ignored & 1 << signal.SIGTERM - 1


@long
def test_a_deleted_control_socket_is_made_again(lab: Any) -> None:
    record = lab.serve("a")
    InstanceFolder("a").control_socket.unlink()
    answer = lab.vllmops("stop", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "stopped"), answer
    lab.nothing_left(record)


@long
def test_a_fifo_in_place_of_its_log_does_not_block_a_new_supervisor(lab: Any) -> None:
    lab.serve("a")
    lab.kill_supervisor("a")
    log = InstanceFolder("a").supervisor_log
    log.unlink()
    os.mkfifo(log)
    lab.vllmops("ps", timeout_s=60)
    until(lambda: InstanceFolder("a").is_supervised())
    assert lab.vllmops("stop", "a").code == 0


@pytest.mark.parametrize("what", sample_cases(["all", "record", "lock"], 3))
def test_deleted_files_are_made_again(lab: Any, what: str) -> None:
    record = lab.serve("a")
    folder, supervisor = InstanceFolder("a"), lab.supervisor("a")
    if what == "all":
        shutil.rmtree(folder.path)
    else:
        (folder.record_file if what == "record" else folder.lock_path).unlink()
    until(lambda: folder.record_file.exists() and folder.is_supervised())
    assert lab.supervisor("a") == supervisor
    (row,) = lab.vllmops("ps", "--json").data["instances"]
    assert (row["name"], row["state"], row["supervised"]) == ("a", "ready", True)
    assert lab.supervisor("a") == supervisor
    assert lab.vllmops("stop", "a").code == 0
    lab.nothing_left(record)


def test_a_state_directory_that_is_refused_does_not_keep_a_server_alive(lab: Any) -> None:
    popen = lab.hold("a")
    record = lab.record("a")
    lab.home.chmod(0o777)
    try:
        popen.send_signal(signal.SIGINT)
        assert popen.wait(60) == 130
    finally:
        lab.home.chmod(0o700)
    lab.nothing_left(record)


def test_without_a_descriptor_left_nothing_is_taken_for_dead(lab: Any) -> None:
    record = lab.serve("a")
    supervisor = lab.supervisor("a")
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, before[1]))
    time.sleep(3)
    assert lab.state("a") == "ready"
    assert all(map(is_alive, record.processes))
    lab.kill(lab.process("a", "engine").pid)
    time.sleep(3)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
    until(lambda: lab.state("a") == "failed")
    lab.nothing_left(record)


@long
def test_descriptors_run_out_while_it_stops(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 2.0)
    record = lab.serve("a", stubborn=True)
    supervisor = lab.supervisor("a")
    connection = supervisor_client.connect_supervisor(InstanceFolder("a"))
    next(connection.follow_records())
    connection.send_request(ControlRequest(stop=0.0))
    until(lambda: lab.state("a") == "stopping")
    before = resource.prlimit(supervisor, resource.RLIMIT_NOFILE)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, before[1]))
    time.sleep(3)
    resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
    until(lambda: lab.state("a") in {"stopped", "failed"})
    lab.nothing_left(record)


@long
def test_many_clients_do_not_use_up_its_descriptors(lab: Any) -> None:
    record = lab.serve("a")
    clients = [supervisor_client.connect_supervisor(InstanceFolder("a")) for _ in range(300)]
    descriptors = Path(f"/proc/{lab.supervisor('a')}/fd")
    until(lambda: len(list(descriptors.iterdir())) < 150)
    assert lab.vllmops("stop", "a", timeout_s=60).code == 0
    lab.nothing_left(record)
    for item in clients:
        item.close()


def test_supervisor_log_is_rotated(lab: Any) -> None:
    lab.serve("a")
    log = InstanceFolder("a").supervisor_log
    with log.open("a") as file:
        file.write("x" * (2**20 + 1))
    until(lambda: log.stat().st_size < 2**20)
    assert log.with_name("supervisor.log.1").stat().st_size > 2**20


def test_a_log_is_bounded_while_a_hand_over_takes_its_time(
    hand_over_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = InstanceFolder("a").server_log

    def fill_log_until_rotated(*_: object) -> str:
        with log.open("a") as file:
            file.write("x" * (1 << 16))
        until(lambda: log.stat().st_size < 1 << 16)
        return "it is rotated"

    monkeypatch.setattr(handover, "drain_first_server", fill_log_until_rotated)
    monkeypatch.setenv(logs.LIMIT, str(1 << 16))
    hand_over_lab.serve("a")
    assert "it is rotated" in hand_over_lab.vllmops("restart", "a", "--hand-over").out


def test_supervisor_keeps_only_the_beginning_of_long_log_lines(lab: Any) -> None:
    """All of them would be as much memory as the log has bytes."""
    record = lab.serve("a")
    lab.vllmops("stop", "a", "--force")
    folder = InstanceFolder("a")
    keeper = Supervisor(folder, record, 0, None)
    keeper.scanned_at = math.inf
    keeper.tail = logs.LogTail(folder.server_log)
    with folder.server_log.open("a") as file:
        file.writelines(f"{'y' * (1 << 20)}\n" for _ in range(9))
        file.write("z" * (1 << 22))
    keeper.refresh_record()
    assert sum(len(line) for _, line in keeper.recent_lines) < 1 << 18
    assert len(keeper.tail.partial_line) < 1 << 20


# -- full disk -----------------------------------------------------------------------------


def test_a_full_disk_does_not_stop_the_supervisor(full_disk: Callable[[], None], lab: Any) -> None:
    record = lab.serve("a")
    full_disk()
    supervisor = lab.supervisor("a")
    answer = lab.vllmops("ps", "--json")
    assert answer.data["instances"][0]["state"] == "ready"
    answer = lab.vllmops("stop", "a", "--json")
    assert (answer.code, answer.data["state"]) == (0, "stopped")
    lab.nothing_left(record)
    until(lambda: not psutil.pid_exists(supervisor) or zombie(supervisor))
    # The record could not be written; it must not make anybody believe that the server runs.
    (lab.home / "filler").unlink()
    (row,) = lab.vllmops("ps", "--all", "--json").data["instances"]
    assert row["processes"] == []


def test_a_server_dies_on_a_full_disk(full_disk: Callable[[], None], lab: Any) -> None:
    record = lab.serve("a")
    full_disk()
    lab.kill(lab.process("a", "engine").pid)
    until(lambda: not any(map(is_alive, record.processes)))
    until(lambda: not Path("/dev/shm", record.segments[0]).exists())
    lab.nothing_left(record)


def zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def test_a_wish_that_can_not_be_read_leaves_no_client_behind(lab: Any) -> None:
    """msgspec raises RecursionError for what is nested deeply, which is no error of JSON."""
    lab.serve("a")
    folder = InstanceFolder("a")
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(os.fspath(folder.control_socket))
            client.sendall(b'{"hold":true}\n{"a":' + b"[" * 20_000 + b"\n")
            while client.recv(1 << 16):
                pass
    # Who held it has gone, so it is taken down.
    until(lambda: lab.state("a") == "stopped")
    log = (folder.path / "supervisor.log").read_text()
    assert log.count("RecursionError") == 1
