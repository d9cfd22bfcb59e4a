"""Reaching agents, in real processes that are stopped, stuck, killed or not what they claim."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllmops.collect.agents import agent_client, agent_files
from vllmops.collect.agents.agent_client import collect_answers, open_agent
from vllmops.collect.agents.agent_files import read_heartbeat
from vllmops.collect.machine import proc
from vllmops.collect.machine.processes import Process
from vllmops.model.agent_socket import get_socket_directory
from vllmops.model.agent_state import AgentAnswer
from vllmops.model.roles import Role
from vllmops.support.errors import ExitCode, VllmopsError

from ...support.children import Child
from ...support.waiting import until

NOBODY = 65534
Spawn = Callable[..., Any]


def refusal(child: Any, **options: Any) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        open_agent(child.process, **options)
    assert caught.value.hint
    return caught.value


def test_every_question(spawn: Spawn) -> None:
    child = spawn()
    found = open_agent(child.process)
    assert found.fetch_hello().pid == child.process.pid
    assert found.fetch_engine_state().running is None
    assert found.fetch_traffic().in_flight is None
    assert found.set_draining().draining is False  # no HTTP server in it to drain
    assert found.fetch_caches().caches == []


BRIEF = """
send_json = AgentHandler.send_json
def answered(self, *given):
    send_json(self, *given)
    self.connection.settimeout(0.1)
AgentHandler.send_json = answered
"""


def test_questions_share_a_connection_and_outlive_it(spawn: Spawn) -> None:
    child = spawn()
    child.run(
        "from vllmops.agent.transport.unix_socket import AgentHandler; AgentHandler.timeout = 600"
    )
    count = "import threading; out = sum('request' in t.name for t in threading.enumerate())"
    found = open_agent(child.process)
    for _ in range(3):
        assert found.fetch_engine_state().running is None
    assert child.run(count) == "1"
    # The agent closes what has been silent, here once it has been answered; it is asked anew.
    child.run(BRIEF)
    other = open_agent(child.process)
    assert other.fetch_engine_state().running is None
    until(lambda: child.run(count) == "1")
    assert other.fetch_engine_state().running is None


def test_role_is_the_process_tables(spawn: Spawn) -> None:
    child = spawn(role=Role.WORKER)
    found = open_agent(child.process)
    assert (found.fetch_hello().role, found.fetch_caches().role) == ("api", "worker")


def test_several_side_by_side(spawn: Spawn) -> None:
    live, stopped = spawn(), spawn()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    together = threading.Barrier(3)  # one after the other would not get on

    def fetch_agent_pid(process: Process) -> int:
        together.wait()
        return (
            open_agent(process, timeout_s=60 if process is live.process else 0.5).fetch_hello().pid
        )

    shown, silent = collect_answers(
        [live.process, stopped.process, stopped.process], fetch_agent_pid
    )
    assert shown == [live.process.pid]
    assert [(item.pid, item.code) for item in silent] == [
        (stopped.process.pid, "agent.timeout")
    ] * 2


@contextmanager
def bind_agent_socket(child: Child) -> Iterator[socket.socket]:
    """A socket in the place of an agent's."""
    child.socket.parent.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(child.socket))
        child.socket.chmod(0o600)
        yield server


def test_stale_socket(spawn: Spawn) -> None:
    child = spawn(VLLMOPS_DISABLE="1")
    with bind_agent_socket(child):
        pass
    error = refusal(child)
    assert (error.code, error.exit_code) == ("agent.stale", ExitCode.NOT_FOUND)


def test_killed(spawn: Spawn) -> None:
    child = spawn()
    child.popen.kill()
    child.popen.wait()
    assert child.socket.exists()
    assert refusal(child).code == "agent.gone"


def test_no_agent(spawn: Spawn) -> None:
    error = refusal(spawn(VLLMOPS_DISABLE="1"))
    assert error.code == "agent.absent"
    assert "VLLM_PLUGINS" in error.hint


def test_stopped_process_is_told_by_its_heartbeat(spawn: Spawn) -> None:
    child = spawn()
    os.kill(child.process.pid, signal.SIGSTOP)
    until(lambda: (pulse := read_heartbeat(child.process)) and pulse.age_s >= 1.5)
    error = refusal(child, timeout_s=0.3)
    assert error.code == "agent.timeout"
    pulse = read_heartbeat(child.process)
    assert pulse is not None
    assert pulse.age_s >= 1.5
    told = re.search(r"(\d+) s old", error.message)
    assert told
    assert 2 <= int(told[1]) <= round(pulse.age_s)


def test_held_gil_is_told_by_the_heartbeat(spawn: Spawn) -> None:
    child = spawn()
    # PyDLL, unlike CDLL, keeps the GIL during the call.
    child.send("import ctypes; ctypes.PyDLL(None).sleep(600)")
    until(lambda: (pulse := read_heartbeat(child.process)) and pulse.age_s >= 2.4)
    assert refusal(child, timeout_s=0.3).code == "agent.timeout"
    pulse = read_heartbeat(child.process)
    assert pulse is not None
    assert pulse.age_s >= 2.4


def test_a_busy_main_thread_does_not_hinder_it(spawn: Spawn) -> None:
    child = spawn()
    child.send("while True: pass")
    before = read_heartbeat(child.process)
    assert before is not None
    assert open_agent(child.process, timeout_s=60).fetch_hello().pid == child.process.pid
    until(
        lambda: (
            (pulse := read_heartbeat(child.process))
            and pulse.heartbeat.sequence >= before.heartbeat.sequence + 2
            and not pulse.is_late
        )
    )


def test_another_process_behind_the_pid(spawn: Spawn) -> None:
    child = spawn()
    old = replace(child.process, start_ticks=child.process.start_ticks - 1)
    with pytest.raises(VllmopsError) as caught:
        open_agent(old)
    assert caught.value.code == "agent.mismatch"
    assert read_heartbeat(old) is None


def test_open_directory_is_refused(spawn: Spawn) -> None:
    child = spawn()
    child.socket.parent.chmod(0o755)
    error = refusal(child)
    assert (error.code, error.exit_code) == ("agent.unsafe", ExitCode.NOT_AUTHORISED)
    assert "755" in error.message


def test_a_file_in_the_sockets_place_is_refused(spawn: Spawn) -> None:
    child = spawn()
    child.socket.unlink()
    child.socket.touch(0o600)
    assert refusal(child).code == "agent.unsafe"


@pytest.mark.root_only
def test_another_users_socket_is_refused(spawn: Spawn) -> None:
    child = spawn()
    os.chown(child.socket, NOBODY, NOBODY)
    error = refusal(child)
    assert error.code == "agent.unsafe"
    assert "not to root" in error.message


@pytest.mark.root_only
def test_another_users_process_is_told(spawn: Spawn) -> None:
    child = spawn()
    ask = (
        "from vllmops.collect.agents.agent_client import open_agent\n"
        "from vllmops.support.errors import VllmopsError\n"
        "from vllmops.collect.machine.processes import Process\n"
        "from vllmops.model.roles import Role\n"
        f"process = Process(Role.API, {child.process.pid}, {child.process.start_ticks})\n"
        "try: open_agent(process)\n"
        "except VllmopsError as error: print(error.code, int(error.exit_code), error.hint)"
    )
    other = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    done = subprocess.run(
        [*other, sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    assert done.stdout.startswith("agent.other-user 4 sudo -u root")


def test_other_versions_and_nonsense_are_told_apart(spawn: Spawn) -> None:
    child = spawn()
    for answer, code in (
        ("{'schema': 99, 'agent': 'future'}", "agent.newer"),
        ("{'schema': 0}", "agent.older"),
        ("{'schema': 1}", "agent.older"),
        ("{'schema': 2}", "agent.older"),
        ("{'schema': 3}", "agent.broken"),
        ("['nonsense']", "agent.broken"),
        ("1 / 0", "agent.broken"),
    ):
        child.run("from vllmops.agent.transport.unix_socket import GETS")
        child.run(f"GETS['/hello'] = lambda: {answer}")
        assert refusal(child).code == code, answer


def test_connection_that_breaks(spawn: Spawn) -> None:
    child = spawn(VLLMOPS_DISABLE="1")
    with bind_agent_socket(child) as server:
        server.listen()
        server.settimeout(60)

        def hang_up() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert refusal(child).code == "agent.broken"
        thread.join()


def test_an_answer_without_end(spawn: Spawn) -> None:
    child = spawn(VLLMOPS_DISABLE="1")
    with bind_agent_socket(child) as server:
        server.listen()

        def flood() -> None:
            with suppress(OSError), server.accept()[0] as connection:
                while True:
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

        threading.Thread(target=flood, daemon=True).start()
        assert refusal(child, timeout_s=0.3).code == "agent.timeout"


def test_path_too_long(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn(home=tmp_path / ("x" * 100))
    error = refusal(child)
    assert error.code == "agent.path-too-long"
    assert "VLLMOPS_HOME" in error.hint


def test_home_is_the_servers_not_ours(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn(home=tmp_path / "theirs")
    monkeypatch.setenv("VLLMOPS_HOME", str(tmp_path / "ours"))
    assert open_agent(child.process).fetch_hello().pid == child.process.pid


def test_default_home(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn(VLLMOPS_HOME="", HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    child.home = tmp_path / "vllmops"
    assert child.socket.exists()
    assert open_agent(child.process).fetch_hello().pid == child.process.pid


def test_home_where_a_title_hides_the_environment(spawn: Spawn, tmp_path: Path) -> None:
    parent = spawn(home=tmp_path / "theirs")
    # vLLM's titles overwrite the memory from which the kernel shows the environment; an empty
    # one looks the same from outside.
    pid = int(
        parent.run(
            "import subprocess\n"
            f"out = subprocess.Popen([{sys.executable!r}, '-S', '-c', 'input()'],"
            " stdin=subprocess.PIPE, env={}).pid"
        )
    )
    process = Process(Role.WORKER, pid, 0)
    until(lambda: proc.read_environment(pid) == {})
    assert (
        agent_files.find_socket_path(process)
        == get_socket_directory(tmp_path / "theirs") / f"{pid}.sock"
    )


def test_every_answer_has_a_decoder_that_was_made_on_one_thread() -> None:
    # msgspec.json.decode(type=...) builds what it knows of a type at its first use, and two
    # threads that do so at once have crashed the process.
    assert set(agent_client.DECODERS) == {AgentAnswer, *AgentAnswer.__subclasses__()}


def test_damaged_heartbeat_is_none(spawn: Spawn) -> None:
    child = spawn()
    os.kill(child.process.pid, signal.SIGSTOP)
    for content in (b"", b"\0" * 512, b"{}", b'{"schema":1,"pid":'):
        child.beat.write_bytes(content)
        assert read_heartbeat(child.process) is None
    child.beat.unlink()
    assert read_heartbeat(child.process) is None
