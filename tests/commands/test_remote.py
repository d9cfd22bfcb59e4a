"""Servers on other machines: as far as a command knows, for they are reached by HTTP alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from vllmops.collect.machine import listeners
from vllmops.model.admin_api import PROCESSES
from vllmops.model.roles import Role

from ..agent.recording.test_step_recorder import SCHEDULER
from ..support.children import Child, Spawn, start_child
from ..support.commands import Vllmops, background
from ..support.fleet import TOKEN, Fleet, token_file
from ..support.ranked import make_rank_code
from ..support.remote_machine import far
from ..support.waiting import until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server that tests share: each leaves it as it was."""
    children: list[Child] = []

    def spawn(title: str, home: Path, **env: str) -> Child:
        children.append(start_child(title, Role.API, home, **env))
        return children[-1]

    made = Fleet(spawn, tmp_path_factory.mktemp("fleet"))
    yield made
    made.kill()
    for child in children:
        child.kill()


@pytest.fixture
def private_fleet(spawn: Spawn, tmp_path: Path) -> Iterator[Fleet]:
    """A server of a test that changes it."""
    made = Fleet(spawn, tmp_path)
    yield made
    made.kill()


def roles(rows: list[dict[str, object]]) -> dict[object, object]:
    return {row["role"]: row["pid"] for row in rows}


def test_every_command_that_reads(vllmops: Vllmops, fleet: Fleet) -> None:
    answer = vllmops("ps", *fleet.words(), "--json")
    assert answer.code == 0, answer
    (row,) = answer.data["instances"]
    assert (row["url"], row["state"], row["remote"]) == (fleet.url, "ready", True)
    assert {p["role"]: p["agent"] for p in row["processes"]} == dict.fromkeys(fleet.pids, "answers")
    assert roles(row["processes"]) == fleet.pids
    assert [p["ranks"] for p in row["processes"]] == ["", "DP1", "DP1 TP0"]
    assert {p["node"] for p in row["processes"]} == {os.uname().nodename}
    assert 0 < row["uptime_s"] < 86_400
    answer = vllmops("status", *fleet.words(), "--json")
    assert answer.code == 0, answer
    assert roles(answer.data["instance"]["processes"]) == fleet.pids
    answer = vllmops("cache", "inspect", *fleet.words(), "--json")
    assert (answer.code, answer.data["silent"], answer.data["findings"]) == (0, [], [])
    answer = vllmops("cache", "repair", *fleet.words(), "--json")
    assert (answer.code, answer.data["repairs"], answer.data["silent"]) == (0, [], [])
    answer = vllmops("stacks", "dump", *fleet.words(), "--json")
    assert answer.code == 0, answer
    assert roles(answer.data["processes"]) == fleet.pids
    assert {p["source"] for p in answer.data["processes"]} == {"agent"}
    assert all(
        any(thread["name"] == "MainThread" for thread in process["threads"])
        for process in answer.data["processes"]
    )
    answer = vllmops("stacks", "dump", *fleet.words(), "--explain", "--samples", "1", "--json")
    assert answer.data["verdict"], answer
    answer = vllmops("patches", "list", *fleet.words(), "--json")
    assert answer.code == 0, answer
    answer = vllmops("keys", "status", *fleet.words(), "--json")
    assert answer.code == 0, answer
    answer = vllmops("doctor", *fleet.words(), "--json")
    assert answer.code == 0, answer
    assert [part["code"] for part in answer.data["unseen"]] == ["remote"]
    assert answer.data["vllm_version"] == "0.32.0"
    answer = vllmops("wait", *fleet.words(), "--for", "ready", "--timeout", "60", "--json")
    assert (answer.code, answer.data["state"]) == (0, "ready")


def test_actors_of_the_server(
    vllmops: Vllmops, private_fleet: Fleet, spawn: Spawn, tmp_path: Path
) -> None:
    """Ray's actors are not below the server; their agents say whose they are."""
    private_fleet.child.run(make_rank_code("api", sizes=(1, 2, 1)))
    near, away, stranger = (
        spawn("ray::RayWorkerProc.run", Role.WORKER, tmp_path / home)
        for home in ("there", "elsewhere", "there")
    )
    for actor, instance, rank in ((near, "1", 0), (away, "1", 1), (stranger, "2", 1)):
        actor.run(make_rank_code("worker", instance=instance, rank=rank, sizes=(1, 2, 1)))

    def describe_processes() -> dict[int, str]:
        answer = vllmops("ps", *private_fleet.words(), "--json")
        assert answer.code == 0, answer
        (row,) = answer.data["instances"]
        return {p["pid"]: f"{p['role']} {p['ranks']} {p['agent']}" for p in row["processes"]}

    rows = {near.process.pid: "worker DP0 TP0 answers", away.process.pid: "worker DP0 TP1 answers"}
    until(lambda: rows.items() <= describe_processes().items(), explain=describe_processes)
    assert stranger.process.pid not in describe_processes()

    def list_dumped_pids() -> set[int]:
        answer = vllmops("stacks", "dump", *private_fleet.words(), "--json")
        return {process["pid"] for process in answer.data["processes"]}

    until(
        lambda: {near.process.pid, away.process.pid} < list_dumped_pids(), explain=list_dumped_pids
    )
    url = f"{private_fleet.url}{PROCESSES}/{stranger.process.pid}/hello"
    refused = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "agent.gone")


def test_an_action(vllmops: Vllmops, fleet: Fleet) -> None:
    answer = vllmops("cache", "reset", *fleet.words(), "--json")
    # There is no engine client in it to reset; that is what its agent says.
    assert (answer.code, answer.error["code"]) == (5, "agent.broken")
    assert "engine client" in answer.error["message"]


def test_cache_inspect_reports_an_agent_that_does_not_answer(
    vllmops: Vllmops, fleet: Fleet, patience: pytest.MonkeyPatch
) -> None:
    patience.undo()
    os.kill(fleet.engine, signal.SIGSTOP)
    time.sleep(1.2)
    answer = vllmops("cache", "inspect", *fleet.words(), "--json")
    # On a busy machine others may be late, too.
    (silent,) = (one for one in answer.data["silent"] if one["pid"] == fleet.engine)
    assert silent["code"] == "agent.timeout"
    assert silent["beat_age_s"] > 1
    assert silent["hint"].startswith("on the machine of the server: ")
    os.kill(fleet.engine, signal.SIGCONT)


def test_without_a_token_or_with_a_wrong_one(
    vllmops: Vllmops, fleet: Fleet, tmp_path: Path
) -> None:
    (other := tmp_path / "other").write_text("another-" * 8)
    other.chmod(0o600)
    answer = vllmops("status", "-t", fleet.url, "--admin-token", str(other), "--json")
    assert (answer.code, answer.error["code"]) == (4, "admin.refused")
    answer = vllmops("status", "-t", "https://192.0.2.1", "--json")
    assert (answer.code, answer.error["code"]) == (2, "target.remote")
    assert "--admin-token" in answer.error["hint"]
    # As the environment has it for `serve` and `keys push`.
    environment = {"VLLMOPS_ADMIN_TOKEN_FILE": str(fleet.token)}
    assert vllmops("status", "-t", fleet.url, env=environment).code == 0


@pytest.mark.parametrize(
    "words",
    [("stop",), ("restart",), ("logs",), ("attach",)],
    ids=lambda words: words[0],
)
def test_local_commands_reject_a_remote_target(
    vllmops: Vllmops, tmp_path: Path, words: tuple[str, ...]
) -> None:
    environment = {"VLLMOPS_ADMIN_TOKEN_FILE": str(token_file(tmp_path))}
    answer = vllmops(*words, "-t", "https://192.0.2.1", "--json", env=environment)
    assert (answer.code, answer.error["code"]) == (2, "target.remote")
    assert "own machine only" in answer.error["message"]


@pytest.mark.parametrize(
    "words",
    [
        *(("stop",), ("restart",), ("logs",), ("attach",), ("watch",), ("bundle",)),
        *(("memory", "record"), ("keys", "push"), ("responses", "list")),
        ("responses", "show", "resp_1"),
    ],
    ids=" ".join,
)
def test_single_server_commands_reject_several_targets(
    vllmops: Vllmops, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (file := tmp_path / "fleet").write_text("a\nb\n")
    for targets in (("-t", "a", "--target", "b"), ("-t", f"@{file}"), ("-ta", "--target=a")):
        answer = vllmops(*words, *targets, "--json")
        assert (answer.code, answer.error["code"]) == (2, "usage")
        assert "works with one server" in answer.error["message"]


@pytest.mark.parametrize("words", [("status",), ("cache", "inspect"), ("doctor",)])
def test_no_token_goes_over_a_line_that_others_may_read(
    vllmops: Vllmops, tmp_path: Path, words: tuple[str, ...]
) -> None:
    token = ("--admin-token", str(token_file(tmp_path)))
    for url in ("http://192.0.2.1:8000", "http://localhost.example"):
        answer = vllmops(*words, "-t", url, *token, "--json")
        assert (answer.code, answer.error["code"]) == (2, "admin.plain")
    every = ("0.0.0.0", "[::ffff:127.0.0.1]")
    for host in (*own_addresses(), *every):
        answer = vllmops(*words, "-t", f"http://{host}:9", *token, "--json")
        if host in {*own_addresses(), *every}:  # that of another test's network may be gone
            assert (answer.code, answer.error["code"]) == (5, "admin.unreachable"), host


def own_addresses() -> set[str]:
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }


def test_a_server_without_admin_routes(vllmops: Vllmops, spawn: Spawn, tmp_path: Path) -> None:
    bare = Fleet(spawn, tmp_path, token=False)
    answer = vllmops("status", *bare.words(), "--json")
    assert (answer.code, answer.error["code"]) == (1, "admin.no-route")
    assert "--admin-token" in answer.error["hint"]
    bare.kill()


def test_a_recording_of_memory(vllmops: Vllmops, fleet: Fleet, home: Path) -> None:
    words = ("--interval", "0.2", "--duration", "0.6", "--json")
    answer = vllmops("memory", "record", *fleet.words(), *words)
    assert answer.code == 0, answer
    for sample in answer.data["samples"]:
        assert roles(sample["processes"]) == fleet.pids
        for process in sample["processes"]:
            resident = psutil.Process(process["pid"]).memory_info().rss
            assert process["rss_bytes"] == pytest.approx(resident, rel=0.5)
    (kept,) = (home / "memory").glob("*.jsonl")
    assert kept.parent == home / "memory"


def test_the_last_steps_of_an_engine(vllmops: Vllmops, private_fleet: Fleet) -> None:
    code = repr(SCHEDULER + "step(); s.schedule()") + "\n"
    engine = f"pipe = below[0].stdin; pipe.write({code.encode()!r}); pipe.flush()"
    private_fleet.child.run(f"{engine}; below[0].stdout.readline()")
    answer = vllmops("doctor", "--history", *private_fleet.words(), "--json")
    assert answer.code == 0, answer
    (found,) = answer.data["recordings"]
    assert (found["pid"], found["alive"], found["dp_rank"]) == (private_fleet.engine, True, 1)
    assert "has not ended for" in found["end"]
    assert [part["code"] for part in answer.data["unseen"]] == ["remote"]


def test_a_bundle_of_what_can_be_had(vllmops: Vllmops, fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "bundle.tar.gz"
    answer = vllmops("bundle", *fleet.words(), "-o", str(file), "--timeout", "60", "--json")
    assert answer.code == 0, answer
    names = {part["name"] for part in answer.data["parts"]}
    assert {"stacks.jsonl", "caches.json", "server.json"} <= names
    # Nothing is read of the processes of this machine that have the same pids.
    assert not [name for name in names if name.startswith(("proc/", "log", "config", "collect"))]
    assert any("another machine" in part["why"] for part in answer.data["missing"])
    planned = vllmops("bundle", *fleet.words(), "--dry-run", "--json").data["parts"]
    assert not [part for part in planned if part["name"].startswith(("proc/", "log"))]
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is None or TOKEN.encode() not in content.read()
    assert vllmops("doctor", str(file), "--json").code == 0


@pytest.mark.first
def test_a_watch_follows_it(vllmops: Vllmops, private_fleet: Fleet, home: Path) -> None:
    watch = background(
        *("watch", *private_fleet.words(), "--interval", "0.3", "--json"),
        env={"VLLMOPS_HOME": str(home)},
    )
    assert watch.stderr is not None
    next(line for line in watch.stderr if "watching" in line)
    private_fleet.child.kill()
    try:
        next(line for line in watch.stderr if "has ended" in line)
        time.sleep(11)  # so long that it looks for a successor, and finds none
    finally:
        watch.send_signal(signal.SIGINT)
        out, err = watch.communicate(timeout=90)
    assert "Traceback" not in err
    assert [event["event"] for event in json.loads(out)["data"]["events"]] == ["ended"], out + err


@pytest.mark.root_only
def test_a_certificate_that_nobody_vouches_for(
    vllmops: Vllmops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = ("--admin-token", str(token_file(tmp_path)), "--json")
    with far(tmp_path) as (url, certificate):
        answer = vllmops("status", "-t", url, *token)
        assert (answer.code, answer.error["code"]) == (5, "admin.unreachable")
        assert "certificate" in answer.error["message"]
        trusted = {"SSL_CERT_FILE": str(certificate)}
        until(lambda: vllmops("status", "-t", url, *token, env=trusted).code == 0)
        plain = url.replace("https", "http")
        answer = vllmops("status", "-t", plain, *token, env=trusted)
        assert (answer.code, answer.error["code"]) == (2, "admin.plain")


def test_a_tunnel_of_this_user_where_the_kernel_tells_no_owners(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a Mac, of which none is at hand; psutil tells the sockets of one's own processes.
    monkeypatch.setattr(listeners, "TABLES", ())
    monkeypatch.setattr(listeners, "OWNERS", listeners.PortOwners())
    assert listeners.explain_distrust(fleet.url) == ""
