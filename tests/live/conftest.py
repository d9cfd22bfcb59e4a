"""Servers that live tests share: each starts once per session, when the first test wants it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import psutil
import pytest

from vllmops.collect.machine import shared_memory

from ..support import plug_ins
from ..support.commands import run_vllmops
from ..support.extent import EVERYTHING
from ..support.fleet import token_file
from ..support.ports import free_port
from ..support.versions import INSTALLED, RUN
from ..support.waiting import until
from .clients import LENGTH, MODEL, talkative

if TYPE_CHECKING:
    from .hangs import Prone

LIVE = Path(__file__).parent
HANG_S = 0 if EVERYTHING else 300  # seconds of a test with the servers that it starts; 0 for any
START_TIMEOUT_S = 600.0
SOAKED = (
    *("--env", "VLLM_SERVER_DEV_MODE=1"),  # which has /sleep and /wake_up
    *("--env", "VLLM_ENABLE_RESPONSES_API_STORE=1"),
)
SHM = Path("/dev/shm")
THREADS = threading.active_count()  # of pytest's


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)["data"]

    @property
    def error(self) -> Any:
        return json.loads(self.out)["errors"][0]


@dataclass(frozen=True)
class Cli:
    """``vllmops`` with a state directory of its own."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "VLLMOPS_HOME": str(self.home),
            "NO_COLOR": "1",
            # A model of a few megabytes needs no more, and there are many servers on few cores.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Ours stays in front of what is installed: it is the tree that is being tested.
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(self.home / "plug-ins"), os.environ.get("PYTHONPATH")))
            ),
        }

    def __call__(self, *words: str, timeout_s: float = START_TIMEOUT_S) -> Ran:
        """Run a command to its end: as a fork of this process, unless a test's threads run."""
        if threading.active_count() == THREADS:
            answer = run_vllmops(*words, env=self.environment, timeout_s=timeout_s)
            return Ran(answer.code, answer.out, answer.err)
        ran = subprocess.run(
            [sys.executable, "-m", "vllmops", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def begin(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command and do not wait for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "vllmops", *words], env=self.environment, **options
        )

    def serve(self, name: str, *words: str) -> Live:
        """Start a detached server and wait until it is ready."""
        # Two test processes have two homes, and could choose the same port in the same second.
        options = ("--detach", "--name", name, "--port", str(free_port()))
        try:
            ran = self("serve", *options, *words)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{error}\n{self('logs', name, '-n', '200').out}") from error
        assert ran.code == 0, ran.err
        return Live(self, name)


@dataclass(frozen=True)
class Live:
    """A server that runs."""

    cli: Cli
    name: str

    @property
    def row(self) -> dict[str, Any]:
        rows = self.cli("ps", "--all", "--json").data["instances"]
        return next(row for row in rows if row["name"] == self.name)

    @cached_property
    def url(self) -> str:
        return str(self.row["url"])

    @property
    def home(self) -> Path:
        return self.cli.home

    def pids(self) -> dict[str, int]:
        """The pid of each role that has one process."""
        return {process["role"]: process["pid"] for process in self.row["processes"]}

    def supervisor(self) -> int:
        """The pid of the supervisor."""
        command = f"vllmops.supervision.supervisor {self.name} "
        return next(
            process.pid
            for process in psutil.process_iter(["cmdline", "environ"])
            if command in " ".join(process.info["cmdline"] or [])
            and (process.info["environ"] or {}).get("VLLMOPS_HOME") == str(self.home)
        )

    def footprint(self) -> Footprint:
        pids = [process["pid"] for process in self.row["processes"]]
        # Semaphores, too, which their maker has mapped under another name.
        used = {name for pid in pids for name in shared_memory.find_used_segments(pid)}
        segments = {name for name in used if (SHM / name).exists()}
        return Footprint(pids, self.row["port"], segments)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "demo-text", "prompt": "The quick brown", "max_tokens": 1, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)


@dataclass(frozen=True)
class Footprint:
    """What a server takes of the machine."""

    pids: list[int]
    port: int | None
    segments: set[str]

    def list_leftovers(self) -> list[str]:
        """What is left of it."""
        found = [f"pid {pid}" for pid in self.pids if is_process_alive(pid)]
        found += [f"/dev/shm/{name}" for name in self.segments if (SHM / name).exists()]
        with socket.socket() as trial:
            if self.port and trial.connect_ex(("127.0.0.1", self.port)) == 0:
                found.append(f"port {self.port}")
        return found

    def wait_gone(self, timeout_s: float = 30) -> None:
        until(lambda: not self.list_leftovers(), timeout_s, self.list_leftovers)


def is_process_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Launched:
    """A process of ours that is to become a server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_up(self) -> None:
        until(self.is_healthy, START_TIMEOUT_S, self.log.read_text)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def launch(
    cli: Cli,
    log: Path,
    environment: dict[str, str],
    *words: str,
    before: Sequence[str] = (),
    demo: str = "vision",
) -> Launched:
    """Start a demo model as anybody does who knows nothing of vllmops.

    Args:
        cli: whose home has the model.
        log: for what the server says.
        environment: more of it.
        words: more arguments for vLLM.
        before: a command that runs the rest of its command line.
        demo: which model.
    """
    port = str(free_port())  # not one that `serve` would take meanwhile
    options = ("--demo", demo, "--port", port, "--dry-run", "--json", "--")
    plan = cli("serve", *options, *words).data
    command = plan["command"][plan["command"].index("serve") + 1 :]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *before,
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", *command),
            ],
            env={**cli.environment, **plan["environment"], **environment},
            stdout=file,
            stderr=file,
        )
    return Launched(process, plan["url"], log)


class Stock(Live):
    """A server that vllmops did not start."""

    @property
    def row(self) -> dict[str, Any]:
        rows = self.cli("ps", "--json").data["instances"]
        return next(row for row in rows if row["pid"] == int(self.name))


# What tests of several files share.
SHARED = ("vision_server", "text_pair", "hung_pair", "imported_vllm")
# Groups of many tests come first, as xdist has them by itself; these count as more than they have.
SLOW = {"test_lost": 16, "test_restart": 8}


def group_of(item: pytest.Item) -> str:
    """The name that tests have in common which use the same servers."""
    if marker := item.get_closest_marker("xdist_group"):
        return str(marker.args[0])
    used = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    shared = any(found[-1].scope == "module" for found in used.values())
    own = item.path.stem if shared else item.name.partition("[")[0]
    return next((name for name in SHARED if name in used), own)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Of several test processes one runs all tests of the servers that they share."""
    for item in items:
        # Of several markers xdist, which reads them in the hook, would make one more group.
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if LIVE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HANG_S))
    yield
    # Where pytest itself puts those of a fixture's parameter together, that is over now.
    sizes = Counter(map(group_of, items))
    places = {
        name: (-SLOW.get(name, size), place) for place, (name, size) in enumerate(sizes.items())
    }
    items.sort(key=lambda item: (places[group_of(item)], bool(item.get_closest_marker("ends"))))


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    # Not pytest's own directory: its path is too long for a Unix socket.
    home = Path(tempfile.mkdtemp(prefix="vllmops-"))
    made = Cli(home)
    # Test processes that run side by side build the demo models once.
    base = tmp_path_factory.getbasetemp()
    models = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    models.mkdir(mode=0o700, exist_ok=True)
    (home / "demo").symlink_to(models)
    plug_ins.lean(home / "plug-ins")
    try:
        yield made
    finally:
        for row in made("ps", "--json").data["instances"]:
            if row["name"]:
                made("stop", row["name"], "--force")
        shutil.rmtree(home, ignore_errors=True)


S = TypeVar("S")
T = TypeVar("T")


def side_by_side(start: Callable[[S], T], item: Sequence[S]) -> list[T]:
    """Start several things at once."""
    with ThreadPoolExecutor(len(item)) as pool:
        return list(pool.map(start, item))


PlugIn = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def plug_in(tmp_path_factory: pytest.TempPathFactory) -> PlugIn:
    """Makes a vLLM plug-in of a name and a module's text; its folder is for ``PYTHONPATH``."""

    def make(name: str, module: str) -> Path:
        folder = tmp_path_factory.mktemp("plug-in")
        plug_ins.lean(folder)
        plug_ins.write(folder, name, module)
        return folder

    return make


def code_of(cli: Cli, folder: Path) -> tuple[str, ...]:
    """Options for a server with the Python code of vLLM in a folder."""
    return ("--env", f"PYTHONPATH={folder}{os.pathsep}{cli.environment['PYTHONPATH']}")


@pytest.fixture
def server(cli: Cli, plug_in: PlugIn, request: pytest.FixtureRequest) -> Iterator[Live]:
    """A test's own server: what the marker ``serve`` says."""
    marker = request.node.get_closest_marker("serve")
    name, module = marker.kwargs.get("plug_in", ("", ""))
    place = ("--env", f"PYTHONPATH={plug_in(name, module)}") if name else ()
    made = cli.serve(f"own-{abs(hash(request.node.nodeid)) % 10**6}", *place, *marker.args)
    try:
        yield made
        lose(made, marker.kwargs["loses"])
    finally:
        cli("stop", made.name, "--force")


def lose(server: Live, role: str) -> None:
    """Kill one of a server's processes, or ``all``: that is told, and nothing of it is left."""
    footprint = server.footprint()
    if role == "all":
        lose_all(server, footprint)
        return
    assert {"api", "engine", "worker"} <= server.pids().keys()
    assert footprint.segments
    kill(server.pids()[role])
    until(lambda: server.row["state"] == "failed")
    assert footprint.list_leftovers() == []
    assert role in server.row["failure"].lower()
    shown = server.cli("status", server.name)
    assert shown.code == 5
    assert "failed" in shown.err


def lose_all(server: Live, footprint: Footprint) -> None:
    """Kill all at once: nothing is left but a segment that a process of somebody else's maps."""
    held = next(iter(footprint.segments))
    shared = SharedMemory(held, create=False)
    # vLLM and Python's resource tracker unlink what they can: killed at once, they leave it all.
    for pid in footprint.pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in footprint.pids:
        kill(pid)
    until(lambda: server.row["state"] == "failed")
    assert footprint.list_leftovers() == [f"/dev/shm/{held}"]
    shared.unlink()
    shared.close()


@pytest.fixture(scope="session")
def old_code(plug_in: PlugIn) -> Path:
    """A folder with the plug-in that puts vLLM's old code back, which hangs."""
    from .hangs import OLD  # it needs this module

    return plug_in("old_code", OLD)


@pytest.fixture(scope="session")
def hung_pair(
    cli: Cli, old_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prone, Live]]:
    """Servers with the old code: one without patches, with more defects; and one with patches."""
    from .hangs import ARGUMENTS, DEFECTS, FEW_IMAGES, OLD, prone

    place, modules = tmp_path_factory.mktemp("hangs"), {"old_code": OLD, **DEFECTS}
    with prone(cli, place, modules, *ARGUMENTS) as stock:
        try:
            patched = ("--demo", "vision", "--env", f"PYTHONPATH={old_code}", "--", *FEW_IMAGES)
            made = cli.serve("patched", *patched)
            stock.launched.wait_up()
            yield stock, made
        finally:
            cli("stop", "patched", "--force")


@pytest.fixture(scope="session")
def vision_server(cli: Cli) -> Live:
    """The demo vision model, default caches, an admin token, and what a soak wants."""
    admin = ("--admin-token", str(token_file(cli.home)))
    return cli.serve("vision", "--demo", "vision", *admin, *make_soak_options(cli))


@dataclass(frozen=True)
class Bundled:
    """A bundle, and the command that has written it."""

    path: Path
    ran: Ran


@pytest.fixture(scope="session")
def vision_bundle(vision_server: Live, tmp_path_factory: pytest.TempPathFactory) -> Bundled:
    """One of the vision server, a recording of its memory included; it takes a core 10 s."""
    path, target = tmp_path_factory.mktemp("bundle") / "b.tar.gz", ("-t", vision_server.name)
    words = ("--rounds", "2", "--load", "images", "--requests", "2", "--tolerance", "10G")
    vision_server.cli("memory", "record", *target, *words)
    # Many test processes share few cores.
    ran = vision_server.cli("bundle", *target, "-o", str(path), "--timeout", "180", "--json")
    assert ran.code == 0, ran.err
    return Bundled(path, ran)


@pytest.fixture(scope="session")
def imported_vllm() -> None:
    """For tests that use vLLM's code without a server: they run in one process, which imports it.

    That takes a core 10 s.
    """
    import_module("vllm.entrypoints.openai.responses.serving")


@pytest.fixture(scope="session", params=[INSTALLED, *(RUN if EVERYTHING else ())])
def text_pair(
    cli: Cli,
    tmp_path_factory: pytest.TempPathFactory,
    code: Callable[[str], Path],
    request: pytest.FixtureRequest,
) -> Iterator[Live]:
    """A demo text model that answers at length, with two API servers and the keys one and two."""
    shape = talkative(tmp_path_factory.mktemp("template"))
    old = () if request.param == INSTALLED else code_of(cli, code(request.param))
    names = ("--served-model-name", MODEL, "gpt-demo")  # the agents SDK compacts OpenAI's alone
    words = ("--api-server-count", "2", "--api-key", "one", "two", *LENGTH, *shape, *names)
    admin = ("--admin-token", str(token_file(cli.home)))
    made = cli.serve("pair", "--demo", "text", *admin, *old, "--", *words)
    try:
        yield made
    finally:
        cli("stop", made.name, "--force")


def make_soak_options(cli: Cli) -> tuple[str, ...]:
    """Options for a server with the routes that a soak wants, and a key for what clients carry."""
    return (*SOAKED, *make_keyring_options(cli, cli.home / "soaked.json"))


def make_keyring_options(cli: Cli, keyring: Path) -> tuple[str, ...]:
    """Options for servers with a keyring, which has one more key from now on."""
    ran = cli("keys", "add", "--keyring", str(keyring))
    assert ran.code == 0, ran.err
    return ("--keyring", str(keyring))
