"""Servers over two machines, each a set of namespaces; asked by the URL from a third one."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..support.extent import EVERYTHING
from ..support.fleet import token_file
from ..support.ports import free_port
from ..support.remote_machine import certificate, ip, machine, open_namespaces
from ..support.waiting import until
from .conftest import START_TIMEOUT_S, Cli, PlugIn, Ran
from .ranks import NOBIND
from .test_ray import DEVICE

TIMELY_S = 15  # what a command takes while a node is away, on a busy machine


@dataclass
class Machines:
    """Two machines, and what runs on them.

    Args:
        cli: of this machine, which has none of the server's processes.
        folder: for logs and state.
        names: of the network namespaces.
        addresses: of the machines.
        memory: what they share; empty for nothing.
    """

    cli: Cli
    folder: Path
    names: list[str]
    addresses: list[str]
    memory: str = ""
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"https://{self.addresses[0]}:{self.port}"

    def run(self, node: int, words: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on a machine; its processes end with it."""
        (home := self.folder / f"node{node}").mkdir(mode=0o700, exist_ok=True)
        (home / "demo").unlink(missing_ok=True)
        (home / "demo").symlink_to(self.cli.home / "demo")
        own = {"VLLMOPS_HOME": str(home), "VLLM_HOST_IP": self.addresses[node]}
        with (self.folder / f"node{node}.log").open("ab") as log:
            made = subprocess.Popen(
                [*machine(f"node{node}", self.names[node], self.memory), *words],
                env={**self.cli.environment, "GLOO_SOCKET_IFNAME": "far", **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.running.append(made)
        return made

    def serve(
        self,
        node: int,
        *words: str,
        before: str = "",
        options: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Start a node of a server.

        Args:
            node: which one.
            words: vLLM's options.
            before: a command that runs first, on the same machine.
            options: those of `serve`.
            environment: what is added to it.
        """
        tls = certificate(self.addresses[node], self.folder / f"node{node}.pem")
        token = ("--admin-token", str(self.folder / "admin.token"))
        options = (*token, "--demo", "text", *NOBIND, *options)
        name = ("--name", f"node{node}", "--port", str(self.port))
        secured = ("--host", "0.0.0.0", "--ssl-certfile", str(tls), "--ssl-keyfile", str(tls))
        front = () if "--headless" in words else secured
        serve = (sys.executable, "-m", "vllmops", "serve", *name, *options, "--", *front, *words)
        first = ("sh", "-c", f'{before} && exec "$@"', "-") if before else ()
        self.run(node, (*first, *serve), **environment)

    def is_healthy(self) -> bool:
        assert all(process.poll() is None for process in self.running), self.logs()
        try:
            return httpx.get(f"{self.url}/health", timeout=5, verify=self.trust()).is_success
        except httpx.TransportError:
            return False

    def trust(self) -> Any:
        return ssl.create_default_context(cafile=self.folder / "node0.pem")

    def logs(self) -> str:
        return "\n".join(file.read_text()[-4000:] for file in self.folder.glob("node*.log"))

    def run_cli_command(self, *words: str) -> Ran:
        """A command of this machine, about the server."""
        token = ("--admin-token", str(self.folder / "admin.token"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(self.folder / "node0.pem"))
            return self.cli(*words, "-t", self.url, *token, "--json")

    def ranks(self) -> dict[str, str]:
        """What `ps` says of the agent of each engine and worker, by role, ranks and node."""
        ran = self.run_cli_command("ps")
        assert ran.code == 0, (ran.out, self.logs())
        (row,) = ran.data["instances"]
        return {
            f"{p['role']} {p['ranks']} {p['node']}": p["agent"]
            for p in row["processes"]
            if p["role"] in {"engine", "worker"}
        }


@pytest.fixture
def machines(cli: Cli, tmp_path: Path) -> Iterator[Machines]:
    token_file(tmp_path)
    with open_namespaces(2) as made, ExitStack() as stack:
        names, addresses = zip(*made, strict=True)
        found = Machines(cli, tmp_path, list(names), list(addresses))
        stack.callback(end, found)
        yield found


def end(machines: Machines) -> None:
    for process in machines.running:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def seen_whole(machines: Machines, expected: set[str], folder: Path) -> None:
    """Every command has the ranks of both machines; then the network between them is cut."""
    answers = dict.fromkeys(expected, "answers")
    until(lambda: machines.ranks() == answers, 60, lambda: (machines.ranks(), machines.logs()))
    nodes = {"node0", "node1"}
    inspected = machines.run_cli_command("cache", "inspect")
    assert (inspected.code, inspected.data["silent"]) == (0, []), inspected
    dumped = machines.run_cli_command("stacks", "dump").data["processes"]
    shown = {f"{p['role']} {p['ranks']} {p['node']}" for p in dumped if p["threads"]}
    assert expected <= shown, dumped
    examined = machines.run_cli_command("doctor")
    unseen = examined.data["unseen"]
    assert {part["code"] for part in unseen} <= {"remote"}, unseen
    listed = machines.run_cli_command("patches", "list").data["patches"]
    assert {process["node"] for patch in listed for process in patch["processes"]} == nodes
    file = folder / "bundle.tar.gz"
    bundled = machines.run_cli_command("bundle", "-o", str(file))
    assert bundled.code == 0, bundled
    with tarfile.open(file) as archive:
        names = archive.getnames()
        stacks = archive.extractfile(next(name for name in names if name.endswith("stacks.jsonl")))
        assert stacks is not None
        text = stacks.read().decode()
    assert all(f'"node":"{node}"' in text for node in nodes)

    ip(f"link set {machines.names[1]} down")
    lost = {name: "node-lost" if "node1" in name else "answers" for name in expected}
    until(lambda: machines.ranks() == lost, 30, machines.ranks)
    began = time.monotonic()
    inspected = machines.run_cli_command("cache", "inspect")
    assert time.monotonic() - began < TIMELY_S
    assert {silent["node"] for silent in inspected.data["silent"]} == {"node1"}
    (row,) = machines.run_cli_command("ps").data["instances"]
    assert f"node node1 ({machines.addresses[1]}) does not answer" in row["note"]
    began = time.monotonic()
    bundled = machines.run_cli_command("bundle", "-o", str(file), "--force", "--timeout", "10")
    assert time.monotonic() - began < 10 + TIMELY_S
    assert any("node1" in str(part) for part in bundled.data["missing"]), bundled.data
    ip(f"link set {machines.names[1]} up")
    until(lambda: machines.ranks() == answers, 30, machines.ranks)


if EVERYTHING:

    def test_data_parallel_with_a_headless_node(machines: Machines, tmp_path: Path) -> None:
        meet = (
            "--data-parallel-address",
            machines.addresses[0],
            "--data-parallel-rpc-port",
            "13345",
        )
        both = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", *meet)
        machines.serve(0, *both, "--api-server-count", "2")
        machines.serve(1, *both, "--headless", "--data-parallel-start-rank", "1")
        until(machines.is_healthy, START_TIMEOUT_S, machines.logs)
        expected = {f"{role} DP{n} node{n}" for role in ("engine", "worker") for n in (0, 1)}
        seen_whole(machines, expected, tmp_path)

    def test_workers_on_another_node(machines: Machines, tmp_path: Path) -> None:
        meet = ("--nnodes", "2", "--master-addr", machines.addresses[0], "--master-port", "29513")
        both = ("--tensor-parallel-size", "2", *meet)
        machines.serve(0, *both, "--node-rank", "0")
        machines.serve(1, *both, "--node-rank", "1", "--headless")
        until(machines.is_healthy, START_TIMEOUT_S, machines.logs)
        seen_whole(machines, {"engine  node0", "worker TP0 node0", "worker TP1 node1"}, tmp_path)

    def test_ray_over_two_nodes(machines: Machines, plug_in: PlugIn, tmp_path: Path) -> None:
        (folder := plug_in("device", "register = bool\n")).joinpath("sitecustomize.py").write_text(
            DEVICE
        )
        path = os.pathsep.join((str(folder), machines.cli.environment["PYTHONPATH"]))
        head = f"{machines.addresses[0]}:6379"
        more = {"PYTHONPATH": path, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1", "RAY_ADDRESS": head}
        ray = "ray start --num-cpus 4 --num-gpus 1 --disable-usage-stats --node-ip-address "
        place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        # VLLM's workers on CPUs of one tensor parallel group share memory, whatever their node.
        machines.memory = tempfile.mkdtemp(prefix="ray-", dir="/dev/shm")
        first = f"{ray}{machines.addresses[0]} --head --port 6379 --temp-dir {place}"
        parallel = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
        env = [word for name, value in more.items() for word in ("--env", f"{name}={value}")]
        try:
            off = "--include-dashboard false"
            machines.serve(0, *parallel, before=f"{first} {off}", options=env, **more)
            until(lambda: "Ray runtime started" in machines.logs(), 60, machines.logs)
            join = f"{ray}{machines.addresses[1]} --address {head} --block"
            machines.run(1, join.split(), **more)
            until(machines.is_healthy, START_TIMEOUT_S, machines.logs)
            workers = {"worker TP0 node0", "worker TP1 node1"}
            seen_whole(machines, {"engine  node0", *workers}, tmp_path)
        finally:
            end(machines)
            for folder_ in (place, machines.memory):
                shutil.rmtree(folder_, ignore_errors=True)
