"""Every rule finds what it is about, and nothing on a healthy server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from vllmops.collect.machine.ptrace_permission import (
    CAP_SYS_PTRACE,
    PtraceRights,
    make_refusal_error,
)
from vllmops.model.agent_state import STORE_AWAY
from vllmops.model.caches import CacheSample, CacheSetup, CacheSnapshot, ProcessCaches
from vllmops.model.patches import PatchReport, PatchState, ProcessPatches
from vllmops.model.server_snapshot import (
    Canary,
    DiskSpace,
    Exposure,
    Gap,
    Gpu,
    ShmLeftover,
    ThreadTimeslices,
    Xid,
)
from vllmops.rules.server_state import CATALOGUE, diagnose_server

from .sample_servers import (
    GIB,
    MACHINE,
    PIDS,
    QUIET,
    healthy,
    make_agent_report,
    make_healthy_sample,
    make_sample_series,
    metrics,
    process,
    pulse,
)


def processes_without(role: str) -> tuple[Any, ...]:
    return tuple(process(item) for item in PIDS if item != role)


def processes_with_state(role: str, state: str) -> tuple[Any, ...]:
    return tuple(process(item, state if item == role else "S") for item in PIDS)


def with_packages(versions: dict[str, str]) -> Any:
    return msgspec.structs.replace(make_agent_report("engine"), packages=versions)


def patches(state: PatchState, **fields: Any) -> tuple[ProcessPatches, ...]:
    verdict = PatchReport(id="mm-lru-ghost-keys", state=state, **fields)
    return (
        ProcessPatches(pid=20, role="engine", vllm_version="0.23.0", patches=[verdict], seconds=0),
    )


def machine(**fields: Any) -> Any:
    return msgspec.structs.replace(MACHINE, **fields)


def make_metrics_growth(**fields: float) -> Any:
    """Two looks, between which some figures grew."""
    zero = dict.fromkeys(fields, 0.0)
    return make_sample_series({"metrics": metrics(**zero)}, {"metrics": metrics(**fields)})


TWO_WORKERS = CacheSnapshot(
    server="demo",
    samples=[
        CacheSample(
            taken_at=1.0,
            processes=[
                ProcessCaches(pid=20, parent=10, role="engine", setup=CacheSetup(tensor_parallel=2))
            ],
        )
    ],
)
EXPOSED = Exposure(addresses=("0.0.0.0:8000",), exposed=True, is_open=True, dev_routes=False)
LATENCY = {"queue_n": 10.0, "prefill_n": 10.0, "first_n": 10.0, "whole_n": 10.0}

SPINNING: dict[str, Any] = {
    "utilization": 0.97,
    "memory_busy": 0.0,
    "watts": 22.0,
    "limit_watts": 140.0,
}

FOUND: list[tuple[str, dict[str, Any]]] = [
    ("server.failed", {"state": "failed"}),
    (
        "engine.missing",
        {
            "samples": make_sample_series(
                {}, {"processes": processes_without("engine"), "health": 503}
            )
        },
    ),
    ("engine.missing", {"samples": make_sample_series({}, {"processes": (process("api"),)})}),
    ("api.unhealthy", {"samples": make_sample_series({}, {"health": 503})}),
    ("worker.missing", {"caches": TWO_WORKERS}),
    (
        "process.dead",
        {"samples": make_sample_series({}, {"processes": processes_with_state("worker", "Z")})},
    ),
    (
        "process.stopped",
        {"samples": make_sample_series(*[{"processes": processes_with_state("worker", "T")}] * 2)},
    ),
    (
        "process.uninterruptible",
        {"samples": make_sample_series(*[{"processes": processes_with_state("worker", "D")}] * 2)},
    ),
    (
        "process.no-python",
        {
            "samples": make_sample_series({}, {"heartbeats": (pulse("engine", age_s=12),)}),
            "reports": (make_agent_report("api"),),
        },
    ),
    ("process.orphaned", {"machine": machine(orphans=(process("engine", pid=7),))}),
    ("agent.silent", {"gaps": (Gap("agent of engine 20", "agent.timeout", "no answer"),)}),
    ("agent.version", {"vllmops": "2.0"}),
    ("agent.version", {"gaps": (Gap("agent of api 10", "agent.older", "older"),)}),
    ("agent.problem", {"reports": (make_agent_report("engine", problems=("another shape",)),)}),
    ("patch.failed", {"patches": patches(PatchState.FAILED, reason="another shape")}),
    ("patch.off", {"patches": patches(PatchState.OFF)}),
    ("versions.known-bad", {"reports": (with_packages({"flashinfer-python": "0.6.13"}),)}),
    ("gpu.spinning", {"machine": machine(gpus=(Gpu(**SPINNING, index=0),))}),
    # The driver in a container may tell the pids of the host.
    ("gpu.spinning", {"machine": machine(gpus=(Gpu(**SPINNING, index=0, by_pid={4711: GIB}),))}),
    ("gpu.xid", {"machine": machine(xids=(Xid("0000:3b:00", 79, "pid=12, fell off", 5.0),))}),
    ("vllm.known-defect", {"reports": (), "vllm_version": "0.23.0"}),
    ("machine.shm-leftovers", {"machine": machine(leftovers=(ShmLeftover("psm_1", GIB, 90.0),))}),
    ("machine.disk", {"machine": machine(disks=(DiskSpace("/", "state", 100 * GIB, GIB // 2),))}),
    ("machine.memory", {"machine": machine(memory_available=GIB // 2)}),
    ("gpu.bad-memory", {"machine": machine(gpus=(Gpu(index=0, bad_memory=1),))}),
    ("gpu.throttled", {"machine": machine(gpus=(Gpu(index=0, throttled=True),))}),
    (
        "responses.store-in-memory",
        {
            "reports": (make_agent_report("api"), make_agent_report("api")),
            "guard": Exposure(store="memory"),
        },
    ),
    (
        "responses.store-unavailable",
        {"samples": make_sample_series({}, {"heartbeats": (pulse("api", unready=STORE_AWAY),)})},
    ),
    ("security.no-api-key", {"guard": EXPOSED}),
    (
        "security.dev-routes",
        {"guard": msgspec.structs.replace(EXPOSED, is_open=False, dev_routes=True)},
    ),
    ("security.signing-key", {"guard": Exposure(signing_key="weak")}),
    ("tools.py-spy", {"gaps": (Gap("stacks", "pyspy.missing", "not installed"),)}),
    ("canary.failed", {"canary": Canary("timeout", 15.0, "no answer")}),
    ("canary.failed", {"canary": Canary("refused", 0.1, "it answered 500")}),
    (
        "canary.late",
        {"canary": Canary("timeout", 15.0), "samples": make_metrics_growth(tokens=500)},
    ),
    (
        "kv-cache.pressure",
        {
            "samples": make_sample_series(
                *[{"metrics": metrics(kv_cache_usage=0.99, waiting=3)}] * 2
            )
        },
    ),
    ("kv-cache.preemptions", {"samples": make_metrics_growth(preemptions=20)}),
    ("latency.queueing", {"samples": make_metrics_growth(**LATENCY, queue_s=80.0, whole_s=100.0)}),
    (
        "latency.first-token",
        {"samples": make_metrics_growth(**LATENCY, queue_s=1.0, prefill_s=2.0, first_s=30.0)},
    ),
    (
        "latency.next-token",
        {
            "samples": make_metrics_growth(
                between_s=100.0, between_n=100.0, decode_s=10.0, decode_n=5.0
            )
        },
    ),
    ("requests.errors", {"samples": make_metrics_growth(errors=5, answers=50)}),
    ("requests.errors", {"samples": make_metrics_growth(failed=5, finished=50)}),
]


@pytest.mark.parametrize(("code", "fields"), FOUND, ids=[code for code, _ in FOUND])
def test_each_server_problem_yields_only_its_finding(code: str, fields: dict[str, Any]) -> None:
    assert {finding.code for finding in diagnose_server(healthy(**fields))} == {code}


RIGHTS = PtraceRights(uid=1000, target_uid=1000, effective=0, bounding=CAP_SYS_PTRACE)
REFUSED = {
    "stacks.ptrace-scope": {"ptrace_scope": 1},
    "stacks.other-user": {"target_uid": 0},
    "stacks.no-capability": {"uid": 0, "target_uid": 0, "bounding": 0},
    "stacks.seccomp": {"effective": CAP_SYS_PTRACE, "seccomp": True},
    "stacks.refused": {"effective": CAP_SYS_PTRACE},
}


@pytest.mark.parametrize(("code", "fields"), REFUSED.items(), ids=REFUSED)
def test_stacks_that_the_kernel_refuses_are_a_finding(code: str, fields: dict[str, Any]) -> None:
    error = make_refusal_error(20, replace(RIGHTS, **fields))
    assert error.code == code
    parts = ["stacks of engine 20", "stacks of worker 30"]
    unseen = tuple(Gap(part, error.code, error.message, error.hint) for part in parts)
    (finding,) = diagnose_server(healthy(gaps=unseen))
    assert (finding.code, finding.subject) == ("tools.py-spy", ", ".join(parts))
    assert finding.evidence == error.message


def test_every_rule_is_shown() -> None:
    assert {code for code, _ in FOUND} == CATALOGUE.keys()


def processes_with_disk_waits(count: int) -> tuple[Any, ...]:
    """Processes whose worker waits for a disk, so many times by now."""
    turns = ThreadTimeslices(1.0, 0.0, count)
    return tuple(
        msgspec.structs.replace(one, main=turns) for one in processes_with_state("worker", "D")
    )


def spread_out(caches: CacheSnapshot) -> CacheSnapshot:
    """The caches of a server whose workers may be on several nodes."""
    (sample,) = caches.samples
    (engine,) = sample.processes
    assert engine.setup
    setup = msgspec.structs.replace(engine.setup, spread=True)
    engine = msgspec.structs.replace(engine, setup=setup)
    return msgspec.structs.replace(
        caches, samples=[msgspec.structs.replace(sample, processes=[engine])]
    )


BUSY = {
    "preemptions": 2.0,
    "queue_n": 3.0,
    "queue_s": 30.0,
    "whole_n": 3.0,
    "whole_s": 31.0,
    "errors": 1.0,
    "answers": 1000.0,
    "finished": 1000.0,
    "mm_queries": 5000.0,
    "mm_hits": 0.0,
    "prefix_queries": 5000.0,
    "prefix_hits": 0.0,
}
WELL: dict[str, dict[str, Any]] = {
    "idle": {},
    "without agents": {
        "reports": (),
        "samples": make_sample_series({"heartbeats": ()}, {"heartbeats": ()}),
        "gaps": (Gap("agent of engine 20", "agent.absent", "no agent"),),
    },
    "starting": {
        "state": "starting",
        "samples": make_sample_series({"processes": (process("api"),)}),
    },
    "no look": {"samples": ()},
    "busy": {"samples": make_metrics_growth(**BUSY)},
    "a GPU that works": {
        "machine": machine(
            gpus=(
                Gpu(index=0, utilization=1.0, memory_busy=0.4, watts=120.0, limit_watts=140.0),
                Gpu(index=1, utilization=1.0, memory_busy=0.0, watts=130.0, limit_watts=140.0),
                Gpu(index=2, utilization=0.3, memory_busy=0.0, watts=20.0, limit_watts=140.0),
                Gpu(index=3, utilization=1.0),
            )
        )
    },
    "a GPU of another server that spins": {
        "machine": machine(
            gpus=(
                Gpu(index=0, by_pid={PIDS["worker"]: GIB}),
                Gpu(**SPINNING, index=1, by_pid={4711: GIB}),
            )
        )
    },
    "workers on another node": {"caches": spread_out(TWO_WORKERS)},
    "good versions": {"reports": (with_packages({"flashinfer-python": "0.6.15.post1"}),)},
    "full and nobody waits": {
        "samples": make_sample_series(*[{"metrics": metrics(kv_cache_usage=1.0)}] * 2)
    },
    "one look caught it in the kernel": {
        "samples": make_sample_series({}, {"processes": processes_with_state("worker", "D")})
    },
    "it reads from a disk": {
        "samples": make_sample_series(
            *({"processes": processes_with_disk_waits(n)} for n in (5, 9))
        )
    },
    "a version that Python can't read": {
        "reports": (with_packages({"flashinfer-python": "7" * 5000}),),
        "patches": (),
        "vllm_version": "7" * 5000,
    },
    "built without tags": {"reports": (), "vllm_version": "0.1.dev9012+g0123abc"},
    "a long step": {"samples": make_sample_series({}, {"heartbeats": (pulse("engine", age_s=4),)})},
    "the engine inside the API server": {
        "samples": make_sample_series(*[{"processes": (process("api"),)}] * 2),
        "reports": (msgspec.structs.replace(make_agent_report("engine"), role="api", pid=10),),
    },
    "no metrics": {"samples": make_sample_series({"metrics": None}, {"metrics": None})},
    "loopback": {"guard": Exposure(addresses=("127.0.0.1:8000",), exposed=False)},
    "exposed and guarded": {"guard": msgspec.structs.replace(EXPOSED, is_open=False)},
    "a large disk, nearly full for years": {
        "machine": machine(disks=(DiskSpace("/", "state", 4000 * GIB, 100 * GIB),))
    },
    "a segment that was just made": {
        "machine": machine(leftovers=(ShmLeftover("psm_1", GIB, 1.0),))
    },
    "patches on": {"patches": patches(PatchState.APPLIED)},
    "a patch off that is not needed": {"patches": patches(PatchState.OFF, present=False)},
    "a version that is none": {"reports": (), "vllm_version": "dev"},
    "a new version": {"reports": (), "vllm_version": "0.24.0"},
    "a canary that could not be sent": {"canary": Canary("unable", 0.1)},
    "a canary": {"canary": Canary("answered", 0.1)},
    "counters that began anew": {
        "samples": make_sample_series(
            {"metrics": metrics(errors=50.0)}, {"metrics": metrics(errors=0.0)}
        )
    },
}


@pytest.mark.parametrize("name", WELL)
def test_a_healthy_server_has_no_findings(name: str) -> None:
    assert diagnose_server(healthy(**WELL[name])) == []


def test_figures_are_told() -> None:
    (found,) = diagnose_server(
        healthy(
            samples=(make_healthy_sample(0.0, metrics=QUIET), make_healthy_sample(2.0, health=503))
        )
    )
    assert found.evidence == "/health answers 503"
