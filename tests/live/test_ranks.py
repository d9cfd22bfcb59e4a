"""Servers with several ranks: which process is which, what each holds, and what their end leaves.

The servers are shared: each starts two or more workers, and needs two cores for 35 to 55 s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..support.extent import EVERYTHING, long
from ..support.ports import free_port
from ..support.waiting import until
from .conftest import Cli, Live, PlugIn, kill, side_by_side
from .ranks import FORWARD, GHOST, NOBIND, Ranks, encoder_rows, make_plug_in_options
from .test_cache import send_image_request

TP = ("--env", "VLLM_CPU_OMP_THREADS_BIND=0|1", "--", "--tensor-parallel-size", "2")
PP = ("--env", "VLLM_CPU_OMP_THREADS_BIND=0|1", "--", "--pipeline-parallel-size", "2")
TOLD_S = 10  # the death of a process is told within
NAMED_S = 20.0  # from the call of a command that looks at a live server to its answer


@pytest.fixture(scope="module")
def tensor(cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two workers that share each layer."""
    folder = tmp_path_factory.mktemp("ranks")
    server = cli.serve(
        "tensor", "--demo", "vision", *make_plug_in_options(cli, plug_in, folder), *TP
    )
    yield Ranks(server, folder)
    cli("stop", server.name, "--force")


def test_ranks_of_a_tensor_parallel_server(tensor: Ranks) -> None:
    assert {"api", "engine", "worker TP0", "worker TP1"} <= tensor.list_pids_by_name().keys()
    for row in tensor.rows():
        assert row["agent"] == "answers"
        assert row["node"]
    places = [(r["dp_rank"], r["tp_rank"], r["pp_rank"]) for r in tensor.rows()]
    assert places == [(None, None, None), (0, None, None), (0, 0, 0), (0, 1, 0)]
    shown = tensor.server.cli("ps").out
    assert re.search(rf"worker TP1 +{tensor.list_pids_by_name()['worker TP1']} ", shown)


def test_workers_of_a_group_are_beside_each_other(tensor: Ranks) -> None:
    assert send_image_request(tensor.server.url, 1).status_code == 200
    sides = [("scheduler", "", 1), ("worker", "TP0", 1), ("worker", "TP1", 1)]
    until(lambda: encoder_rows(tensor.server) == sides)
    ran = tensor.server.cli("cache", "inspect", "-t", "tensor")
    pids = tensor.list_pids_by_name()
    names = [f"scheduler: engine {pids['engine']}"]
    names += [f"{name} {pids[name]}" for name in ("worker TP0", "worker TP1")]
    assert any(all(name in line for name in names) for line in ran.out.splitlines()), ran.out
    compared = tensor.server.cli("cache", "compare", "-t", "tensor", "--json").data["pairs"]
    assert [pair["ranks"] for pair in compared if pair["kind"] == "encoder"] == [
        ["", "TP0"],
        ["", "TP1"],
    ]


def test_every_command_names_the_rank(tensor: Ranks) -> None:
    cli, pid = tensor.server.cli, tensor.list_pids_by_name()["worker TP1"]
    dumped = cli("stacks", "dump", "-t", "tensor", "--json").data["processes"]
    assert {p["pid"]: p["tp_rank"] for p in dumped}[pid] == 1
    listed = cli("patches", "list", "-t", "tensor", "--json").data["patches"]
    assert all(row["tp_rank"] == 1 for p in listed for row in p["processes"] if row["pid"] == pid)
    assert f"worker TP1 {pid}" in cli("patches", "list", "-t", "tensor").out
    assert "worker TP1: " in cli("bundle", "-t", "tensor", "--dry-run").out


def named_stuck(ranks: Ranks) -> dict[str, Any]:
    """What doctor says that is stuck; it is one thing, said in time."""
    began = time.monotonic()
    ran = ranks.server.cli("doctor", "-t", ranks.server.name, "--json")
    took_s = time.monotonic() - began
    (found,) = (f for f in ran.data["findings"] if f["code"].startswith("stack."))
    print(f"rank stuck: doctor took {took_s:.1f} s: {found}")  # pytest -rP shows it
    assert took_s < NAMED_S
    assert ran.code == 1, ran.out
    return dict(found)


def test_the_rank_that_is_stuck_is_found(tensor: Ranks) -> None:
    with tensor.stuck("worker TP1"):
        found, names = named_stuck(tensor), tensor.list_pids_by_name()
        assert found["subject"] == f"Worker_TP1 {names['worker TP1']}"
        victims = [f"Worker_TP0 {names['worker TP0']}", f"EngineCore {names['engine']}"]
        assert sorted(found["victims"]) == sorted(victims)
        dumped = tensor.server.cli("stacks", "dump", "-t", "tensor", "--json").data["processes"]
        (asleep,) = (p for p in dumped if "all_reduce" in str(p["threads"]) and p["tp_rank"] == 1)
        assert asleep["pid"] == tensor.list_pids_by_name()["worker TP1"]


def test_repair_changes_only_the_rank_with_a_ghost_key(tensor: Ranks) -> None:
    tensor.run("engine", GHOST)
    ran = tensor.server.cli("cache", "repair", "-t", "tensor", "--json")
    assert ran.code == 0, ran.out
    assert [(row["role"], row["dp_rank"]) for row in ran.data["repairs"]] == [("engine", 0)]


def ends(server: Live, *others: Live, pid: int, cause: str) -> None:
    """Kill a process: that ends all servers, tells why, and leaves nothing."""
    prints = [one.footprint() for one in (server, *others)]
    kill(pid)
    until(lambda: server.row["state"] == "failed", 60, lambda: server.row)
    assert cause in server.row["failure"].lower() or cause in server.row["failure"], server.row
    until(lambda: all(one.row["state"] in {"failed", "stopped"} for one in others), 30)
    assert [left for footprint in prints for left in footprint.list_leftovers()] == []


def test_a_tensor_parallel_rank_that_is_killed_ends_the_server(tensor: Ranks) -> None:
    ends(tensor.server, pid=tensor.list_pids_by_name()["worker TP1"], cause="worker TP1")


# -- data parallel, over two nodes ------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(
    cli: Cli, plug_in: PlugIn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Live]]:
    """An engine beside the API server, and one that a headless server has."""
    folder, port = tmp_path_factory.mktemp("ranks"), str(free_port())
    two = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    meet = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", port)
    start = ("--headless", "--data-parallel-start-rank", "1")

    def serve(name: str) -> Live:
        rest = start if name == "second" else ("--api-server-count", "1")
        words = (
            "--demo",
            "vision",
            *make_plug_in_options(cli, plug_in, folder),
            *NOBIND,
            "--",
            *two,
            *meet,
            *rest,
        )
        return cli.serve(name, *words)

    first, second = side_by_side(serve, ["first", "second"])
    yield Ranks(first, folder), second
    for server in (second, first):
        cli("stop", server.name, "--force")


def test_a_headless_node_is_of_its_server(nodes: tuple[Ranks, Live]) -> None:
    ranks, second = nodes
    pairs = {f"{role} DP{rank}" for role in ("engine", "worker") for rank in (0, 1)}
    assert {*pairs, "api", "launcher"} <= ranks.list_pids_by_name().keys()
    assert (second.row["state"], second.row["headless"], second.row["url"]) == ("ready", True, None)
    own = {row["pid"] for row in second.row["processes"]}
    shared = {pid for name, pid in ranks.list_pids_by_name().items() if "DP1" in name}
    assert shared < own
    assert not own & {
        pid for name, pid in ranks.list_pids_by_name().items() if "DP0" in name or name == "api"
    }


def test_an_engine_is_beside_its_own_worker(nodes: tuple[Ranks, Live]) -> None:
    ranks, _ = nodes
    for seed in range(8):  # to both engines
        assert send_image_request(ranks.server.url, seed).status_code == 200
    until(lambda: len(encoder_rows(ranks.server)) == 4)
    rows = encoder_rows(ranks.server)
    assert sum(entries for side, _, entries in rows if side == "scheduler") == 8
    by_rank = {(side, rank): entries for side, rank, entries in rows}
    for rank in ("DP0", "DP1"):
        assert by_rank["scheduler", rank] == by_rank["worker", rank] > 0, rows
    ran, pids = ranks.server.cli("cache", "inspect", "-t", "first"), ranks.list_pids_by_name()
    for rank in ("DP0", "DP1"):
        pair = [f"{role} {rank} {pids[f'{role} {rank}']}" for role in ("engine", "worker")]
        assert any(all(name in line for name in pair) for line in ran.out.splitlines()), ran.out


def test_the_rank_of_another_node_is_repaired(nodes: tuple[Ranks, Live]) -> None:
    ranks, _ = nodes
    ranks.run("worker DP1", GHOST)
    ran = ranks.server.cli("cache", "repair", "-t", "first", "--json")
    assert ran.code == 0, ran.out
    assert [(row["role"], row["dp_rank"]) for row in ran.data["repairs"]] == [("worker", 1)]


def test_a_killed_engine_of_a_headless_node_ends_both_servers(nodes: tuple[Ranks, Live]) -> None:
    ranks, second = nodes
    ends(ranks.server, second, pid=ranks.list_pids_by_name()["engine DP1"], cause="engine DP1")


# -- the long form -----------------------------------------------------------------------------

PORT = "PORT"  # where the nodes meet: one that is free
DP = (*NOBIND, "--", "--data-parallel-size", "2")
APART = (*DP, "--data-parallel-size-local", "1", "--data-parallel-rpc-port", PORT)
NODES = (*NOBIND, "--", "--tensor-parallel-size", "2", "--nnodes", "2", "--master-port", PORT)
DATA = ["coordinator", "engine DP0", "engine DP1", "worker DP0", "worker DP1"]
# Each shape: what each node is started with, and the processes.
SHAPES: dict[str, tuple[tuple[tuple[str, ...], ...], list[str]]] = {
    "tensor": ((TP,), ["api", "engine", "worker TP0", "worker TP1"]),
    "pipeline": ((PP,), ["api", "engine", "worker PP0", "worker PP1"]),
    "data": (((*DP, "--api-server-count", "1"),), ["api", *DATA]),
    "front ends": (((*DP, "--api-server-count", "2"),), ["api", "api", *DATA, "launcher"]),
    "headless": (
        (
            (*APART, "--api-server-count", "1"),
            (*APART, "--headless", "--data-parallel-start-rank", "1"),
        ),
        ["api", *DATA, "launcher"],
    ),
    "workers": (
        ((*NODES, "--node-rank", "0"), (*NODES, "--node-rank", "1", "--headless")),
        ["api", "engine", "launcher", "worker TP0", "worker TP1"],
    ),
}


@long
def test_the_data_parallel_rank_that_is_stuck_is_found(
    cli: Cli, plug_in: PlugIn, tmp_path: Path
) -> None:
    """The engine of that rank waits for it; the other rank works on."""
    words = (
        "--demo",
        "text",
        *make_plug_in_options(cli, plug_in, tmp_path),
        *DP,
        "--api-server-count",
        "1",
    )
    ranks = Ranks(cli.serve("data", *words), tmp_path)
    stuck = ranks.stuck("worker DP1", FORWARD, engine="engine DP1", requests=4, model="demo-text")
    try:
        with stuck:
            found, names = named_stuck(ranks), ranks.list_pids_by_name()
            assert found["subject"] == f"worker DP1 {names['worker DP1']}"
            assert found["victims"] == [f"EngineCore_DP1 {names['engine DP1']}"]
    finally:
        cli("stop", "data", "--force")


if EVERYTHING:

    @pytest.mark.parametrize(
        ("shape", "victim"),
        [(shape, name) for shape, (_, names) in SHAPES.items() for name in dict.fromkeys(names)],
    )
    def test_killing_any_process_ends_all_nodes(cli: Cli, shape: str, victim: str) -> None:
        options, expected = SHAPES[shape]
        port = str(free_port())

        def serve(node: int) -> Live:
            words = (port if word == PORT else word for word in options[node])
            # The demo model that takes images has no stages.
            return cli.serve(f"node{node}", "--demo", "text", *words)

        try:
            server, *others = side_by_side(serve, range(len(options)))
            rows = Ranks(server, Path()).rows()
            names = [f"{row['role']} {row['ranks']}".rstrip() for row in rows]
            assert sorted(names) == sorted(expected)
            assert {ranks for _, ranks, _ in encoder_rows(server)} <= {
                name.partition(" ")[2] for name in expected
            }
            ends(server, *others, pid=rows[names.index(victim)]["pid"], cause=victim)
        finally:
            for node in range(len(options)):
                cli("stop", f"node{node}", "--force")

    @pytest.mark.parametrize("local", [1, 2], ids=["external", "hybrid"])
    def test_each_node_with_its_own_load_balancer_is_a_server(cli: Cli, local: int) -> None:
        """vLLM has these shapes for models with experts alone."""
        size, meet = str(2 * local), ("--data-parallel-rpc-port", str(free_port()))
        hybrid = ("--data-parallel-hybrid-lb", "--data-parallel-size-local", "2")

        def serve(node: int) -> Live:
            own = (
                ("--data-parallel-rank", str(node))
                if local == 1
                else (
                    *hybrid,
                    "--api-server-count",
                    "1",
                    "--data-parallel-start-rank",
                    str(2 * node),
                )
            )
            words = ("--data-parallel-size", size, *meet, *own)
            return cli.serve(f"node{node}", "--demo", "moe", *NOBIND, "--", *words)

        try:
            for node, server in enumerate(side_by_side(serve, [0, 1])):
                ranks = range(node * local, (node + 1) * local)
                names = {f"{role} DP{rank}" for role in ("engine", "worker") for rank in ranks}
                first = set() if node else {"coordinator"}
                assert Ranks(server, Path()).list_pids_by_name().keys() == {"api", *names, *first}
                footprint = server.footprint()
                assert cli("stop", server.name).code == 0
                assert footprint.list_leftovers() == []
        finally:
            for name in ("node0", "node1"):
                cli("stop", name, "--force")

    def test_a_node_of_workers_alone_is_ready(cli: Cli) -> None:
        """Where one engine has workers on several nodes."""
        meet = ("--nnodes", "2", "--master-port", str(free_port()), "--tensor-parallel-size", "2")
        options = {"one": ("--node-rank", "0"), "two": ("--node-rank", "1", "--headless")}

        def serve(name: str) -> Live:
            return cli.serve(name, "--demo", "text", *NOBIND, "--", *meet, *options[name])

        try:
            one, two = side_by_side(serve, list(options))
            assert [server.row["state"] for server in (one, two)] == ["ready"] * 2
            assert {"api", "launcher", "worker TP0", "worker TP1"} < Ranks(
                one, Path()
            ).list_pids_by_name().keys()
            assert Ranks(two, Path()).list_pids_by_name().keys() == {"launcher", "worker TP1"}
        finally:
            for name in ("two", "one"):
                cli("stop", name, "--force")
