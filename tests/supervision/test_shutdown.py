"""Taking trees of real processes down; they play vLLM's (standin.py), tests/live has vLLM's."""

import os
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.collect.http import vllm_client
from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process, is_alive
from vllmops.model import process_identity
from vllmops.model.agent_socket import get_socket_directory
from vllmops.model.agent_state import Traffic
from vllmops.model.roles import Role
from vllmops.supervision import shutdown
from vllmops.supervision.shutdown import drain_server, find_session_members, send_signal, take_down
from vllmops.support.home import create_folder

from ..support.waiting import patiently, until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to tell how many requests it has is no server that can't."""
    patiently(monkeypatch, "timeout_s", vllm_client.fetch_metrics)


def sleeper(**options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"], **options)


def test_a_tree_goes_with_its_port_and_its_segment(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 600.0)  # none of it is waited for in vain
    server = lab.stranger()
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    assert [p.role for p in tree] == ["api", "engine", "worker"]
    lab.kill(server.pid)  # so that nobody unlinks the segment in order
    server.wait()
    removed = take_down(tree, session=server.pid).removed_segments
    assert len(removed) == 1
    assert not any(map(is_alive, tree))
    assert not Path("/dev/shm", removed[0]).exists()
    assert lab.bind_error(server.port) is None


def test_orphans_that_heed_sigterm_are_not_waited_for_in_vain(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 600.0)
    server = lab.stranger()
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    lab.kill(lab.pid_of(tree, "engine"))  # the API server does not know of the worker
    take_down(tree, session=server.pid)
    assert not any(map(is_alive, tree))


def test_take_down_kills_processes_that_ignore_sigterm(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 0.3)
    server = lab.stranger(stubborn=True)
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    removed = take_down(tree, session=server.pid).removed_segments
    assert len(tree) == 3
    assert not any(map(is_alive, tree))
    assert len(removed) == 1


def test_take_down_finds_stray_processes_by_session(lab: Any) -> None:
    server = lab.stranger(stray=True)
    table = processes.read_process_table()
    tree = processes.build_process_tree(table, [server.pid])
    inside = find_session_members(table, server.pid)
    (stray,) = set(inside) - {p.pid for p in tree}
    take_down(tree, session=server.pid)
    assert stray
    assert find_session_members(processes.read_process_table(), server.pid) == []


def test_a_segment_that_somebody_else_maps_stays(lab: Any) -> None:
    server = lab.stranger()
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    (segment,) = Path("/dev/shm").glob(f"*_{lab.home.name}_{server.pid}")
    with segment.open("r+b"):
        lab.kill(server.pid)
        server.wait()
        assert take_down(tree, session=server.pid).removed_segments == ()
        assert segment.exists()
    assert not any(map(is_alive, tree))


def test_a_reused_pid_is_not_killed() -> None:
    bystander = sleeper()
    created = process_identity.read_identity(bystander.pid).start_ticks
    stale = Process(Role.API, bystander.pid, created - 60)
    send_signal(stale, signal.SIGKILL)
    take_down([stale])
    assert bystander.poll() is None
    send_signal(Process(Role.API, bystander.pid, created), signal.SIGKILL)
    assert bystander.wait(60) == -signal.SIGKILL


def test_take_down_reports_an_unkillable_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that hangs in a driver's call can't be had here: signals are kept from this one.
    monkeypatch.setattr(shutdown, "EXIT_GRACE_S", 0.1)
    monkeypatch.setattr(shutdown, "KILL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(shutdown, "send_signal", lambda *_: None)
    hung = sleeper()
    process = Process(Role.WORKER, hung.pid, process_identity.read_identity(hung.pid).start_ticks)
    remains = take_down([process])
    assert remains.unkillable == (process,)
    assert str(hung.pid) in str(remains)
    hung.kill()
    hung.wait()


def test_take_down_of_no_processes_does_nothing(home: Path) -> None:
    assert take_down([]) == shutdown.TakedownResult((), ())
    assert find_session_members(processes.read_process_table(), None) == []


def test_take_down_removes_agent_sockets_and_heartbeats(home: Path) -> None:
    folder = create_folder(get_socket_directory(home))
    victim = sleeper()
    for suffix in (".sock", ".beat"):
        (folder / f"{victim.pid}{suffix}").touch()
        (folder / f"1{suffix}").touch()
    waiter = threading.Thread(target=victim.wait)
    waiter.start()
    take_down(
        [Process(Role.API, victim.pid, process_identity.read_identity(victim.pid).start_ticks)]
    )
    waiter.join()
    assert {item.name for item in folder.iterdir()} == {"1.sock", "1.beat"}


def test_a_drain_waits_for_requests_in_flight(lab: Any, tmp_path: Path) -> None:
    server = lab.stranger()
    url = f"http://127.0.0.1:{server.port}"
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    words: list[str] = []
    request = threading.Thread(target=urllib.request.urlopen, args=(f"{url}/until{tmp_path}/go",))
    request.start()
    until(lambda: shutdown.count_in_flight(tree, url) == 1)

    def tell(text: str) -> None:
        words.append(text)
        (tmp_path / "go").touch()

    assert drain_server(tree, url, 600, tell) == "drained"
    request.join(60)
    assert not request.is_alive()
    assert "in flight: 1" in words[0]


@pytest.mark.parametrize(
    ("traffic", "count"),
    [
        (Traffic(in_flight=1, engine_requests=1), 1),
        (Traffic(in_flight=2, engine_requests=1), 2),
        (
            Traffic(in_flight=0, engine_requests=1),
            1,
        ),  # in the background; the engine is in a long step
        (Traffic(in_flight=3), 3),
        (Traffic(), None),
    ],
)
def test_unfinished_requests_are_counted_from_front_end_traffic(
    traffic: Traffic, count: int | None
) -> None:
    assert shutdown.count_unfinished(traffic) == count


SILENT = -1
IDLE, BUSY = Traffic(in_flight=0, engine_requests=0), Traffic(in_flight=5, engine_requests=5)


@pytest.mark.parametrize(
    ("traffic", "unfinished", "gauge", "count"),
    [
        (IDLE, 0, None, 0),
        (BUSY, 5, 0, 5),
        # An engine that does not answer has what an API server gave it.
        (BUSY, SILENT, 0, 5),
        (IDLE, SILENT, 0, 0),
        (Traffic(in_flight=0), SILENT, 0, None),
        (Traffic(in_flight=0), SILENT, 2, 2),
        (Traffic(in_flight=3), SILENT, None, 3),
        # One that can't count leaves it to vLLM.
        (Traffic(in_flight=0), None, 0, 0),
        # An API server that does not answer may have what is in no engine yet.
        (None, 3, 0, 3),
        (None, 0, 0, None),
        (None, 0, 2, 2),
        # Without agents there is nobody else.
        (None, SILENT, 0, 0),
        (None, SILENT, None, None),
    ],
)
def test_requests_in_flight_where_an_agent_does_not_answer(
    traffic: Traffic | None,
    unfinished: int | None,
    gauge: float | None,
    count: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is silent at a given moment can't be had for real."""

    def answers(*_: object) -> list[Any]:
        if asked.pop() is Role.API:
            return [traffic]
        return [SimpleNamespace(unfinished_requests=unfinished) if unfinished != SILENT else None]

    asked = [Role.ENGINE, Role.API]
    monkeypatch.setattr(shutdown, "collect_agent_answers", answers)
    found = None if gauge is None else SimpleNamespace(running=gauge, waiting=0.0)
    monkeypatch.setattr(vllm_client, "fetch_metrics", lambda _: found)
    assert shutdown.count_in_flight([], "http://127.0.0.1:1") == count


def test_a_drain_ends_when_its_time_is_up_or_somebody_hurries(lab: Any) -> None:
    server = lab.stranger()
    url = f"http://127.0.0.1:{server.port}"
    tree = processes.build_process_tree(processes.read_process_table(), [server.pid])
    cut = threading.Thread(target=lab.cut_off, args=(f"{url}/slow/600",))
    cut.start()
    until(lambda: shutdown.count_in_flight(tree, url) == 1)
    assert drain_server(tree, url, 0.3, lambda _: None) == "requests cut off: 1"
    assert drain_server(
        tree, url, 600, lambda _: None, should_stop_waiting=lambda: True
    ).startswith("requests cut off")
    lab.kill(lab.pid_of(tree, "engine"))
    # None will finish.
    assert drain_server(tree, url, 600, lambda _: None).startswith("requests cut off")
    take_down(tree, session=server.pid)
    cut.join()


def test_engines_without_an_agent_and_an_api_server_are_not_waited_for() -> None:
    tree = [
        Process(Role.ENGINE, os.getpid(), process_identity.read_identity(os.getpid()).start_ticks)
    ]
    assert drain_server(tree, None, 600, lambda _: None) == "requests cut off: unknown"


def test_drain_reports_that_requests_in_flight_are_unknown(listener: int) -> None:
    tree = [Process(Role.API, os.getpid(), process_identity.read_identity(os.getpid()).start_ticks)]
    words: list[str] = []
    assert shutdown.count_in_flight(tree, None) is None
    assert drain_server(tree, None, 0.2, words.append) == "requests cut off: unknown"
    assert "unknown" in words[0]
