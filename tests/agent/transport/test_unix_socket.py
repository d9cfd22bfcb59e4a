"""The agent's socket, in real processes."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vllmops import __version__
from vllmops.collect.agents.agent_client import open_agent
from vllmops.model.agent_socket import get_socket_directory
from vllmops.model.agent_state import AgentAnswer
from vllmops.support.errors import VllmopsError

from ...support.waiting import until

NOBODY = 65534
Spawn = Callable[..., Any]


def files(home: Path) -> set[str]:
    return {path.name for path in get_socket_directory(home).glob("*")}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_says_who_it_is(spawn: Spawn) -> None:
    child = spawn()
    hello = open_agent(child.process).fetch_hello()
    assert (hello.pid, hello.agent, hello.role) == (child.process.pid, __version__, "api")
    assert hello.identity == child.process.identity
    assert hello.problems == ()
    assert mode(child.home / "agents") == mode(get_socket_directory(child.home)) == 0o700
    assert mode(child.socket) == mode(child.beat) == 0o600


def test_a_headless_server_has_no_api_server(spawn: Spawn) -> None:
    child = spawn()
    child.run("import sys; sys.argv = ['vllm', 'serve', 'M', '--headless']")
    assert open_agent(child.process).fetch_hello().role == "launcher"


def test_registering_twice_starts_one(spawn: Spawn) -> None:
    child = spawn()
    names = "[thread.name for thread in threading.enumerate()]"
    out = child.run(
        f"import threading; from vllmops.agent import register; register(); out = {names}"
    )
    assert out.count("vllmops-agent") == out.count("vllmops-heart") == 1


def test_removes_its_files_at_exit(spawn: Spawn) -> None:
    child = spawn()
    assert len(files(child.home)) == 2
    child.end()
    assert child.popen.returncode == 0
    assert files(child.home) == set()


def test_sweeps_what_a_killed_process_left(spawn: Spawn) -> None:
    dead, live = spawn(), spawn()
    dead.popen.kill()
    dead.popen.wait()
    assert {dead.socket.name, dead.beat.name} <= files(dead.home)
    new = spawn()
    assert files(new.home) == {p.name for item in (live, new) for p in (item.socket, item.beat)}


def test_leaves_what_another_machine_has_in_a_shared_home(spawn: Spawn, tmp_path: Path) -> None:
    """Its sockets can't be asked from here, and its pids are no processes here."""
    other = get_socket_directory(tmp_path / "h").with_name("0badcafe")
    other.mkdir(parents=True, mode=0o700)
    other.parent.chmod(0o700)
    (other / "4100123.beat").touch()
    (other / "4100123.sock").touch()
    os.utime(other / "4100123.sock", (0, 0))
    os.utime(other, (0, 0))
    spawn(home=tmp_path / "h")
    assert {path.name for path in other.iterdir()} == {"4100123.beat", "4100123.sock"}
    os.utime(other / "4100123.beat", (0, 0))
    spawn(home=tmp_path / "h")
    assert not other.exists()


def test_can_be_turned_off(spawn: Spawn) -> None:
    child = spawn(VLLMOPS_DISABLE="1")
    assert not child.home.exists()


def test_stays_out_of_a_model_inspection(tmp_path: Path) -> None:
    # A stand-in for vLLM, which the fast tests do without: only the module's name matters.
    registry = tmp_path / "vllm" / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    for package in (registry.parent, *registry.parent.parents[:2]):
        (package / "__init__.py").touch()
    registry.write_text("from vllmops.agent import register; register(); print('inspected')")
    done = subprocess.run(
        [sys.executable, "-m", "vllm.model_executor.models.registry"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            "VLLMOPS_HOME": str(tmp_path / "home"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "inspected\n"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "fault",
    ["lax", "long", "file", pytest.param("foreign", marks=pytest.mark.root_only), "unwritable"],
)
def test_agent_that_can_not_start_logs_why_and_harms_nothing(
    spawn: Spawn, tmp_path: Path, fault: str
) -> None:
    home, directory = tmp_path / "h", tmp_path / "h" / "agents"
    if fault == "lax":
        directory.mkdir(parents=True)
        directory.chmod(0o750)
        words = [f"chmod 700 {directory}"]
    elif fault == "long":
        home = tmp_path / ("x" * 100)
        words = ["longer than 107 bytes", "VLLMOPS_HOME"]
    elif fault == "file":
        home.mkdir()
        directory.touch()
        words = [f"{directory} is not a directory"]
    elif fault == "foreign":
        directory.mkdir(parents=True, mode=0o700)
        os.chown(directory, NOBODY, NOBODY)
        words = [f"belongs to uid {NOBODY}"]
    else:
        home = Path("/proc/nowhere")
        words = ["/proc/nowhere"]
    child = spawn(home=home)
    assert child.run("out = 6 * 7") == "42"
    log = child.end()
    assert child.popen.returncode == 0
    assert "the agent does not start in pid" in log
    assert all(word in log for word in words)
    assert "Traceback" not in log


def test_a_forked_child_does_not_answer_for_its_parent(spawn: Spawn) -> None:
    child = spawn()
    forked = int(
        child.run(
            "import os, time\n"
            "reader, writer = os.pipe()\n"
            "out = os.fork()\n"
            "if out == 0:\n"
            "    os.write(writer, b'1')\n"  # what it does first at a fork, it has done
            "    time.sleep(600)\n"
            "    os._exit(0)\n"
            "os.read(reader, 1)"
        )
    )
    try:
        assert open_agent(child.process).fetch_hello().pid == child.process.pid
        inherited = [os.readlink(entry) for entry in Path(f"/proc/{forked}/fd").iterdir()]
        listening = Path("/proc/net/unix").read_text().splitlines()
        inode = next(line.split()[6] for line in listening if line.endswith(str(child.socket)))
        assert f"socket:[{inode}]" not in inherited
        assert not any(name.endswith(".beat") for name in inherited)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_forked_child_starts_its_own_once_it_has_something_to_show(spawn: Spawn) -> None:
    child = spawn()
    forked = int(
        child.run(
            "import os, time\n"
            "out = os.fork()\n"
            "if out == 0:\n"
            "    from vllmops.agent.hooks import vllm_objects as objects\n"
            "    class Scheduler: pass\n"
            "    held = Scheduler()\n"
            "    objects.track_object('scheduler', held)\n"
            "    time.sleep(600)\n"
            "    os._exit(0)"
        )
    )
    try:
        path = get_socket_directory(child.home) / f"{forked}.sock"
        until(path.exists)
        assert child.socket.exists()
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.root_only
def test_answers_nobody_else(spawn: Spawn) -> None:
    child = spawn()
    # Even where somebody opened the directory and the socket later on.
    for path in (child.home.parent, *reversed(child.socket.parents[:3]), child.socket):
        path.chmod(0o777)
    for above in child.home.parent.parents:
        if above != Path("/") and not mode(above) & 0o001:
            above.chmod(mode(above) | 0o011)
    ask = (
        "import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
        f"s.connect({str(child.socket)!r})\n"
        "try:\n"
        "    s.sendall(b'GET /hello HTTP/1.0\\r\\n\\r\\n'); print(s.recv(100))\n"
        "except ConnectionError as error: print(b'')"
    )
    command = [sys.executable, "-c", ask]
    other = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
    assert subprocess.check_output(command, timeout=60).startswith(b"b'HTTP/1.1 200")
    assert subprocess.check_output(other, timeout=60) == b"b''\n"


def test_many_callers_at_once_and_one_that_says_nothing(spawn: Spawn) -> None:
    child = spawn()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    try:
        for item in silent:
            item.connect(os.fspath(child.socket))
        assert open_agent(child.process, timeout_s=60).fetch_hello().pid == child.process.pid
    finally:
        for item in silent:
            item.close()


def test_bad_requests_are_told(spawn: Spawn) -> None:
    child = spawn()
    for request_line, body, status in (
        ("GET /nothing", b"", 404),
        ("POST /hello", b"", 404),
        ("POST /drain", b"{}", 400),
        ("POST /drain", b"\xff\xfe", 400),
        ("POST /drain", b'{"on": "yes"}', 400),
        ("DELETE /hello", b"", 501),
    ):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(60)
            caller.connect(os.fspath(child.socket))
            head = f"{request_line} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            caller.sendall(head.encode() + body)
            assert int(caller.recv(200).split()[1]) == status, (request_line, body)
        assert open_agent(child.process).fetch_hello().pid == child.process.pid
    assert "Traceback" not in child.end()


STARVE = """
import os, resource, threading
from vllmops.agent.transport import unix_socket as service
tries, take = [], service.AgentServer.get_request
service.AgentServer.get_request = lambda self: tries.append(1) or take(self)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
out = "starved"
"""
FEED = """
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
out = len(tries)
"""


def test_without_file_descriptors_it_waits_and_then_answers(spawn: Spawn) -> None:
    """``accept`` fails, and whoever calls stays there: trying again at once is a busy loop."""
    child = spawn()
    child.run(STARVE)
    with socket.socket(socket.AF_UNIX) as call:
        call.settimeout(60)
        call.connect(os.fspath(child.socket))
        call.sendall(b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: child.run("out = len(tries)") != "0")
        time.sleep(1)
        assert int(child.run(FEED)) < 100  # not thousands
        assert call.recv(100).startswith(b"HTTP/1.1 200")


BREAK = """
from vllmops.agent.transport import unix_socket as service
was = service.AgentServer.verify_request
def broken(*args):
    service.AgentServer.verify_request = was
    raise OSError(107, "Transport endpoint is not connected")
service.AgentServer.verify_request = broken
"""


def test_a_call_that_can_not_be_looked_at_ends_nothing(spawn: Spawn) -> None:
    """What the base class does not catch ended the thread, and the process was blind for ever."""
    child = spawn()
    child.run(BREAK)
    with socket.socket(socket.AF_UNIX) as call:
        call.connect(os.fspath(child.socket))
        time.sleep(1.5)
    assert open_agent(child.process).fetch_hello().pid == child.process.pid


def test_wishes_are_finite(spawn: Spawn) -> None:
    agent = open_agent(spawn().process)
    wishes = (
        ("/reset", b'{"drain_s":%s}'),
        ("/compare", b'{"apart_s":%s,"timeout_s":1}'),
        ("/compare", b'{"apart_s":0,"timeout_s":%s}'),
    )
    wrong = (b"null", b"-1", b"1e308", b"1e400", b"NaN", b'"1"')
    for (path, body), seconds in product(wishes, wrong):
        with pytest.raises(VllmopsError, match="answered 400"):
            agent.fetch_answer("POST", path, AgentAnswer, body % seconds)
