"""What tests of several folders need: real processes, and a state directory of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from vllmops.collect.http import admin_client
from vllmops.collect.machine import processes
from vllmops.model.roles import Role
from vllmops.servers import detached_process
from vllmops.supervision import launch

from .support import commands, extent, gate, own_processes, ports, reachable, versions
from .support.children import Child, Spawn, start_child
from .support.commands import Vllmops
from .support.databases import Server, start_shared_servers
from .support.lab import Lab
from .support.own_processes import in_home
from .support.waiting import until

# A busy machine is no failure, and what the gate finds is found in each of its runs.
hypothesis.settings.register_profile(
    "vllmops",
    deadline=None,
    derandomize=not extent.EVERYTHING,
    max_examples=100 if extent.EVERYTHING else 30,
)
hypothesis.settings.load_profile("vllmops")

TRANSPORTS: Any = import_module("httpx._transports.default")
# `httpx.get` reads all well-known certificates each time, which takes longer than its request.
TRANSPORTS.create_ssl_context = cache(TRANSPORTS.create_ssl_context)

# Started in the background of a script, or by nohup, we ignore them, and our children would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before pytest's own `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts programs or is not in the gate; leave out what is `long`, in most runs."""
    gate.require_fixtures(items)
    for item in items:
        if reason := gate.reason(item.nodeid):
            item.add_marker(pytest.mark.live_only(reason))
        if item.get_closest_marker("root_only") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip("takes root"))
        if extent.STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(extent.programs)
    if not extent.EVERYTHING:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    # First what waits: or at the end, one process still waits, and the others have nothing to do.
    # Those of `live` have an order of their own.
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    if item.nodeid.startswith(LIVE) or item.get_closest_marker("first"):
        return 0
    return 1 if item.get_closest_marker("programs") else 2


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers inherit what this does
        reachable.open_to_all()
        # What libraries find in a home, such as a token of Ray's, changes what they do.
        empty = tempfile.TemporaryDirectory(prefix="vo-home-")
        os.environ["HOME"] = empty.name
        config.add_cleanup(empty.cleanup)
        for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS"):  # change outputs
            os.environ.pop(name, None)
        os.environ["NO_PROXY"] = "127.0.0.1,localhost,::1"
        config.pluginmanager.register(gate.Reporter())


def pytest_sessionstart() -> None:
    """Make what forks commands, while no test's threads run."""
    commands.get_fork_server()


def pytest_sessionfinish() -> None:
    commands.get_fork_server().close()


START = detached_process.start_detached
LIVE = "tests/live/"
STANDIN = Path(__file__).parent / "supervision/standin.py"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test's threads end with it: of a process that has some, `commands` makes no forks."""
    before = set(threading.enumerate())
    yield
    if admin_client.LOOP.running:  # kept for the next question of the same process
        admin_client.LOOP.running.call_soon_threadsafe(admin_client.LOOP.running.stop)
        admin_client.LOOP.running = None
    until(lambda: set(threading.enumerate()) <= before, explain=threading.enumerate)


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
        children.append(start_child(title, role, home or tmp_path / "home", **env))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory with a short path; what was started with it is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="vo_", dir="/tmp", ignore_cleanup_errors=True) as name:
        place = Path(name)
        others = set(psutil.pids())  # hundreds, and none of them has this directory
        for variable in ("VLLMOPS_TARGET", "VLLMOPS_DEBUG", "VLLM_PLUGINS", "COLUMNS"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("VLLMOPS_HOME", name)
        # Other servers may run on this machine, and this user's ports be theirs.
        monkeypatch.setattr(processes, "read_process_table", own_processes.table_of(place))
        first, last = ports.launch_ports()
        monkeypatch.setattr(launch, "FIRST_PORT", first)
        monkeypatch.setattr(launch, "LAST_PORT", last)
        monkeypatch.setattr(detached_process, "start_detached", commands.start_detached_fork)
        yield place
        while left := [pid for pid in set(psutil.pids()) - others if in_home(pid, place)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for segment in Path("/dev/shm").glob(f"*_{place.name}_*"):
            segment.unlink()


@pytest.fixture
def programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What outlives a command is a program of its own, as it is for users, and no fork."""
    monkeypatch.setattr(detached_process, "start_detached", START)


@pytest.fixture
def vllmops(home: Path) -> Vllmops:
    """Runs a command in a child: ``vllmops("ps", "--json")``; see `commands.run_vllmops`."""
    return commands.run_vllmops


@pytest.fixture(scope="session")
def code(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """The folder that has a version's package ``vllm``."""
    kept = pytestconfig.cache.mkdir("vllm-code")
    return lambda version: versions.folder(kept, version)


@pytest.fixture(scope="session")
def standin() -> Iterator[Path]:
    """A directory for PYTHONPATH whose package ``vllm`` is `supervision/standin.py`."""
    # Not pytest's own: a command of another user would not find it there, and take the real vLLM.
    with tempfile.TemporaryDirectory(prefix="vo-standin-") as name:
        place = Path(name)
        place.chmod(0o755)
        write_standin(place)
        yield place


def write_standin(place: Path) -> None:
    """Make a package ``vllm`` of the stand-in."""
    package = place / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(STANDIN, package / "main.py")


@pytest.fixture
def model(home: Path) -> Path:
    """A directory that passes for a model."""
    place = home / "models" / "tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    return place


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
        popen.communicate(timeout=60)
    for server in lab.strangers:
        server.kill()
        server.wait(60)


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
    """What all workers of a run share; see `start_shared_servers`."""
    root = tmp_path_factory.getbasetemp()
    with start_shared_servers(
        root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    ) as found:
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
