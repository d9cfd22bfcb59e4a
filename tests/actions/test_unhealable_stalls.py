"""What is left once a server was healed."""

from __future__ import annotations

import pytest

from vllmops.actions import unhealable_stalls
from vllmops.observe import server_snapshot
from vllmops.rules import diagnosis, progress
from vllmops.rules.stacks.explanation import STOPPED
from vllmops.servers.discovery import Server

SERVER = Server(None, ())
FINDING = STOPPED.make_finding("engine 1", "state T")


@pytest.mark.parametrize(("settle_s", "is_stuck"), [(0.0, True), (600.0, False)])
def test_healed_server_gets_time_to_finish_a_step(
    monkeypatch: pytest.MonkeyPatch, settle_s: float, is_stuck: bool
) -> None:
    # A server whose first step after a SIGCONT takes a second needs a machine that is busy.
    looks = iter([["stall"], ["stall"], []])
    monkeypatch.setattr(unhealable_stalls, "collect_samples", lambda _: [])
    monkeypatch.setattr(progress, "find_stalls", lambda _: next(looks))
    monkeypatch.setattr(server_snapshot, "examine_server", lambda *_, **__: None)
    monkeypatch.setattr(diagnosis, "diagnose_snapshot", lambda _: None)
    monkeypatch.setattr(diagnosis, "find_cause", lambda *_: FINDING)
    monkeypatch.setattr(unhealable_stalls, "count_in_flight_and_background", lambda _: (None, 0))
    assert (
        unhealable_stalls.find_remaining_stall(SERVER, settle_s=settle_s) is not None
    ) is is_stuck
