"""Servers whose workers are actors of Ray: below a raylet, not below the server.

Ray is told of GPUs that are not there, and vLLM's CPU platform of a name for them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..support.extent import EVERYTHING, long
from ..support.fleet import token_file
from ..support.ports import free_port
from ..support.waiting import until
from .conftest import Cli, PlugIn, kill, make_keyring_options
from .ranks import FOLDER, NOBIND, RUN, Ranks, encoder_rows
from .test_cache import send_image_request

TOLD_S = 10  # the loss of a node is told within
GPUS = 2
# Read by every process of Python's, also by an actor before it loads vLLM's plug-ins.
DEVICE = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
STATE = """
import json
import sys
import ray
from ray.util import placement_group_table

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
groups = [group["state"] for group in placement_group_table().values()]
print(json.dumps({"gpus": ray.available_resources().get("GPU", 0), "groups": groups}))
"""


@dataclass
class Cluster:
    """Nodes of Ray on this machine."""

    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    place: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, ip: str = "", *, gpus: int = GPUS) -> None:
        """Add a node; the first one gets this machine's own address."""
        where = ("--address", self.address, "--node-ip-address", ip)
        head = ("--head", "--port", str(self.port), "--temp-dir", str(self.place))
        # Otherwise its workers' ports are 10,002 to 19,999, among which ours are, and it complains.
        ports = ("--min-worker-port", "0", "--max-worker-port", "0")
        words = (*(where if ip else head), *ports, "--num-cpus", "4", "--num-gpus", str(gpus))
        extra = () if ip else ("--include-dashboard", "false")
        subprocess.run(
            [shutil.which("ray") or "ray", "start", *words, *extra, "--disable-usage-stats"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=120,
        )

    def processes(self) -> dict[psutil.Process, list[str]]:
        """Its own processes with their command lines."""
        found = {p: p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])}
        return {p: words for p, words in found.items() if str(self.place) in " ".join(words)}

    def raylets(self) -> dict[str, int]:
        """The pid of each node's raylet, by the node's address; the first node first."""
        option = "--node_ip_address="
        return {
            word.removeprefix(option): process.pid
            for process, words in self.processes().items()
            for word in words
            if word.startswith(option) and words[0].endswith("/raylet")
        }

    def state(self) -> dict[str, Any]:
        """Free GPUs, and the state of each placement group."""
        ran = subprocess.run(
            [sys.executable, "-c", STATE, self.address],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found

    def stop(self) -> None:
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        until(lambda: not self.processes(), 20)
        shutil.rmtree(self.place, ignore_errors=True)


@dataclass(frozen=True)
class Lab:
    """A cluster, and servers on it."""

    cli: Cli
    cluster: Cluster
    folder: Path

    def serve(self, name: str, kind: str, *words: str) -> Ranks:
        passed = ("PYTHONPATH", "RAY_ADDRESS", FOLDER)
        env = [
            word for key in passed for word in ("--env", f"{key}={self.cluster.environment[key]}")
        ]
        parallel = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray")
        server = self.cli.serve(name, "--demo", kind, *env, *NOBIND, *words, "--", *parallel)
        return Ranks(server, self.folder)


@pytest.fixture(scope="module")
def bare(cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A cluster without a node yet."""
    folder, plugged = tmp_path_factory.mktemp("ranks"), plug_in("ranks", RUN)
    (plugged / "sitecustomize.py").write_text(DEVICE)
    path = os.pathsep.join((str(plugged), cli.environment["PYTHONPATH"]))
    cluster = Cluster({**cli.environment, "PYTHONPATH": path, FOLDER: str(folder)})
    # As a user's: a raylet knows nothing of the server's state directory.
    del cluster.environment["VLLMOPS_HOME"]
    cluster.environment["RAY_ADDRESS"] = cluster.address
    yield Lab(cli, cluster, folder)
    cluster.stop()


@pytest.fixture(scope="module")
def lab(bare: Lab) -> Lab:
    bare.cluster.start()
    return bare


@pytest.fixture(scope="module")
def actors(lab: Lab, cli: Cli) -> Iterator[Ranks]:
    """A vision server whose two workers are actors."""
    token = ("--admin-token", str(token_file(cli.home)))
    served = lab.serve(
        "actors", "vision", *token, *make_keyring_options(cli, cli.home / "actors.json")
    )
    yield served
    cli("stop", "actors", "--force")


def test_actors_are_workers_of_the_server(actors: Ranks, lab: Lab) -> None:
    pids = actors.list_pids_by_name()
    assert {"api", "engine", "worker TP0", "worker TP1"} == pids.keys()
    assert [row["agent"] for row in actors.rows()] == ["answers"] * 4
    (raylet,) = lab.cluster.raylets().values()
    assert {psutil.Process(pids[f"worker TP{rank}"]).ppid() for rank in (0, 1)} == {raylet}
    rows = actors.server.cli("ps", "--json").data["instances"]
    own = [row for row in rows if {p["pid"] for p in row["processes"]} & set(pids.values())]
    assert [row["name"] for row in own] == ["actors"]


def test_actors_are_seen_from_another_machine(actors: Ranks) -> None:
    server = actors.server
    far = ("-t", server.url, "--admin-token", str(server.home / "admin.token"), "--json")
    known = [(p["role"], p["ranks"], p["pid"], "answers") for p in actors.rows()]

    def processes() -> list[tuple[str, str, int, str]]:
        (row,) = server.cli("ps", *far).data["instances"]
        rows = [(p["role"], p["ranks"], p["pid"], p["agent"]) for p in row["processes"]]
        return [found for found in rows if found[2] in {pid for _, _, pid, _ in known}]

    # An agent of a machine that is busy answers late, and is asked again.
    until(lambda: processes() == known, explain=processes)
    sides = [("worker", "TP0"), ("worker", "TP1")]
    until(
        lambda: [row[:2] for row in encoder_rows(server, *far)[1:]] == sides,
        explain=lambda: server.cli("cache", "inspect", *far).out,
    )


def test_an_actor_holds_no_keys(actors: Ranks) -> None:
    """It has the engine's environment, and no part in serving HTTP."""
    servers = actors.server.cli("keys", "status", "--json").data["servers"]
    assert [p["pid"] for p in servers if p["server"] == "actors"] == [
        actors.list_pids_by_name()["api"]
    ]


def test_caches_of_actors_are_beside_their_engine(actors: Ranks) -> None:
    assert send_image_request(actors.server.url, 1).status_code == 200
    sides = [("scheduler", "", 1), ("worker", "TP0", 1), ("worker", "TP1", 1)]
    until(
        lambda: encoder_rows(actors.server) == sides,
        explain=lambda: actors.server.cli("cache", "inspect", "-t", "actors", "--json").out,
    )


def test_an_actor_that_is_stuck_is_found(actors: Ranks) -> None:
    with actors.stuck("worker TP1"):
        ran = actors.server.cli("doctor", "-t", "actors", "--json")
        assert ran.code == 1, ran.out
        names = actors.list_pids_by_name()
        (found,) = (f for f in ran.data["findings"] if f["code"].startswith("stack."))
        assert found["subject"] == f"worker TP1 {names['worker TP1']}"
        assert f"worker TP0 {names['worker TP0']}" in found["victims"]
        dumped = actors.server.cli("stacks", "dump", "-t", "actors", "--json").data["processes"]
        by_rank = {process["tp_rank"]: process for process in dumped}
        assert "all_reduce" in str(by_rank[1]["threads"])


def test_a_stop_leaves_no_actor_and_no_placement_group(actors: Ranks, lab: Lab) -> None:
    footprint = actors.server.footprint()
    assert actors.server.cli("stop", "actors", "--force").code == 0
    assert footprint.list_leftovers() == []
    assert lab.cluster.raylets()
    until(lambda: lab.cluster.state()["gpus"] == GPUS)
    assert set(lab.cluster.state()["groups"]) == {"REMOVED"}


def lose(served: Ranks, pid: int, *words: str) -> None:
    """Kill a process: that is told within some seconds, in these words, and nothing is left."""
    footprint = served.server.footprint()
    kill(pid)
    began = time.monotonic()
    until(lambda: served.server.row["state"] in {"stopping", "failed"}, TOLD_S)
    assert time.monotonic() - began <= TOLD_S
    until(lambda: served.server.row["state"] == "failed", 60)
    failure = served.server.row["failure"]
    assert all(word in failure for word in words), failure
    assert footprint.list_leftovers() == []


if EVERYTHING:

    @pytest.mark.parametrize("victim", ["api", "engine", "worker TP0", "worker TP1"])
    def test_the_death_of_each_process_leaves_nothing(lab: Lab, victim: str) -> None:
        served = lab.serve("killed", "text")
        try:
            lose(served, served.list_pids_by_name()[victim], victim)
            until(lambda: lab.cluster.state()["gpus"] == GPUS)
            assert set(lab.cluster.state()["groups"]) == {"REMOVED"}
        finally:
            lab.cli("stop", "killed", "--force")

    @pytest.mark.parametrize("local", [True, False])
    def test_two_nodes_of_a_cluster(bare: Lab, local: bool) -> None:
        """A worker on each node; either node that is lost is named."""
        one = Cluster(bare.cluster.environment)
        two = Lab(bare.cli, one, bare.folder)
        one.environment = {**one.environment, "RAY_ADDRESS": one.address}
        try:
            one.start(gpus=1)
            one.start("127.0.0.2", gpus=1)
            served = two.serve("two", "text")
            assert {"worker TP0", "worker TP1"} < served.list_pids_by_name().keys()
            nodes = one.raylets()
            parents = {
                psutil.Process(served.list_pids_by_name()[f"worker TP{n}"]).ppid() for n in (0, 1)
            }
            assert parents == set(nodes.values())
            name = list(nodes)[0 if local else 1]
            lose(served, nodes[name], "node", name)
        finally:
            bare.cli("stop", "two", "--force")
            one.stop()


@long
def test_a_node_that_is_lost_is_named(lab: Lab) -> None:
    served = lab.serve("lost", "text")
    try:
        ((name, raylet),) = lab.cluster.raylets().items()
        lose(served, raylet, "node", name)
    finally:
        lab.cli("stop", "lost", "--force")
