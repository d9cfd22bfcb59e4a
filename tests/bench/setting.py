"""What is measured: commands, real servers, and the load on them.

Servers and load come from one session: with another session in between, the scheduler's autogroups
starve the client for seconds on a small machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from tests.support import plug_ins
from tests.support.ports import free_port

from vllmops import demo
from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process
from vllmops.model.environment import STORE
from vllmops.model.roles import Role

HOST = "127.0.0.1"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30
COMMAND_TIMEOUT_S = 120
IMAGES = 80  # in one request: what fits into the demo model's 2,048 tokens
ROOM = (
    *("--limit-mm-per-prompt", json.dumps({"image": IMAGES})),
    *("--mm-processor-cache-gb", "4"),
)
PYTHON = sys.executable
LONG = ("--max-model-len", "4096")  # of which a conversation of 100 turns takes half
STOCK_STORE = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
VLLMOPS = str(Path(PYTHON).with_name("vllmops"))


@dataclass(frozen=True)
class Setting:
    """How thoroughly to measure, and where.

    Args:
        short: the form for CI: fewer rounds and wide limits.
        home: state directory of everything that is started.
        started: ends what is shared.
    """

    short: bool
    home: Path
    started: contextlib.ExitStack

    @cached_property
    def vision(self) -> Server:
        """A vision server that measurements share, with room for many images; starts on demand."""
        return self.started.enter_context(self.server(demo.DemoKind.VISION, *ROOM))

    @cached_property
    def text(self) -> Server:
        """A text server with stored responses in SQLite, for measurements of the short form."""
        store = {STORE: f"sqlite:///{self.home}/responses.db"}
        return self.started.enter_context(self.server(demo.DemoKind.TEXT, *LONG, environment=store))

    @cached_property
    def stock(self) -> Server:
        """As `text`, without the agent, and with vLLM's own stored responses."""
        return self.started.enter_context(
            self.server(demo.DemoKind.TEXT, *LONG, agent=False, environment=STOCK_STORE)
        )

    def ahead(self) -> None:
        """Start all that measurements share side by side: a start keeps one core busy."""
        with ThreadPoolExecutor() as pool:
            shared = ("vision", "text", "stock")
            for item in [pool.submit(getattr, self, name) for name in shared]:
                item.result()

    @property
    def environment(self) -> dict[str, str]:
        """For children; with bytecode cached, as it is for a user."""
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "VLLMOPS_HOME": str(self.home), "NO_COLOR": "1"}

    @property
    def lean(self) -> dict[str, str]:
        """For servers; those of the short form are forked, which halves a start."""
        paths = (str(self.home / "plug-ins"), os.environ.get("PYTHONPATH"))
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if self.short else {}

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end; one that fails ends the benchmark, and is shown."""
        ran = subprocess.run(
            words,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"{' '.join(words)}: {ran.returncode}\n{ran.stderr.decode()}")
        return ran

    def seconds(self, *words: str) -> float:
        """How long a command takes."""
        began = time.perf_counter()
        self.run(*words)
        return time.perf_counter() - began

    def cpu_seconds(self, *words: str) -> float:
        """How long a command computes, its children included: what else runs does not count."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(*words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    @contextlib.contextmanager
    def meanwhile(self, *words: str, warm_up_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until it is not needed any more; one that ends before that is shown.

        Args:
            words: the command.
            warm_up_s: seconds until it does what it does from then on.
        """
        complaints = self.home / "meanwhile.log"
        with complaints.open("wb") as file:
            command = subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
            try:
                time.sleep(warm_up_s)
                yield command
            finally:
                ended = command.poll() is not None
                command.kill()
                command.wait()
                if ended:
                    raise RuntimeError(f"{' '.join(words)}: {complaints.read_text()}")

    @contextlib.contextmanager
    def server(
        self,
        kind: demo.DemoKind,
        *arguments: str,
        agent: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """A demo model, served as ``vllmops serve`` would, but in this session.

        Args:
            kind: which model.
            arguments: for vLLM.
            agent: whether with the agent, or stock.
            environment: more of it.
        """
        port = free_port()
        command = (
            *(PYTHON, "-m", "vllmops.agent.launch", "serve", str(demo.build_missing_model(kind))),
            *("--host", HOST, "--port", str(port)),
            *demo.make_serve_arguments(kind),
            *arguments,
        )
        log = self.home / f"server-{port}.log"
        began = time.perf_counter()
        with log.open("wb") as file:
            root = subprocess.Popen(
                command,
                env={
                    **self.environment,
                    **self.lean,
                    **demo.make_serve_environment(),
                    "VLLMOPS_DISABLE": "" if agent else "1",
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            while not healthy(port):
                if root.poll() is not None or time.perf_counter() - began > START_TIMEOUT_S:
                    tail = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"the server did not start:\n{tail}")
                time.sleep(0.02)
            yield Server(root.pid, port, time.perf_counter() - began)
        finally:
            stop(root)


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Args:
        pid: of the API server.
        port: it listens on.
        start_s: seconds from launch to the first answer.
    """

    pid: int
    port: int
    start_s: float

    def processes(self) -> tuple[Process, ...]:
        return processes.build_process_tree(processes.read_process_table(), [self.pid])

    def cpu_s(self, *roles: Role) -> float:
        """CPU seconds of its processes of some roles so far, to the nanosecond."""
        return sum(cpu_seconds(each.pid) for each in self.processes() if each.role in roles)

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """A POST of a body, or a GET, ready to be sent."""
        content = json.dumps(body).encode() if body else b""
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: {HOST}\r\n"
        head += "Content-Type: application/json\r\n" if body else ""
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    def load(self, requests: Sequence[bytes], connections: int) -> list[float]:
        """Send requests over some connections, on each the next when the last is answered.

        Returns:
            Seconds that each took.
        """
        return asyncio.run(self._load(requests, connections))

    async def _load(self, requests: Sequence[bytes], connections: int) -> list[float]:
        left = iter(requests)
        taken: list[float] = []

        async def client() -> None:
            reader, writer = await asyncio.open_connection(HOST, self.port)
            for request in left:
                began = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                content = await reader.readexactly(int(length))
                if b" 200 " not in head[:20]:
                    raise RuntimeError(f"refused: {content.decode(errors='replace')[:1000]}")
                taken.append(time.perf_counter() - began)
            writer.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(client())
        return taken


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond; ``/proc`` has it to 10 ms."""
    # What clock_getcpuclockid(3) makes of a pid on Linux.
    return time.clock_gettime((~pid << 3) | 2)


def healthy(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def stop(root: subprocess.Popen[bytes]) -> None:
    """End a server, and whatever is left of it after a while."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(root.pid).children(recursive=True)
        root.terminate()
        _, left = psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    root.kill()
    root.wait()


@contextlib.contextmanager
def open_setting(*, short: bool) -> Iterator[Setting]:
    """A place to measure in; what was started in it is gone afterwards, also on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Not below a long path: Unix sockets lie in it.
    with (
        tempfile.TemporaryDirectory(prefix="vllmops-", ignore_cleanup_errors=True) as home,
        contextlib.ExitStack() as started,
    ):
        if short:
            plug_ins.lean(Path(home) / "plug-ins")
        yield Setting(short, Path(home), started)
