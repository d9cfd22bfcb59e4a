"""What an examination gathers of the machine."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from vllmops.collect.machine import gpu, kernel_log, shared_memory
from vllmops.collect.machine.processes import Process
from vllmops.model.roles import Role
from vllmops.model.server_snapshot import Xid
from vllmops.observe import server_snapshot
from vllmops.servers.discovery import Server
from vllmops.servers.record import InstanceRecord


def test_application_xids_of_other_processes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = (
        Xid("0000:3b:00", 31, "pid=7, name=VLLM::EngineCor, MMU Fault", 5.0),
        Xid("0000:3b:00", 43, "pid='8', name=VLLM::EngineCor, channel 0x00000046", 4.0),
        Xid("0000:3b:00", 79, "pid=8, GPU has fallen off the bus.", 3.0),
        Xid("0000:3b:00", 13, "told by NVML", 2.0),
    )
    monkeypatch.setattr(kernel_log, "read_xids", lambda _: logged)
    monkeypatch.setattr(gpu, "collect_xids", lambda: ())
    monkeypatch.setattr(shared_memory, "explain_hidden_processes", lambda: "")
    server = Server("demo", (Process(Role.ENGINE, 7, 0),))
    assert [(xid.number, xid.pid) for xid in server_snapshot.collect_xids(server)] == [
        (31, 7),
        (79, 8),
        (13, None),
    ]
    monkeypatch.setattr(shared_memory, "explain_hidden_processes", lambda: "this is a container")
    assert server_snapshot.collect_xids(server) == logged


def test_a_server_that_is_over_had_its_own_gpu_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    since: list[float] = []

    def record_xid_query(since_s: float) -> tuple[Xid, ...]:
        since.append(since_s)
        return logged

    logged = (Xid("0000:3b:00", 31, "pid=7, MMU Fault", 5.0),)
    monkeypatch.setattr(kernel_log, "read_xids", record_xid_query)
    monkeypatch.setattr(gpu, "collect_xids", lambda: ())
    monkeypatch.setattr(shared_memory, "explain_hidden_processes", lambda: "")
    record = msgspec.convert(
        {
            "name": "demo",
            "command": ["vllm"],
            "directory": "/",
            "environment": {},
            "model": "m",
            "host": "127.0.0.1",
            "port": 8000,
            "detached": True,
            "created_at": 0.0,
            "state": "failed",
            "started_at": 1000.0,
            "processes": [{"role": "engine", "pid": 7, "start_ticks": 0}],
        },
        InstanceRecord,
    )
    monkeypatch.setattr(server_snapshot, "time", SimpleNamespace(time=lambda: 1100.0))
    assert server_snapshot.collect_xids(Server("demo", (), record=record)) == logged
    assert since == [100.0]
