"""Looks at real processes, and in threads of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllmops.model.targets import RemoteAccess, access
from vllmops.servers.discovery import Server, resolve_server
from vllmops.top import server_followers, table_rows
from vllmops.top.server_followers import FollowedServers, ServerFollower
from vllmops.watch.watch_target import ServerPhase

from ..support.fleet import Fleet
from ..support.waiting import until
from .sample_snapshots import Fake, make_working_samples


def test_an_unresponsive_server_delays_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    counts: dict[str, int] = {"well": 0, "hung": 0}

    class Counting(Fake):
        def take_sample(self) -> None:
            counts[self.target] += 1
            if self.target == "hung":
                hangs.wait()

    monkeypatch.setattr(server_followers, "LOOK_S", 0.01)
    board = FollowedServers(("hung", "well"), Counting)
    board.start_following()
    until(lambda: counts["well"] > 5 and counts["hung"])
    assert counts["hung"] == 1
    board.stop_following()
    hangs.set()


def test_a_look_that_fails_is_told_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(Fake):
        def take_sample(self) -> None:
            self.samples = (*self.samples, *make_working_samples(until_s=0))
            raise RuntimeError("broken")

    monkeypatch.setattr(server_followers, "LOOK_S", 0.01)
    board = FollowedServers(("demo",), Failing)
    board.start_following()
    until(lambda: len(board.followers["demo"].samples) > 1)
    assert "RuntimeError: broken" in board.failures[0]
    board.stop_following()


def test_an_instance_is_followed_from_its_start_to_its_end(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_followers, "METRICS_S", 600.0
    )  # soon, however long the machine takes
    follower = ServerFollower("demo")
    follower.take_sample()
    assert follower.last_sample
    assert follower.last_sample.problem
    assert follower.last_sample.problem.code == "target.unknown"
    lab.serve("demo")
    follower.resolved_s = float("-inf")
    follower.reads_log = True
    follower.take_sample()
    row = table_rows.make_server_row("demo", follower.samples, 0.0)
    assert (row.state, follower.failure) == ("ready", None)
    assert {item.role for node in row.nodes for item in node.processes} == {
        "api",
        "engine",
        "worker",
    }
    assert follower.last_sample.server_sample
    assert follower.last_sample.server_sample.metrics is not None
    follower.take_sample()  # soon after: the server is not asked again
    assert follower.last_sample.server_sample
    assert follower.last_sample.server_sample.metrics is None
    assert follower.log
    assert follower.lines_read == len(follower.log)
    assert lab.vllmops("stop", "demo", "--force").code == 0
    follower.take_sample()
    row = table_rows.make_server_row("demo", follower.samples, 0.0)
    assert row.state == "stopped"
    assert row.gaps[0].hint == "vllmops logs demo"


@pytest.mark.parametrize(
    ("states", "hints"), [(("Z", ""), []), (("Z", "S"), ["vllmops attach -t 11"])]
)
def test_no_agent_is_recommended_for_processes_that_have_ended(
    states: tuple[str, ...], hints: list[str]
) -> None:
    server = Server(None, ())
    processes = [SimpleNamespace(state=state) for state in states]
    follower: Any = ServerFollower("11", server)
    follower.watched_server, follower.phase = SimpleNamespace(server=server), ServerPhase.UP
    follower.samples = (
        SimpleNamespace(server_sample=SimpleNamespace(heartbeats=(), processes=processes)),
    )
    follower.fetch_details()
    assert [each.hint for each in follower.details.gaps] == hints


def test_new_servers_are_discovered_and_strangers_that_ended_forgotten(lab: Any) -> None:
    board = FollowedServers((), Fake)
    board.discover_servers()
    assert board.followers == {}
    lab.serve("demo")
    stranger = lab.stranger()
    board.discover_servers()
    assert board.followers.keys() == {"demo", str(stranger.pid)}
    board.stop_following()
    gone = board.followers[str(stranger.pid)] = ServerFollower(
        str(stranger.pid), resolve_server(str(stranger.pid))
    )
    gone.take_sample()
    os.killpg(stranger.pid, signal.SIGKILL)
    until(lambda: stranger.poll() is not None)

    def is_stranger_forgotten() -> bool:  # once all its processes are gone
        gone.take_sample()
        board.discover_servers()
        return board.followers.keys() == {"demo"}

    until(is_stranger_forgotten)


def test_a_server_on_another_machine_is_seen_by_its_url(spawn: Any, tmp_path: Any) -> None:
    fleet = Fleet(spawn, tmp_path)
    before = access.set(RemoteAccess(fleet.token))
    try:
        follower = ServerFollower(fleet.url)
        follower.take_sample()
        follower.fetch_details()
        follower.take_sample()
        row = table_rows.make_server_row(fleet.url, follower.samples, 0.0)
        assert (row.state, row.gaps) == ("up", ())
        (node,) = row.nodes
        assert {item.role for item in node.processes} == {"api", "engine", "worker"}
        assert follower.details.caches
        os.kill(fleet.api, signal.SIGKILL)

        def state() -> str | None:
            follower.take_sample()
            return table_rows.make_server_row(fleet.url, follower.samples, 0.0).severity

        until(lambda: state() == "error")
    finally:
        access.reset(before)
        fleet.kill()


def test_two_looks_are_enough_for_rates_and_no_server_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_followers, "LOOK_S", 0.01)
    hangs = threading.Event()
    order: list[str] = []

    class Slow(Fake):
        def take_sample(self) -> None:
            order.append(self.target)
            if self.target == "hung":
                hangs.wait()

    def read_clock() -> float:
        """The time is up once the one that answers has been seen."""
        if not begun:
            begun.append(0.0)
            return 0.0
        until(lambda: order.count("well") == 2)
        return 3.0

    begun: list[float] = []
    monkeypatch.setattr(
        server_followers, "time", SimpleNamespace(monotonic=read_clock, sleep=time.sleep)
    )
    slow: list[ServerFollower] = [Slow("hung"), Slow("well", Server(None, ()))]
    server_followers.take_two_samples(slow, 3.0)
    until(lambda: "hung" in order)
    assert sorted(order) == ["hung", "well", "well"]
    hangs.set()
