"""What another user of the machine plants, claims or listens on: root does not fall for it.

These tests become other users, so they are root's.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import psutil
import pytest

from vllmops.bundle import parts
from vllmops.collect.agents import admin_token, agent_client, agent_files
from vllmops.collect.http import vllm_client
from vllmops.collect.machine import listeners, processes, shared_memory
from vllmops.collect.machine.processes import Process
from vllmops.collect.machine.server_address import make_unix_url
from vllmops.commands import serve
from vllmops.model import process_identity
from vllmops.model.roles import Role
from vllmops.observe.memory import load_generators
from vllmops.servers import interpreter, target_endpoint
from vllmops.servers.discovery import Server
from vllmops.servers.record import (
    InstanceFolder,
    InstanceRecord,
    InstanceState,
    list_instance_folders,
)
from vllmops.supervision import claimed_ports, launch
from vllmops.support.errors import ExitCode, VllmopsError
from vllmops.support.files import read_private_file
from vllmops.support.home import create_folder, require_safe_folder
from vllmops.support.home import resolve_home as state_home
from vllmops_responses.commands.keys import loaded_keys
from vllmops_responses.commands.keys.push import push_keyring
from vllmops_responses.keys import keyring_file
from vllmops_responses.keys.keyring import Key, KeyRing, KeyStatus, generate_secret

from .support.commands import TABLE
from .support.extent import sample_cases
from .support.ports import free_port
from .support.waiting import until

pytestmark = pytest.mark.root_only
NOBODY = 65534
SECRET = "sk-0123456789abcdef0123456789abcdef"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail what takes longer, though it waits in the kernel."""

    def raise_timeout(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def as_nobody() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs Python code as another user until the test ends; it has printed "up" by then."""
    children = []

    def start(code: str, *words: object) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-S", "-u", "-c", code, *map(str, words)],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate(timeout=60)


def refusal(act: Callable[[], object]) -> VllmopsError:
    with pytest.raises(VllmopsError) as caught:
        act()
    return caught.value


def unsafe(act: Callable[[], object], path: Path) -> VllmopsError:
    error = refusal(act)
    assert (error.code, error.exit_code) == ("home.unsafe", ExitCode.NOT_AUTHORISED)
    assert str(path) in error.message
    assert "VLLMOPS_HOME=/tmp" not in error.hint
    return error


# -- the state directory -----------------------------------------------------------------------


def plant_instance(folder: Path) -> None:
    """An instance that seems to run, and whose watch runs a command."""
    us = psutil.Process()
    record = InstanceRecord(
        name=folder.name,
        model="m",
        command=("touch", f"{folder}/hit"),
        environment={},
        directory="/",
        host="127.0.0.1",
        port=1,
        detached=True,
        created_at=0.0,
        started_at=us.create_time(),
        state=InstanceState.READY,
        session=os.getsid(0),
        processes=(
            Process(Role.OTHER, us.pid, process_identity.read_identity(us.pid).start_ticks),
        ),
        watch=("--exec", f"touch {folder}/hit"),
    )
    (folder / "instance.json").write_bytes(msgspec.json.encode(record))
    (folder / "instance.json").chmod(0o600)


@pytest.mark.parametrize("theirs", ["", "instances", "instances/evil"])
def test_an_instance_that_another_user_planted_is_not_adopted(
    vllmops: Any, home: Path, theirs: str
) -> None:
    folder = home / "instances" / "evil"
    folder.mkdir(parents=True)
    plant_instance(folder)
    for path in (home / theirs, *(home / theirs).rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    answers = [vllmops(*words, "--json") for words in (("ps",), ("restart", "evil"), ("doctor",))]
    assert not (folder / "lock").exists()
    assert not (folder / "supervisor.log").exists()
    if theirs == "instances/evil":  # the others are still to be seen
        ps, *rest = answers
        (fault,) = ps.data["faults"]
        assert (ps.code, fault["code"]) == (0, "home.unsafe")
        assert all(answer.code == 5 for answer in rest), rest
        return
    for answer in answers:
        assert (answer.code, answer.error["code"]) == (4, "home.unsafe")
        assert str(home / theirs) in answer.error["message"]
        assert "nobody" in answer.error["message"]


def test_a_file_that_another_user_owns_or_may_write_to_is_no_record(home: Path) -> None:
    folder = home / "instances" / "evil"
    folder.mkdir(parents=True)
    plant_instance(folder)
    assert InstanceFolder("evil").load_record()
    record = InstanceFolder("evil").record_file
    record.chmod(0o666)
    assert refusal(InstanceFolder("evil").load_record).code == "registry.unreadable"
    record.chmod(0o600)
    os.chown(record, NOBODY, NOBODY)
    assert refusal(InstanceFolder("evil").load_record).exit_code == ExitCode.NOT_AUTHORISED
    record.rename(folder / "real")
    os.chown(folder / "real", 0, 0)
    record.symlink_to(folder / "real")
    assert refusal(InstanceFolder("evil").load_record).code == "registry.unreadable"
    for name in ("instance.json", "lock"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    with within(60):
        assert refusal(InstanceFolder("evil").load_record).code == "registry.unreadable"
        assert not InstanceFolder("evil").is_supervised()


@pytest.mark.parametrize(
    ("mode", "hint"), [(0o775, "chmod g-w"), (0o777, "chmod 700"), (0o702, "chmod 700")]
)
@pytest.mark.parametrize("below", ["", "instances"])
def test_a_folder_that_others_may_write_to(home: Path, below: str, mode: int, hint: str) -> None:
    path = home / below
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    assert f"{hint} {path}" in unsafe(lambda: list(list_instance_folders()), path).hint
    path.chmod(0o755)
    assert list(list_instance_folders()) == []


def test_instances_folder_in_a_sticky_home_must_be_private_and_own(home: Path) -> None:
    home.chmod(0o1777)
    assert state_home() == home
    (home / "instances").mkdir(mode=0o700)
    (home / "instances").chmod(0o1777)
    unsafe(lambda: list(list_instance_folders()), home / "instances")
    (home / "instances").chmod(0o700)
    os.chown(home / "instances", NOBODY, NOBODY)
    unsafe(lambda: list(list_instance_folders()), home / "instances")


def test_a_folder_above_that_lets_others_exchange_it(tmp_path: Path) -> None:
    path = tmp_path / "above" / "home"
    path.mkdir(parents=True)
    for mode in (0o777, 0o775):
        path.parent.chmod(mode)
        error = unsafe(lambda: require_safe_folder(path), path.parent)
        assert f"{path.parent}" in error.hint
    path.parent.chmod(0o1777)
    assert require_safe_folder(path) == path
    os.chown(path.parent, NOBODY, NOBODY)
    path.parent.chmod(0o755)
    unsafe(lambda: require_safe_folder(path), path.parent)


def test_links(tmp_path: Path) -> None:
    shared, real = tmp_path / "shared", tmp_path / "real"
    real.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "home"
    link.symlink_to("../real")
    assert require_safe_folder(link) == link
    assert require_safe_folder(link / "instances") == link / "instances"
    real.chmod(0o777)
    unsafe(lambda: require_safe_folder(link), link)
    real.chmod(0o700)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    unsafe(lambda: require_safe_folder(link), link)
    (tmp_path / "round").symlink_to("round")
    assert require_safe_folder(tmp_path / "round")  # whoever opens it is told


def test_created_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        path = create_folder(tmp_path / "state" / "vllmops" / "instances")
    finally:
        os.umask(before)
    for item in (path, path.parent, path.parent.parent):
        assert item.stat().st_mode & 0o777 == 0o700


def test_a_user_who_is_not_root(home: Path, vllmops: Any) -> None:
    home.chmod(0o755)
    answer = vllmops("ps", "--json", uid=NOBODY)
    assert (answer.code, answer.error["code"]) == (4, "home.unsafe")
    assert "root" in answer.error["message"]
    os.chown(home, NOBODY, NOBODY)
    assert vllmops("ps", "--json", uid=NOBODY).code == 0


def test_a_server_of_another_user_is_not_stopped(
    lab: Any, home: Path, vllmops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = lab.stranger()
    # That user can't tell whose test a process is of.
    monkeypatch.setattr(processes, "read_process_table", TABLE)
    os.chown(home, NOBODY, NOBODY)
    home.chmod(0o755)
    answer = vllmops("stop", str(server.pid), "--force", "--json", uid=NOBODY)
    assert (answer.code, answer.error["code"]) == (4, "target.other-user"), answer
    assert f"sudo vllmops stop {server.pid}" in answer.error["hint"]
    os.chown(home, 0, 0)
    assert server.poll() is None
    assert vllmops("stop", str(server.pid), "--force").code == 0


def test_an_agent_makes_nothing_in_a_home_of_another_user(spawn: Any, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    child = spawn(home=theirs)
    assert list(theirs.iterdir()) == []
    assert "belongs to nobody" in child.end()


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    path.chmod(0o600)
    assert read_private_file(path, None, 100) == bytes(100)
    with pytest.raises(OSError, match="more than 99"):
        read_private_file(path, None, 99)


# -- agents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", sample_cases(["fifo", "theirs", "huge", "link", "lax", "device"], 2)
)
def test_a_heartbeat_that_is_none(spawn: Any, tmp_path: Path, what: str) -> None:
    child = spawn()
    child.send("import os; os.kill(os.getpid(), 19)")  # stopped, so that it does not beat on
    seen = psutil.Process(child.process.pid)
    until(lambda: seen.status() == psutil.STATUS_STOPPED)
    kept = child.beat.read_bytes()
    assert agent_files.read_heartbeat(child.process)
    child.beat.unlink()
    if what == "fifo":
        os.mkfifo(child.beat)
    elif what == "device":
        os.mknod(child.beat, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    elif what == "link":
        (tmp_path / "elsewhere").write_bytes(kept)
        child.beat.symlink_to(tmp_path / "elsewhere")
    else:
        child.beat.write_bytes(kept + (b" " * 10**6 if what == "huge" else b""))
        child.beat.chmod(0o666 if what == "lax" else 0o600)
        if what == "theirs":
            os.chown(child.beat, NOBODY, NOBODY)
    with within(60):
        assert agent_files.read_heartbeat(child.process) is None


LISTEN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("up")
sys.stdin.read()
"""


def test_a_socket_that_another_user_listens_on(
    spawn: Any, as_nobody: Callable[..., "subprocess.Popen[str]"]
) -> None:
    # As if it were exchanged between the look at its owner and the connection.
    child = spawn(VLLMOPS_DISABLE="1")
    folder = child.socket.parent
    folder.mkdir(parents=True)
    for path in (folder, *folder.parents):
        if path.owner() == "root" and path.is_relative_to(tempfile.gettempdir() + "/"):
            path.chmod(0o755)
    os.chown(folder, NOBODY, NOBODY)
    as_nobody(LISTEN, child.socket)
    folder.chmod(0o700)
    for path in (folder, child.socket):
        os.chown(path, 0, 0)
    child.socket.chmod(0o600)
    error = refusal(lambda: agent_client.open_agent(child.process))
    assert (error.code, error.exit_code) == ("agent.unsafe", ExitCode.NOT_AUTHORISED)
    assert "nobody" in error.message


TRICKLE = """
import time
from vllmops.agent.transport import unix_socket as service
asked = []
def trickle(self):
    asked.append(self.path)
    self.send_response(200)
    self.send_header('Content-Length', '1000000')
    self.end_headers()
    while True:
        self.wfile.write(b' ')
        self.wfile.flush()
        time.sleep(0.1)
service.AgentHandler.do_GET = trickle
out = ''
"""


def test_an_answer_that_trickles_in_has_an_end(spawn: Any) -> None:
    child = spawn()
    child.run(TRICKLE)
    with within(60):
        assert (
            refusal(lambda: agent_client.open_agent(child.process, timeout_s=1)).code
            == "agent.timeout"
        )


def test_an_agent_that_trickles_is_not_asked_for_each_part_of_a_screen(
    spawn: Any, vllmops: Any, home: Path
) -> None:
    child = spawn("VLLM::EngineCore", Role.ENGINE, home=home)
    child.run(TRICKLE)
    answer = vllmops("status", str(child.process.pid), "--json")
    assert answer.data["instance"]["processes"][0]["agent"] == "timeout"
    assert int(child.run("out = str(len(asked))")) <= 3  # for the list, and once for all parts


def test_a_directory_that_is_lax_is_not_to_be_removed(spawn: Any) -> None:
    child = spawn()
    child.socket.parent.chmod(0o755)
    error = refusal(lambda: agent_client.open_agent(child.process))
    assert f"chmod 700 {child.socket.parent}" in error.hint
    assert "rm " not in error.hint


def test_root_reaches_the_agent_of_another_users_process(home: Path) -> None:
    home.chmod(0o755)
    theirs = home / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "agent" / "child.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLMOPS_HOME": str(theirs)},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout
        assert child.stdout.readline() == "'up'\n"
        process = Process(
            Role.API, child.pid, process_identity.read_identity(child.pid).start_ticks
        )
        told, pulse = (
            agent_client.open_agent(process, timeout_s=60).fetch_hello(),
            agent_files.read_heartbeat(process),
        )
        child.kill()
    assert told.pid == child.pid
    assert pulse


def test_root_in_the_environment_of_another_user(vllmops: Any, tmp_path: Path) -> None:
    # As some ways to become root leave it.
    os.chown(tmp_path, NOBODY, NOBODY)
    kept = {"VLLMOPS_HOME": "", "XDG_STATE_HOME": "", "HOME": str(tmp_path)}
    answer = vllmops("ps", "--json", env=kept)
    assert (answer.code, answer.error["code"]) == (4, "home.unsafe")
    assert f"{tmp_path}, on the way to {tmp_path}/.local" in answer.error["message"]
    assert "VLLMOPS_HOME=/root/" in answer.error["hint"]
    assert list(tmp_path.iterdir()) == []


# -- keys --------------------------------------------------------------------------------------

SERVE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
got = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        got.append(self.headers.get("authorization"))
        self.send_response(401)
        self.end_headers()
    do_POST = do_GET
    def log_message(self, *_): pass
server = ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler)
import threading
threading.Thread(target=server.serve_forever, daemon=True).start()
print("up")
sys.stdin.readline()
print(json.dumps(got))
sys.stdin.read()
"""


def read_received_keys(server: "subprocess.Popen[str]") -> list[str | None]:
    """The keys that a server was sent."""
    assert server.stdin
    assert server.stdout
    server.stdin.write("\n")
    server.stdin.flush()
    found: list[str | None] = msgspec.json.decode(server.stdout.readline())
    return found


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(("bound", "host"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost")])
def test_no_key_goes_to_the_process_of_another_user(
    as_nobody: Callable[..., "subprocess.Popen[str]"],
    vllmops: Any,
    monkeypatch: pytest.MonkeyPatch,
    port: int,
    bound: str,
    host: str,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    theirs = as_nobody(SERVE, bound, port)
    url = f"http://{host}:{port}"
    bird = vllm_client.request_one_token(url, 60.0)
    assert bird.outcome == "unable"
    assert "nobody" in bird.detail
    answer = vllmops("responses", "list", "-t", url, "--json")
    assert (answer.code, answer.error["code"]) == (4, "responses.not-authorised")
    assert "was not sent" in answer.error["message"]
    server = Server(name="s", processes=(), host=host, port=port)
    error = refusal(
        lambda: load_generators.build_load("text", server, requests=1, inputs=1, seed=0)
    )
    assert (error.code, "was not sent" in error.message) == ("load.not-authorised", True)
    place = target_endpoint.resolve_endpoint(url)
    error = refusal(lambda: push_keyring(place, SECRET, KeyRing()))
    assert (error.code, error.exit_code) == ("admin.other-user", ExitCode.NOT_AUTHORISED)
    found = read_received_keys(theirs)
    assert found
    assert set(found) == {None}


def test_ones_own_server_and_roots_get_the_key_and_no_other(
    monkeypatch: pytest.MonkeyPatch, listener: int
) -> None:
    url = f"http://127.0.0.1:{listener}"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert vllm_client.build_api_key_headers(url) == ({}, "")
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    assert vllm_client.build_api_key_headers(url) == ({"Authorization": "Bearer mine"}, "")
    ask = (
        "from vllmops.collect.http import vllm_client as http; "
        f"print(http.build_api_key_headers({url!r}).headers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Bearer mine" in done.stdout


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_key_follows_a_redirect(
    vllmops: Any, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The server that is asked may be one's own, and name another host."""
    asked: dict[int, list[str | None]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            port = self.server.server_port  # type: ignore[attr-defined]
            asked.setdefault(port, []).append(self.headers.get("authorization"))
            self.send_response(status)
            self.send_header("location", f"http://localhost:{other.server_port}{self.path}")
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as first,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other,
    ):
        for server in (first, other):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{first.server_port}"
        answer = vllmops("responses", "list", "-t", url, "--json")
        assert f"answered {status}" in answer.error["message"]
        assert vllm_client.request_one_token(url, 60.0).outcome == "refused"
        refusal(lambda: push_keyring(target_endpoint.resolve_endpoint(url), SECRET, KeyRing()))
        for server in (first, other):
            server.shutdown()
    assert set(asked) == {first.server_port}
    assert f"Bearer {SECRET}" in asked[first.server_port]


def test_no_key_is_sent_to_an_unknown_listener(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not listeners.explain_distrust(
        f"http://127.0.0.1:{port}"
    )  # there is nobody to send it to
    monkeypatch.setattr(
        listeners, "is_port_open", lambda *_: True
    )  # in another network namespace, say
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "127.9.9.9"):
        assert listeners.explain_distrust(f"http://{host}:{port}"), host
    assert not listeners.explain_distrust("http://192.0.2.1:8000")  # another machine


def test_a_listener_of_version_six_counts_too(
    as_nobody: Callable[..., "subprocess.Popen[str]"], port: int
) -> None:
    code = SERVE.replace("ThreadingHTTPServer((", "V6((").replace(
        "server = V6", "class V6(ThreadingHTTPServer): address_family = 10\nserver = V6"
    )
    as_nobody(code, "::", port)
    assert "nobody" in listeners.explain_distrust(f"http://127.0.0.1:{port}")


def test_no_key_goes_to_a_unix_socket_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm_client.KEY, SECRET)
    path = tmp_path / "A b.sock"
    url = make_unix_url(str(path))
    assert vllm_client.build_api_key_headers(url).headers  # there is nobody to send it to
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert vllm_client.build_api_key_headers(url).headers
        os.chown(path, NOBODY, NOBODY)
        assert vllm_client.build_api_key_headers(url) == ({}, f"{path} belongs to nobody")


# -- ports -------------------------------------------------------------------------------------

SQUAT = """
import socket, sys
held = []
for name in sys.argv[2:]:
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + name)
    if sys.argv[1] == "listen":
        held[-1].listen(0)
print("up")
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["listen", "bind"])
def test_a_name_that_another_user_claims_keeps_no_port(
    as_nobody: Callable[..., "subprocess.Popen[str]"], port: int, how: str
) -> None:
    names = (f"vllmops-port-{port}", f"vllmops-port-{port}-of-0")
    as_nobody(SQUAT, how, *names)
    with within(60):
        for _ in range(3):  # a queue that is full keeps nobody waiting
            held = claimed_ports.claim_port(port)
            assert held is not None
            os.close(held)
        # Whose queue is full can't be asked who it is.
        assert claimed_ports.find_other_claimant(port) in {"user nobody", "another user"}


@pytest.mark.usefixtures("home")
def test_a_port_that_another_user_claims_is_passed_over(
    as_nobody: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "127.0.0.9"  # no other test's, so no port of it becomes free meanwhile
    first = launch.find_free_port(host, set())
    second = launch.find_free_port(host, {first})
    squat = SQUAT.replace("listen(0)", "listen(9)")
    as_nobody(squat, "listen", *(f"vllmops-port-{port}-of-0" for port in (first, second)))
    monkeypatch.setattr(launch, "FIRST_PORT", first)
    reserved = launch.reserve_instance(launch.LaunchOptions("M", host=host, name="a"))
    lines = list(serve.describe_port_claims(reserved))
    own = reserved.record.port
    assert own not in {first, second}
    which = f"2 ports from {first} to {second} are claimed by user nobody"
    assert lines == [f"{which}; using {own}"]
    # Of one alone its number is said.
    monkeypatch.setattr(launch, "FIRST_PORT", second)
    reserved = launch.reserve_instance(launch.LaunchOptions("M", host=host, name="d"))
    [line] = serve.describe_port_claims(reserved)
    assert line == f"port {second} is claimed by user nobody; using {reserved.record.port}"
    monkeypatch.setattr(launch, "FIRST_PORT", first)
    # Asked for by its number it is used, and where there is no other.
    monkeypatch.setattr(launch, "LAST_PORT", first)
    for order in (
        launch.LaunchOptions("M", host=host, name="b"),
        launch.LaunchOptions("M", host=host, name="c", port=second),
    ):
        reserved = launch.reserve_instance(order)
        assert reserved.record.port == (order.port or first)
        [line] = serve.describe_port_claims(reserved)
        assert line.startswith(f"port {reserved.record.port} is claimed by user nobody, and used")


def test_a_process_of_another_user_that_cannot_read_a_keyring_follows_none(
    as_nobody: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """It may only look like a server, and never answer."""
    child = as_nobody("print('up'); input()")
    ring = tmp_path / "keyring.json"
    assert loaded_keys.can_read_keyring(child.pid, ring)  # nobody knows yet
    ring.touch(0o600)
    assert not loaded_keys.can_read_keyring(child.pid, ring)
    assert loaded_keys.can_read_keyring(os.getpid(), ring)
    ring.chmod(0o640)  # by a group that it may be of
    assert loaded_keys.can_read_keyring(child.pid, ring)


def test_a_claim_of_ones_own_is_found_however_often_it_is_asked_for(port: int) -> None:
    held = claimed_ports.claim_port(port)
    assert held is not None
    assert not claimed_ports.find_other_claimant(port)
    for _ in range(200):
        assert claimed_ports.claim_port(port) is None
    os.close(held)
    held = claimed_ports.claim_port(port)
    assert held is not None
    os.close(held)


# -- what root runs, reads and removes ------------------------------------------------------------


def server_of(child: "subprocess.Popen[str]") -> Server:
    started = process_identity.read_identity(child.pid).start_ticks
    return Server(name=None, processes=(Process(Role.API, child.pid, started),))


def test_the_interpreter_of_a_process_that_was_given_roots_rights_does_not_run_as_root() -> None:
    # As a program with the set-user-id bit has them; its environment is another user's.
    code = "import os, sys; os.setresuid(65534, 0, 0); print('up'); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-u", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        owner = interpreter.find_interpreter(server_of(child)).owner
        child.kill()
    assert owner
    assert owner[0] == NOBODY


def test_output_of_a_server_interpreter_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter, "OUTPUT_BYTES", 1000)
    python = interpreter.Interpreter(sys.executable, sys.executable, os.environ, "/")
    run = interpreter.InterpreterRun(python, ("-c", "print('x' * 100_000)"))
    assert run.wait_for_output(time.monotonic() + 60) == "x" * 1000


POINT = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_PATH), 2)
os.dup2(2, 1) if sys.argv[2:] else None
print("up")
sys.stdin.read()
"""


def test_a_bundle_holds_no_file_that_the_server_could_not_read(
    as_nobody: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    secret = Path(f"/etc/vllmops-test-{os.getpid()}")  # below folders that anybody may search
    secret.write_text("root's own\n")
    secret.chmod(0o600)
    try:
        child = as_nobody(POINT, secret)
        assert os.readlink(f"/proc/{child.pid}/fd/2") == str(secret)
        assert refusal(lambda: parts.read_server_log(server_of(child))).code == "bundle.no-log"
    finally:
        secret.unlink()


def test_a_segment_behind_a_link_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    link = shared_memory.SHM / f"vllmops-test-{os.getpid()}"
    link.symlink_to(tmp_path)
    try:
        assert (
            shared_memory.remove_unused_segments([f"{link.name}/file", f"../..{tmp_path}/file"])
            == []
        )
    finally:
        link.unlink()
    assert (tmp_path / "file").exists()


def test_another_user_gets_no_word_with_a_supervisor(lab: Any) -> None:
    record = lab.serve("a")
    folder = InstanceFolder("a")
    for path in (lab.home, folder.path.parent, folder.path):
        path.chmod(0o755)
    folder.control_socket.chmod(0o777)
    ask = (
        "import socket\n"
        "control = socket.socket(socket.AF_UNIX)\n"
        f"control.connect({str(folder.control_socket)!r})\n"
        "try:\n"
        "    control.sendall(b'{\"stop\": 0}\\n')\n"
        "    print(control.recv(10))\n"
        "except OSError: print(b'')\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", ask],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "b''\n"
    time.sleep(0.6)
    assert lab.state("a") == "ready"
    assert psutil.pid_exists(record.session)


def test_the_admin_token_is_no_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with within(60):
        assert (
            refusal(lambda: admin_token.read_admin_token(tmp_path / "token")).code == "keys.unsafe"
        )


def test_a_bundle_opens_no_device_that_a_server_names(tmp_path: Path, home: Path) -> None:
    # As a FIFO, which shows that somebody opened it: who waits to write into it goes on.
    for name in ("ring", "token", "configuration"):
        path = tmp_path / name
        os.mkfifo(path, 0o600)
        writer = threading.Thread(target=path.open, args=("wb",), daemon=True)
        writer.start()
        time.sleep(0.1)
        place = {name: str(path)}
        given = [place.get(one) for one in ("ring", "token", "configuration")]
        assert list(parts.read_file_secrets(*given)) == []
        writer.join(0.2)
        assert writer.is_alive(), name

        def let_go(writer: threading.Thread = writer, path: Path = path) -> bool:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            writer.join(0.1)
            return not writer.is_alive()

        until(let_go)  # it may not wait yet


def test_the_secrets_in_a_servers_files_are_known_to_root(tmp_path: Path, home: Path) -> None:
    ring, token = tmp_path / "ring", tmp_path / "token"
    secret = generate_secret()
    ring.write_bytes(
        keyring_file.encode_keyring(KeyRing(keys=(Key.from_secret(secret, KeyStatus.NEXT),)))
    )
    token.write_text("t" * 40 + "\n")
    for path in (ring, token):
        path.chmod(0o600)
        os.chown(path, NOBODY, NOBODY)
    known = set(parts.read_file_secrets(str(ring), str(token), None))
    assert {"t" * 40, secret.reveal().hex()} <= known
