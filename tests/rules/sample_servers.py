"""Snapshots of servers to change: a healthy one, and its parts."""

from __future__ import annotations

from typing import Any

import msgspec

from vllmops.model.agent_state import EngineState, Heartbeat, Hello, Traffic
from vllmops.model.server_snapshot import (
    AgentReport,
    DiskSpace,
    Machine,
    ProcessHeartbeat,
    ProcessState,
    ServerSample,
    ServerSnapshot,
)
from vllmops.model.vllm_metrics import Metrics

GIB = 1 << 30
PIDS = {"api": 10, "engine": 20, "worker": 30}
QUIET = Metrics(running=0, waiting=0, kv_cache_usage=0.1, tokens=100, finished=10, awake=1)


def pulse(role: str, age_s: float = 0.5, **fields: Any) -> ProcessHeartbeat:
    """A heartbeat; of an engine that stands still nowhere, unless told otherwise."""
    own = {"engine": {"current_step": 5, "running": 0, "waiting": 0, "still_s": 0.0}}
    beat = Heartbeat(
        monotonic=1.0,
        sequence=1,
        pid=PIDS[role],
        start_ticks=1,
        role=role,
        **{**own.get(role, {}), **({"engine_requests": 0} if role == "api" else {}), **fields},
    )
    return ProcessHeartbeat(role=role, pid=PIDS[role], age_s=age_s, heartbeat=beat)


def process(role: str, state: str = "S", **fields: Any) -> ProcessState:
    pid = fields.pop("pid", PIDS.get(role, 99))
    return ProcessState(role=role, pid=pid, create_time=1.0, state=state, **fields)


def make_healthy_sample(at_s: float, **fields: Any) -> ServerSample:
    """A look at a server that is well, as far as nothing else is told."""
    whole: dict[str, Any] = {
        "heartbeats": tuple(map(pulse, PIDS)),
        "metrics": QUIET,
        "health": 200,
        "processes": tuple(map(process, PIDS)),
    }
    return ServerSample(at_s=at_s, **{**whole, **fields})


def make_agent_report(role: str, **fields: Any) -> AgentReport:
    hello = Hello(agent="1.0", pid=PIDS[role], start_ticks=1, role=role, **fields)
    state = EngineState(running=0, waiting=0, current_step=5) if role == "engine" else EngineState()
    return AgentReport(role=role, pid=PIDS[role], hello=hello, engine=state, traffic=Traffic())


MACHINE = Machine(
    memory_total=16 * GIB,
    memory_available=8 * GIB,
    disks=(DiskSpace("/", "state and logs", 100 * GIB, 50 * GIB),),
)


def healthy(**fields: Any) -> ServerSnapshot:
    """A healthy server with agents, but for the fields that are given."""
    whole = ServerSnapshot(
        taken_at=1e9,
        vllmops="1.0",
        server="demo",
        url="http://127.0.0.1:8000",
        state="ready",
        vllm_version="0.32.0",
        samples=(make_healthy_sample(0.0), make_healthy_sample(1.0)),
        reports=tuple(map(make_agent_report, PIDS)),
        machine=MACHINE,
    )
    return msgspec.structs.replace(whole, **fields)


def make_sample_series(*item: dict[str, Any], apart_s: float = 1.0) -> tuple[ServerSample, ...]:
    """Looks that differ from a healthy one by some fields."""
    return tuple(
        make_healthy_sample(index * apart_s, **fields) for index, fields in enumerate(item)
    )


def metrics(**fields: float) -> Metrics:
    return msgspec.structs.replace(QUIET, **fields)
