"""What tests of several folders need: real processes, and a state directory of their own."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import psutil
import pytest

from vllmops import app
from vllmops.host import processes
from vllmops.host.processes import Process, Role, Seen, alive
from vllmops.instances import launch, takedown
from vllmops.instances.record import Folder, Record
from vllmops.protocol import identity
from vllmops.vllm_api.http import healthy

from .support.databases import Server, shared
from .support.waiting import until

# What commands import late: a fork that has it starts in a third of the time. And a user who may
# not read this Python's library would not find it.
for late in (
    *("rich.emoji", "rich.live", "rich.markdown", "rich.markup", "rich.panel", "rich.pretty"),
    *("rich.progress", "rich.table", "rich.traceback", "typer.rich_utils"),
    *("vllmops.agent.patches.registry", "vllmops.commands.stacks.explanation"),
    *(f"vllmops.commands.{entry.module.partition(':')[0]}" for entry in app.COMMANDS.values()),
):
    import_module(late)

hypothesis.settings.register_profile("vllmops", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("vllmops")

# Started in the background of a script, or by nohup, we ignore them, and our children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CHILD = Path(__file__).with_name("agent") / "child.py"
STANDIN = Path(__file__).with_name("instances") / "standin.py"
STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Child:
    """A process that runs the agent, and any code it is sent."""

    popen: subprocess.Popen[str]
    process: Process
    home: Path

    @property
    def socket(self) -> Path:
        return self.home / "agents" / f"{self.process.pid}.sock"

    @property
    def beat(self) -> Path:
        return self.socket.with_suffix(".beat")

    def send(self, code: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(repr(code) + "\n")
        self.popen.stdin.flush()

    def run(self, code: str) -> str:
        """Run code there; what it left in ``out``."""
        self.send(code)
        assert self.popen.stdout is not None
        answer: str = eval(self.popen.stdout.readline())
        assert not answer.startswith("Traceback"), answer
        return answer

    def end(self) -> str:
        """End it in order; what it logged."""
        return self.popen.communicate(timeout=20)[1]


Spawn = Callable[..., Child]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Starts processes that load the agent as vLLM would, and kills them at the end.

    ``title`` is what the process table shows, ``role`` what the tests call it, ``home`` its
    ``VLLMOPS_HOME``; further words are environment variables.
    """
    children = []

    def start(
        title: str = "python", role: Role = Role.API, home: Path | None = None, **env: str
    ) -> Child:
        home = tmp_path / "home" if home is None else home
        popen = subprocess.Popen(
            [title, str(CHILD)],
            executable=sys.executable,
            # A title in place of the program's name hides its library from the interpreter.
            env={
                **os.environ,
                "PYTHONHOME": sys.base_prefix,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "VLLMOPS_HOME": str(home),
                **env,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(popen)
        assert popen.stdout is not None
        assert popen.stdout.readline() == "'up'\n"
        created = identity.of(popen.pid).start_ticks
        return Child(popen, Process(role, popen.pid, created), home)

    yield start
    for popen in children:
        popen.kill()
        popen.wait(10)
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def envelope(self) -> Any:
        return json.loads(self.out)

    @property
    def data(self) -> Any:
        return self.envelope["data"]

    @property
    def error(self) -> Any:
        (error,) = self.envelope["errors"]
        assert self.envelope["exit_code"] == self.code
        return error


Vllmops = Callable[..., Answer]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory with a short path; what was started with it is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="vo-", dir="/tmp", ignore_cleanup_errors=True) as name:
        place = Path(name)
        for variable in ("VLLMOPS_TARGET", "VLLMOPS_DEBUG", "VLLM_PLUGINS", "COLUMNS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("VLLMOPS_HOME", name)
        table = processes.table

        def ours() -> processes.Table:
            return {pid: seen for pid, seen in table().items() if not foreign(seen, place)}

        # Other servers may run on this machine, and this user's ports be theirs.
        monkeypatch.setattr(processes, "table", ours)
        first = 20000 + os.getpid() % 200 * 100
        monkeypatch.setattr(launch, "FIRST_PORT", first)
        monkeypatch.setattr(launch, "LAST_PORT", first + 99)
        yield place
        while left := [pid for pid in psutil.pids() if in_home(pid, place)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for segment in Path("/dev/shm").glob(f"*_{place.name}_*"):
            segment.unlink()


def foreign(seen: Seen, home: Path) -> bool:
    vllm = processes.titled(seen.words) or processes.serve_arguments(seen.words) is not None
    return bool(vllm) and not in_home(seen.pid, home)


def in_home(pid: int, home: Path) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return pid != os.getpid() and f"VLLMOPS_HOME={home}".encode() in environment


@pytest.fixture
def vllmops(home: Path) -> Vllmops:
    """Runs a command in a child process: ``vllmops("ps", "--json")``.

    A fork of this process has the imports done and the fixtures' view of the process table.
    Options: ``columns`` for a terminal of that width as its output, ``uid``, ``env`` to add,
    ``before`` to call in the child before anything else of ours.
    """

    def run(
        *words: str,
        columns: int | None = None,
        uid: int | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
        before: Callable[[], object] = lambda: None,
    ) -> Answer:
        with tempfile.TemporaryFile() as err:
            if columns is not None:
                out, theirs = pty.openpty()
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            else:
                out, theirs = os.pipe()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                os.close(out)
                become(
                    words,
                    theirs,
                    err.fileno() if columns is None else theirs,
                    uid,
                    env or {},
                    before,
                )
            os.close(theirs)
            said = read(out, pid, timeout_s)
            _, status = os.waitpid(pid, 0)
            os.close(out)
            err.seek(0)
            code = os.waitstatus_to_exitcode(status)
            text = said.decode(errors="replace")
            if columns is not None:  # in a pipe there must be none
                text = STYLE.sub("", text.replace("\r\n", "\n"))
            return Answer(code, text, err.read().decode(errors="replace"))

    return run


def become(
    words: tuple[str, ...],
    out: int,
    err: int,
    uid: int | None,
    env: dict[str, str],
    before: Callable[[], object],
) -> None:
    """Be the command; never returns."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 100)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        os.environ.update(env)
        sys.argv = ["vllmops", *words]
        before()
        try:
            app.main()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        sys.stdout.flush()
    finally:
        os._exit(code)


def read(descriptor: int, pid: int, timeout_s: float) -> bytes:
    """All it writes; one that takes too long is killed, and the test fails."""
    deadline = time.monotonic() + timeout_s
    os.set_blocking(descriptor, False)
    said = b""
    while time.monotonic() < deadline:
        try:
            added = os.read(descriptor, 65536)
            if not added:
                return said
            said += added
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:  # a terminal's way to say that the other end is closed
            return said
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"no end after {timeout_s} s; so far: {said.decode()}")


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH whose package ``vllm`` is `instances/standin.py`."""
    place = tmp_path_factory.mktemp("standin")
    package = place / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(STANDIN, package / "main.py")
    return place


@pytest.fixture
def model(home: Path) -> Path:
    """A directory that passes for a model."""
    place = home / "models" / "tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    return place


class Stranger(subprocess.Popen[bytes]):
    port: int


@dataclass
class Lab:
    """Instances of the stand-in for vLLM, under real supervisors."""

    home: Path
    model: Path
    vllmops: Vllmops
    foreground: list[subprocess.Popen[str]] = field(default_factory=list)
    strangers: list[Stranger] = field(default_factory=list)

    def serve(self, name: str, *words: str, **play: object) -> Record:
        """Serve one, detached, until it is ready."""
        answer = self.vllmops(*self.words(name, "--detach", "--json", *words, **play))
        assert answer.code == 0, answer
        until(lambda: len(self.record(name).processes) >= 3)
        return self.record(name)

    def words(self, name: str, *words: str, **play: object) -> tuple[str, ...]:
        env = ("--env", f"STANDIN={json.dumps(play)}")
        return ("serve", str(self.model), "--name", name, *env, *words)

    def starting(self, name: str, *words: str, **play: object) -> None:
        """Serve one in the foreground, and do not wait for it."""
        port = str(self.free_port())
        popen = subprocess.Popen(
            [sys.executable, "-m", "vllmops", *self.words(name, "--port", port, *words, **play)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.foreground.append(popen)
        until(lambda: self.state(name) and self.record(name).processes)

    def hold(self, name: str, *words: str, **play: object) -> subprocess.Popen[str]:
        """Serve one in the foreground, as a program of its own, until it is ready."""
        self.starting(name, *words, **play)
        popen = self.foreground[-1]
        until(lambda: self.state(name) == "ready" or popen.poll() is not None)
        return popen

    def stranger(self, **play: object) -> Stranger:
        """A server that vllmops did not start, serving."""
        port = self.free_port()
        server = self.stranger_with("--port", str(port), **play)
        server.port = port
        until(lambda: healthy(f"http://127.0.0.1:{port}"))
        return server

    def stranger_with(self, *words: str, **play: object) -> Stranger:
        """A server that vllmops did not start, with these arguments."""
        command = [sys.executable, "-m", "vllmops.agent.launch", "serve", str(self.model)]
        server = Stranger(
            [*command, *words],
            env={**os.environ, "STANDIN": json.dumps(play)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.strangers.append(server)
        # A parent that collects it at once, as a shell does.
        threading.Thread(target=server.wait, daemon=True).start()
        return server

    def pid_of(self, tree: Iterable[Process], role: str) -> int:
        return next(process.pid for process in tree if process.role == role)

    def bind_error(self, port: int) -> OSError | None:
        return launch.bind("127.0.0.1", port)

    def cut_off(self, url: str) -> None:
        """Send a request that gets no answer."""
        with pytest.raises(httpx.TransportError):
            httpx.get(url, timeout=60)

    def free_port(self) -> int:
        return launch.free_port("127.0.0.1", set())

    def state(self, name: str) -> str | None:
        record = Folder(name).read()
        return record.state if record else None

    def record(self, name: str) -> Record:
        record = Folder(name).read()
        assert record
        return record

    def process(self, name: str, role: str) -> Process:
        return next(p for p in self.record(name).processes if p.role == role)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def supervisor(self, name: str) -> int:
        """The pid of an instance's supervisor."""
        ending = ["-m", "vllmops.instances.supervisor", name]
        (pid,) = [
            p.pid
            for p in psutil.process_iter(["cmdline"])
            if (p.info["cmdline"] or [])[2:5] == ending and in_home(p.pid, self.home)
        ]
        return pid

    def kill_supervisor(self, name: str) -> None:
        self.kill(self.supervisor(name))
        until(lambda: not Folder(name).supervised())

    def nothing_left(self, of: Record) -> None:
        """Of that server there is no process, no listener, no segment; `of` it had them all."""
        assert len(of.processes) >= 3
        assert of.session
        assert not [p for p in of.processes if alive(p)]
        assert not takedown.members(processes.table(), of.session)
        assert of.port is None or launch.bind("127.0.0.1", of.port) is None
        assert of.segments
        assert not [name for name in of.segments if Path("/dev/shm", name).exists()]


@pytest.fixture
def lab(
    home: Path, model: Path, standin: Path, vllmops: Vllmops, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """`Lab`, with the stand-in for vLLM installed."""
    monkeypatch.syspath_prepend(str(standin))
    monkeypatch.setenv("PYTHONPATH", str(standin), prepend=os.pathsep)
    lab = Lab(home, model, vllmops)
    yield lab
    for popen in lab.foreground:
        popen.kill()
        popen.communicate(timeout=10)
    for server in lab.strangers:
        server.kill()
        server.wait(10)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def full_disk(home: Path) -> Iterator[Callable[[], None]]:
    """The state directory on a disk of 256 KiB; what it yields fills the disk."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(home)], check=True)

    def fill() -> None:
        with contextlib.suppress(OSError), (home / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 512)

    yield fill
    subprocess.run(["umount", "--lazy", str(home)], check=True)


@pytest.fixture(scope="session")
def databases(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tuple[Path, Path], dict[str, Server]]]:
    """What all workers of a run share; see `shared`."""
    root = tmp_path_factory.getbasetemp()
    with shared(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) as found:
        yield found


@pytest.fixture(scope="session")
def postgres_parts(databases: Any) -> tuple[Path, Path]:
    """Where PostgreSQL's programs are, and a directory of data to copy."""
    parts: tuple[Path, Path] = databases[0]
    return parts


@pytest.fixture(scope="session")
def shared_servers(databases: Any) -> dict[str, Server]:
    """A server of each kind, which no test may kill."""
    servers: dict[str, Server] = databases[1]
    return servers


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that several processes can use; nothing is in it yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/responses.db"
    server: Server = request.getfixturevalue("shared_servers")[request.param]
    return f"{server.url}?namespace=t{time.time_ns()}"
