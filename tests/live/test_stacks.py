"""Stacks of a real server."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Live


def test_every_process_is_dumped_side_by_side(vision_server: Live, tmp_path: Path) -> None:
    saved = tmp_path / "stacks.json"
    ran = vision_server.cli(
        "stacks", "dump", "-t", vision_server.name, "--json", "--save", str(saved)
    )
    assert ran.code == 0, ran.err
    assert json.loads(saved.read_text())["processes"] == ran.data["processes"]
    dumped = {process["role"]: process for process in ran.data["processes"]}
    pids = vision_server.pids()
    assert {role: dumped[role]["pid"] for role in pids} == pids
    busy = {"api": "run", "engine": "run_busy_loop", "worker": "worker_busy_loop"}
    for role, function in busy.items():
        threads = {thread["name"]: thread for thread in dumped[role]["threads"]}
        frames = [frame["function"] for frame in threads["MainThread"]["frames"]]
        assert any(function in frame for frame in frames), frames
        assert "vllmops-agent" in threads
        assert not any(
            frame.get("locals") for thread in threads.values() for frame in thread["frames"]
        )


def test_the_text_names_every_process(vision_server: Live) -> None:
    ran = vision_server.cli("stacks", "dump", "-t", vision_server.name)
    assert ran.code == 0, ran.err
    for pid in vision_server.pids().values():
        assert f"pid {pid}" in ran.out
    assert vision_server.row["state"] == "ready"
