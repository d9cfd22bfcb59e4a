"""Instances of the stand-in for vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from vllmops.collect.http.vllm_client import is_healthy
from vllmops.collect.machine import processes
from vllmops.collect.machine.processes import Process, is_alive
from vllmops.servers.record import InstanceFolder, InstanceRecord
from vllmops.supervision import launch, shutdown

from .commands import Vllmops, background
from .own_processes import in_home
from .ports import free_port
from .waiting import until


def holds(pid: int, file: Path) -> bool:
    """Whether a process has a file open."""
    try:
        return any(os.readlink(item) == str(file) for item in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


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

    def serve(self, name: str, *words: str, **play: object) -> InstanceRecord:
        """Serve one, detached, until it is ready."""
        answer = self.vllmops(*self.words(name, "--detach", "--json", *words, **play))
        assert answer.code == 0, answer
        until(lambda: len(self.record(name).processes) >= 3)
        return self.record(name)

    def words(self, name: str, *words: str, **play: object) -> tuple[str, ...]:
        env = ("--env", f"STANDIN={json.dumps(play)}")
        return ("serve", str(self.model), "--name", name, *env, *words)

    def start_in_foreground(self, name: str, *words: str, **play: object) -> None:
        """Serve one in the foreground, and do not wait for it."""
        port = str(free_port())
        self.foreground.append(background(*self.words(name, "--port", port, *words, **play)))
        until(lambda: self.state(name) and self.record(name).processes)

    def hold(self, name: str, *words: str, **play: object) -> subprocess.Popen[str]:
        """Serve one in the foreground, until it is ready."""
        self.start_in_foreground(name, *words, **play)
        popen = self.foreground[-1]
        until(lambda: self.state(name) == "ready" or popen.poll() is not None)
        return popen

    def stranger(self, **play: object) -> Stranger:
        """A server that vllmops did not start, serving."""
        port = free_port()
        server = self.stranger_with("--port", str(port), **play)
        server.port = port
        until(lambda: is_healthy(f"http://127.0.0.1:{port}"))
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
        return launch.try_bind("127.0.0.1", port)

    def cut_off(self, url: str) -> None:
        """Send a request that gets no answer."""
        with pytest.raises(httpx.TransportError):
            httpx.get(url, timeout=60)

    def state(self, name: str) -> str | None:
        record = InstanceFolder(name).load_record()
        return record.state if record else None

    def record(self, name: str) -> InstanceRecord:
        record = InstanceFolder(name).load_record()
        assert record
        return record

    def process(self, name: str, role: str) -> Process:
        return next(p for p in self.record(name).processes if p.role == role)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def supervisor(self, name: str) -> int:
        """The pid of an instance's supervisor."""
        lock = InstanceFolder(name).lock_path

        def holders() -> list[int]:
            return [p for p in psutil.pids() if in_home(p, self.home) and holds(p, lock)]

        # A program that it starts has its files, too, for a moment.
        pids = until(lambda: pids if len(pids := holders()) == 1 else None)
        return pids[0]

    def kill_supervisor(self, name: str) -> None:
        """Kill it; a command that waits may start another one at once."""
        pid, lock = self.supervisor(name), InstanceFolder(name).lock_path
        self.kill(pid)
        until(lambda: not holds(pid, lock))

    def nothing_left(self, of: InstanceRecord) -> None:
        """Of that server there is no process, no listener, no segment; `of` it had them all."""
        assert len(of.processes) >= 3
        assert of.session
        assert not [p for p in of.processes if is_alive(p)]
        assert not shutdown.find_session_members(processes.read_process_table(), of.session)
        assert of.port is None or launch.try_bind("127.0.0.1", of.port) is None
        assert of.segments
        assert not [name for name in of.segments if Path("/dev/shm", name).exists()]
