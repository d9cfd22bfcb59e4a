"""Which processes are one server's, told from real processes that carry the agent.

tests/live does it with real ranks; here are the shapes that no test machine has cores for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllmops.agent import identity
from vllmops.collect.agents import agent_client, agent_files
from vllmops.collect.agents.membership import group_server_trees
from vllmops.collect.machine import processes
from vllmops.model.ranks import format_process
from vllmops.model.roles import Role
from vllmops.servers.discovery import Server, list_servers

from ...support.children import Child
from ...support.extent import long
from ...support.own_processes import foreign
from ...support.ranked import make_rank_code
from ...support.waiting import until

NOBODY = 65534
API = "VLLM::APIServer_0"
ACTOR = "ray::RayWorkerProc.run"
TABLE = processes.read_process_table
Start = Callable[..., Child]


@pytest.fixture
def start(spawn: Callable[..., Child], home: Path) -> Start:
    """Starts one rank; its title is what the process table shows."""

    def start_rank(title: str, role: str, **how: Any) -> Child:
        child = spawn(title, Role(role), how.pop("home", home))
        child.run(make_rank_code(role, **how))
        return child

    return start_rank


@pytest.fixture
def elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A second state directory, whose processes are seen like those of the first."""
    other = home / "other"

    def ours() -> processes.Table:
        homes = (home, other)
        found = TABLE().items()
        return {pid: seen for pid, seen in found if not all(foreign(seen, at) for at in homes)}

    monkeypatch.setattr(processes, "read_process_table", ours)
    return other


def wait_for_heartbeats(*children: Child) -> None:
    """Wait for the heartbeat that says who they are."""

    def has_known_servers(child: Child) -> bool:
        pulse = agent_files.read_heartbeat(child.process)
        return bool(pulse and pulse.heartbeat.standing.servers)

    until(lambda: all(has_known_servers(child) for child in children))


def names(server: Server) -> list[str]:
    return [f"{p.role} {p.place.ranks}".rstrip() for p in server.processes if p.role != "other"]


def test_actors_of_ray_are_of_the_server_whose_configuration_they_have(start: Start) -> None:
    sizes = (1, 2, 2)
    ours = start(API, "api", sizes=sizes)
    workers = [start(ACTOR, "worker", rank=rank, sizes=sizes) for rank in range(4)]
    other = start("ray::RayWorkerWrapper", "worker", instance="2", sizes=sizes)
    wait_for_heartbeats(ours, *workers, other)
    server, alone = list_servers()
    assert names(server) == [
        "api",
        *("worker TP0 PP0", "worker TP1 PP0", "worker TP0 PP1", "worker TP1 PP1"),
    ]
    assert server.pid == ours.process.pid
    last = server.processes[-1]
    assert (last.place.dp_rank, last.place.tp_rank, last.place.pp_rank) == (0, 1, 1)
    assert last.place.node == os.uname().nodename
    assert (names(alone), alone.pid) == (["worker TP0 PP0"], other.process.pid)


def test_actors_stand_by_rank_whichever_of_them_was_seen_first(start: Start) -> None:
    ours = start(API, "api", sizes=(1, 2, 1))
    workers = [start(ACTOR, "worker", rank=rank, sizes=(1, 2, 1)) for rank in range(2)]
    wait_for_heartbeats(ours, *workers)
    table = processes.read_process_table()
    recorded = processes.build_process_tree(table, [ours.process.pid, workers[1].process.pid])
    ((_, *after),) = group_server_trees(table, [recorded])[0]
    assert [process.pid for process in after] == [worker.process.pid for worker in workers]


@long
def test_an_actor_of_a_class_that_nobody_knows_is_found_by_its_agent(start: Start) -> None:
    ours = start(API, "api", sizes=(1, 2, 1))
    own = start("ray::Trainer.step", "worker", rank=1, sizes=(1, 2, 1))
    program = start("python", "api", instance="2")
    wait_for_heartbeats(ours, own, program)
    (server,) = list_servers()
    assert names(server) == ["api", "worker TP1"]


def test_an_agent_with_another_state_directory_is_asked_there(
    start: Start, elsewhere: Path
) -> None:
    ours = start(API, "api")
    actor = start(ACTOR, "worker", home=elsewhere)
    wait_for_heartbeats(ours, actor)
    (server,) = list_servers()
    assert agent_client.open_agent(server.processes[1]).fetch_hello().pid == actor.process.pid


def test_engines_that_take_themselves_for_the_only_one_have_their_ranks(start: Start) -> None:
    """So do those of a model without experts: data parallel ranks of other nodes know nothing."""
    ours = start(API, "api", sizes=(2, 1, 1), local=1, instance="head")
    engines = [
        start("VLLM::EngineCore_DP0", "engine", instance="head"),
        start("VLLM::Worker", "worker", instance="head"),
        start("VLLM::EngineCore_DP1", "engine", dp=1, sizes=(2, 1, 1), local=1),
        start("ray::RayWorkerProc", "worker", dp=1),
    ]
    wait_for_heartbeats(ours, *engines)
    (server,) = list_servers()
    assert sorted(names(server)) == [
        *("api", "engine DP0", "engine DP1"),
        *("worker DP0", "worker DP1"),
    ]


def test_servers_with_an_api_server_each_stay_apart(start: Start) -> None:
    how: dict[str, Any] = {"sizes": (2, 1, 1), "local": 1, "external": True}
    both = [start(API, "api", instance=str(number), **how) for number in (1, 2)]
    actors = [start(ACTOR, "worker", instance=str(n), dp=n - 1, **how) for n in (2, 1)]
    wait_for_heartbeats(*both, *actors)
    found = {server.pid: server.processes[-1].pid for server in list_servers()}
    assert found == {
        both[0].process.pid: actors[1].process.pid,
        both[1].process.pid: actors[0].process.pid,
    }


def test_without_an_agent_the_titles_are_all_that_is_known(
    spawn: Callable[..., Child], home: Path
) -> None:
    spawn("VLLM::Worker_DP1_TP3", Role.WORKER, home, VLLMOPS_DISABLE="1")
    (server,) = list_servers()
    (worker,) = server.processes
    assert (worker.place.ranks, worker.place.dp_rank, worker.place.pp_rank) == ("DP1 TP3", 1, None)


@pytest.mark.root_only
def test_membership_claim_of_another_user_is_not_trusted(start: Start, elsewhere: Path) -> None:
    ours = start(API, "api")
    liar = start(ACTOR, "worker", home=elsewhere)
    wait_for_heartbeats(ours, liar)
    assert [names(server) for server in list_servers()] == [["api", "worker"]]
    liar.run(f"import os; os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)")
    for path in (elsewhere, *elsewhere.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    wait_for_heartbeats(liar)
    assert [names(server) for server in list_servers()] == [["api"], ["worker"]]


def test_a_process_below_ray_takes_no_part_of_an_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own module says whose work it does; tests/live has a real actor."""
    assert identity.detect_role() == "api"
    ray: Any = type("ray", (), {"global_worker": type("worker", (), {"mode": 1})})
    monkeypatch.setitem(sys.modules, identity.RAY, ray)
    assert identity.detect_role() == "worker"
    ray.global_worker.mode = 0  # a program that uses Ray, as vLLM's engine does
    assert identity.detect_role() == "api"


def test_how_a_process_is_named(start: Start) -> None:
    actor = start(ACTOR, "worker", dp=1, rank=1, sizes=(2, 2, 1))
    wait_for_heartbeats(actor)
    reached = agent_client.open_agent(list_servers()[0].processes[0])
    assert format_process(reached.fetch_caches()) == f"worker DP1 TP1 {actor.process.pid}"
    assert reached.fetch_hello().standing.ranks == "DP1 TP1"
