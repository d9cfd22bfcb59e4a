"""``vllmops attach``: to a healthy server under load, and to a stock one that hangs both ways."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..support.waiting import until
from .conftest import SHM, Cli, Launched, Live, Ran, Stock, is_process_alive, launch
from .hangs import FEW_IMAGES, leave_ghost
from .test_cache import told_as
from .test_hang import Requests, ghosts, text


@pytest.fixture(scope="module")
def stock(cli: Cli, old_code: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """What anybody starts who knows nothing of vllmops, with code that can hang."""
    plug_in = {"PYTHONPATH": os.fspath(old_code), "VLLM_PLUGINS": "old_code,patient,forked"}
    launched = launch(cli, tmp_path_factory.mktemp("stock") / "log", plug_in, *FEW_IMAGES)
    try:
        yield launched
    finally:
        launched.stop()


@pytest.fixture(scope="module")
def bare(cli: Cli, stock: Launched) -> Iterator[Live]:
    """Without the agent; it starts while the other one does."""
    yield cli.serve("bare", "--demo", "text", "--env", "VLLMOPS_DISABLE=1")
    cli("stop", "bare", "--force")


def roles(ran: Ran) -> set[str]:
    return {process["role"] for process in ran.data["processes"]}


def test_without_the_agent_it_serves_and_is_told_as_such(bare: Live) -> None:
    row = bare.row
    assert row["state"] == "ready"
    assert {p["agent"] for p in row["processes"] if p["role"] != "other"} == {"absent"}
    assert bare.complete().status_code == 200
    inspected = bare.cli("cache", "inspect", "-t", "bare")
    assert inspected.code == 5
    assert "vllmops attach" in inspected.err
    assert "running" in bare.cli("status", "bare").out


def test_a_healthy_server_under_load_loses_no_request(bare: Live) -> None:
    cli = bare.cli
    plan = cli("attach", "-t", "bare", "--dry-run", "--json")
    assert (plan.code, roles(plan)) == (0, {"api", "engine", "worker"})
    assert cli("attach", "-t", "bare").code == 2  # nobody is there to ask
    assert {p["agent"] for p in bare.row["processes"] if p["role"] != "other"} == {"absent"}
    answers: list[int] = []
    over = threading.Event()

    def send_completions() -> None:
        while not over.is_set():
            answers.append(bare.complete(max_tokens=20).status_code)

    askers = [threading.Thread(target=send_completions) for _ in range(2)]
    for item in askers:
        item.start()
    until(lambda: len(answers) > 5)
    ran = cli("attach", "-t", "bare", "--patch", "--yes", "--json")
    reached = len(answers)
    until(lambda: len(answers) > reached + 5)
    over.set()
    for item in askers:
        item.join()
    assert (ran.code, ran.data["silent"], roles(ran)) == (0, [], {"api", "engine", "worker"})
    for process in ran.data["processes"]:
        assert process["stopped_s"] < 3
        assert process["seconds"] < 15
    assert set(answers) == {200}
    assert {p["agent"] for p in bare.row["processes"] if p["role"] != "other"} == {"answers"}
    # What began before is counted as well, so nothing is left over, nor below zero.
    assert "0 running, 0 waiting" in cli("status", "bare").out
    told_as(bare, "text-model", {"encoder"})
    states = {
        patch["id"]: {(process["state"], process["reason"]) for process in patch["processes"]}
        for patch in cli("patches", "list", "-t", "bare", "--json").data["patches"]
    }
    assert states["mm-lru-stale-eviction"] == {("applied", None)}
    assert states["encoder-decoder-slots"] == {("off", "it can't be applied to a running server")}
    again = cli("attach", "-t", "bare", "--yes", "--json")
    assert (again.code, again.error["code"]) == (1, "attach.already")


@pytest.fixture(scope="module")
def hung(cli: Cli, stock: Launched) -> Stock:
    """EngineCore will hang, and so will the API server's renderer."""

    stock.wait_up()
    return Stock(cli, str(stock.process.pid))


def spins(pid: int) -> bool:
    return psutil.Process(pid).cpu_percent(1) > 50


def test_a_hung_stock_server_goes_on(hung: Stock) -> None:
    url, cli = hung.url, hung.cli
    assert leave_ghost(url)
    pids = hung.pids()
    engine = Requests(url, *[(seed,) for seed in range(10)])
    until(lambda: spins(pids["engine"]))
    front = Requests(url, tuple(range(200, 207)))
    until(lambda: spins(pids["api"]))
    assert len(engine.answers) < len(engine.sent)
    ran = cli("attach", "-t", hung.name, "--yes", "--json")
    assert (ran.code, ran.data["silent"], roles(ran)) == (0, [], {"api", "engine", "worker"})
    assert ghosts(hung) == {"api", "engine"}

    def has_answers_after_repair() -> bool:
        """What gets on to the engine may be stuck there in the same way."""
        assert cli("cache", "repair", "-t", hung.name).code == 0
        return front.answers.keys() == set(front.sent)

    until(has_answers_after_repair, 120)
    assert front.all_answered()
    assert engine.all_answered()
    assert text(url, 60) == 200
    assert hung.pids() == pids


def test_stop_ends_a_server_that_vllmops_did_not_start(
    stock: Launched, hung: Stock, bare: Live
) -> None:
    cli, row, others = hung.cli, hung.row, bare.footprint().segments
    assert row["started_by_vllmops"] is False
    assert stock.url.endswith(f":{row['port']}")
    assert row["state"] == "ready"
    assert cli("wait", hung.name, "--for", "ready").code == 0
    assert {p["agent"] for p in row["processes"] if p["role"] != "other"} == {"answers"}
    assert cli("cache", "inspect", "-t", hung.url).code == 0
    assert cli("stop", hung.name).code == 0
    assert stock.process.wait(10) is not None
    assert not any(is_process_alive(process["pid"]) for process in row["processes"])
    assert bare.row["state"] == "ready"  # the other one was left alone
    assert others
    assert all((SHM / name).exists() for name in others)


def test_an_attached_server_stops_as_any(bare: Live) -> None:
    footprint = bare.footprint()
    assert bare.cli("stop", "bare").code == 0
    until(lambda: not footprint.list_leftovers(), 10, footprint.list_leftovers)
