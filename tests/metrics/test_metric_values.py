"""What agents say, as Prometheus reads it."""

import re
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllmops.metrics.metric_families import FAMILIES, PREFIX, build_metrics
from vllmops.metrics.metric_values import MOST_KEYS, has_differing_sides, make_samples
from vllmops.model.agent_state import Heartbeat
from vllmops.model.caches import (
    EncoderCache,
    EncoderDecoderCache,
    LruCache,
    ProcessCaches,
    ShmCache,
    WorkerEncoderCache,
)
from vllmops.model.keys import KeyMetadata, ProcessKeys
from vllmops.model.patches import PatchReport, PatchState, ProcessPatches
from vllmops.model.requests import EngineRequest, FrontRequest, ProcessRequests, RequestState
from vllmops.model.server_metrics import KnownBadVersion, MetricsSnapshot
from vllmops.model.server_snapshot import Gpu, ProcessHeartbeat, ProcessState
from vllmops_responses.server.metrics import COUNTERS

API: dict[str, Any] = {"role": "api", "node": "one"}
ENGINE: dict[str, Any] = {"role": "engine", "node": "one", "dp_rank": 1}
WORKER: dict[str, Any] = {"role": "worker", "node": "one", "dp_rank": 1, "tp_rank": 3, "pp_rank": 0}
# What may be told of a request, or of a process, and would be a label without bounds.
SECRET = "chatcmpl-4711"


def state(where: dict[str, Any], pid: int = 7, **fields: Any) -> ProcessState:
    given: dict[str, Any] = {"state": "S", "rss_bytes": 1000, "cpu_s": 2.5} | fields
    return ProcessState(**where, pid=pid, create_time=0.0, **given)


def pulse(
    where: dict[str, Any], age_s: float = 0.5, pid: int = 7, **fields: Any
) -> ProcessHeartbeat:
    beat = Heartbeat(monotonic=0.0, sequence=1, pid=pid, role=where["role"], **fields)
    return ProcessHeartbeat(**where, pid=pid, age_s=age_s, heartbeat=beat)


def lru(side: str, order: list[str] | None = None, **fields: Any) -> LruCache:
    given: dict[str, Any] = {
        "kind": "mm-lru",
        "name": "LRU",
        "digest": "all",
        "pinned_keys": [],
        "pinned_only": [],
        "entries": 2,
        "bytes": 20,
        "sum_bytes": 20,
        "capacity_bytes": 100,
        "hits": 3,
        "queries": 5,
    }
    return LruCache(side=side, order=order, **(given | fields))


def caches(where: dict[str, Any], *found: Any) -> ProcessCaches:
    return ProcessCaches(**where, pid=7, parent=1, caches=list(found))


def read(view: MetricsSnapshot) -> dict[str, dict[str, float]]:
    """What a scrape gives: by the name without prefix, values by the labels that are not empty."""
    registry = CollectorRegistry()
    registry.register(Fixed(view))
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.name.startswith(PREFIX)
            name = sample.name.removeprefix(PREFIX)
            given = (label for label in FAMILIES[name].labels if label in sample.labels)
            labels = " ".join(f"{label}={sample.labels[label]}" for label in given)
            assert all(sample.labels.values())
            values = found.setdefault(name, {})
            assert labels not in values
            values[labels] = sample.value
    return found


class Fixed:
    def __init__(self, view: MetricsSnapshot) -> None:
        self.view = view

    def collect(self) -> Any:
        return build_metrics(make_samples(self.view))


def test_names_and_units() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|mb|gb|ratio_percent|count)$", name)
        assert not {"pid", "id", "owner", "user"} & set(family.labels)
        assert family.help[0].isupper() or family.help[0] == "1"
        assert not family.help.endswith(".")


def test_each_metric_is_in_the_manual() -> None:
    page = files("vllmops").joinpath("docs/metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    shown = {
        name if not name.startswith("_") else first.rpartition(shortest(first))[0] + name
        for row in rows
        for names in [[word.partition("{")[0] for word in re.findall(r"`([^`]+)`", row)]]
        for first in names[:1]
        for name in names
    }
    counted = {counter._name for counter in COUNTERS}
    assert shown == set(FAMILIES) | {
        name.removeprefix(PREFIX) + ("" if name.endswith("seconds") else "_total")
        for name in counted
    }


def shortest(name: str) -> str:
    """What other names of a row have in place of it."""
    return "_" + name.rpartition("_")[2]


def test_processes_with_the_same_labels_are_one_row() -> None:
    view = MetricsSnapshot(
        processes=(state(API), state(API, 8), state(ENGINE, 9), state(WORKER, 10, state="Z")),
        heartbeats=(pulse(API, loop_s=0.0), pulse(API, 9.0, 8, loop_s=4.0)),
    )
    found = read(view)
    assert found["processes"] == {"role=api node=one": 2, "role=engine node=one": 1}
    assert found["agents"] == {"role=api node=one": 1, "role=engine node=one": 0}
    assert found["heartbeat_age_seconds"] == {"role=api node=one": 9}
    assert found["event_loop_blocked_seconds"] == {"role=api node=one": 4}
    assert found["process_resident_memory_bytes"]["role=api node=one"] == 2000
    assert found["process_cpu_seconds_total"]["role=api node=one"] == 5


@pytest.mark.parametrize(
    ("still_s", "age_s", "shown"), [(0.0, 9.0, 0.0), (12.0, 0.5, 12.5), (None, 0.5, None)]
)
def test_progress(still_s: float | None, age_s: float, shown: float | None) -> None:
    found = read(MetricsSnapshot(heartbeats=(pulse(ENGINE, age_s, still_s=still_s),)))
    expected = {} if shown is None else {"role=engine node=one dp_rank=1": shown}
    assert found.get("no_progress_seconds", {}) == expected


@pytest.mark.parametrize("certainty", ["", "likely", "sure"])
def test_stall(certainty: Any) -> None:
    assert read(MetricsSnapshot(stall=certainty))["stalled"] == {
        f"certainty={word}": float(word == certainty) for word in ("likely", "sure")
    }


def test_requests_are_counted_once_and_where_they_are() -> None:
    fronts = [FrontRequest(id=name) for name in ("a", "b", "c", SECRET)] + [FrontRequest()]
    engine = [
        EngineRequest(id="a", state=RequestState.RUNNING),
        EngineRequest(id="b", state=RequestState.WAITING, reason="7 run", cause="max-num-seqs"),
        EngineRequest(id="c", state=RequestState.WAITING, reason="8 run", cause="max-num-seqs"),
    ]
    found = read(
        MetricsSnapshot(
            requests=(
                ProcessRequests(**API, pid=1, front=fronts),
                ProcessRequests(**ENGINE, pid=2, engine=engine),
                ProcessRequests(**WORKER, pid=3, worker=["a"]),
            )
        )
    )["requests"]
    api, engine_ = "role=api node=one", "role=engine node=one dp_rank=1"
    assert {labels: value for labels, value in found.items() if value} == {
        f"{api} state=rendering": 1,
        f"{api} state=sent": 1,
        f"{engine_} state=running": 1,
        f"{engine_} state=waiting cause=max-num-seqs": 2,
    }
    # What is not there is 0, so that a rule can tell it from what is unknown.
    assert found[f"{engine_} state=preempted"] == 0
    assert not any(SECRET in labels for labels in found)


def test_caches() -> None:
    ghosts = lru("P1", order_only=["x", "y"], unsized=["y", "z"])
    shm = ShmCache(
        kind="mm-shm", side="P0", name="S", writer=True, capacity_bytes=9, max_object_bytes=1,
        keys=["k"], bytes=4, unpaired_keys=["k"], unflagged_ids=[1], hits=1, queries=2,
    )  # fmt: skip
    reader = msgspec.structs.replace(shm, side="worker", writer=False)
    encoder = EncoderCache(
        name="E", slots=10, free_slots=4, freeable_slots=5, requests_by_key={"k": []}, freeable={},
        unknown_requests=["r"],
    )  # fmt: skip
    whisper = EncoderDecoderCache(name="D", slots=10, free_slots=12, passing=[])
    tensors = WorkerEncoderCache(name="W", rank=0, keys=["k", "l"], bytes=64)
    found = read(
        MetricsSnapshot(
            caches=(
                caches(API, shm),
                caches(ENGINE, ghosts, encoder),
                caches({**ENGINE, "dp_rank": 2}, whisper),
                caches(WORKER, reader, tensors),
            )
        )
    )
    p1 = "role=engine node=one dp_rank=1 kind=mm-lru side=P1"
    p0 = "role=api node=one kind=mm-shm side=P0"
    assert found["mm_cache_ghost_keys"] == {p1: 2}
    assert found["mm_cache_inconsistent_keys"] == {p0: 2, p1: 3}
    assert found["mm_cache_entries"] == {p0: 1, p1: 2}
    assert found["mm_cache_queries_total"] == {p0: 2, p1: 5}
    assert found["mm_cache_bytes"] == {p0: 4, p1: 20}
    engine = "role=engine node=one dp_rank=1"
    assert found["encoder_cache_free_slots"] == {
        engine: 4,
        "role=engine node=one dp_rank=2": 12,
    }
    assert found["encoder_cache_stray_requests"] == {engine: 1}
    worker = "role=worker node=one dp_rank=1 tp_rank=3 pp_rank=0"
    assert found["encoder_cache_entries"] == {
        f"{engine} side=scheduler": 1,
        f"{worker} side=worker": 2,
    }
    assert found["encoder_cache_bytes"] == {worker: 64}


def test_keys_that_one_side_alone_has() -> None:
    same = [caches(API, lru("P0")), caches(ENGINE, lru("P1"))]
    assert not has_differing_sides(same)
    assert set(read(MetricsSnapshot(caches=tuple(same)))["mm_cache_one_sided_keys"].values()) == {0}

    other = [caches(API, lru("P0", digest="more")), caches(ENGINE, lru("P1"))]
    assert has_differing_sides(other)
    # Without keys nobody knows how many.
    assert "mm_cache_one_sided_keys" not in read(MetricsSnapshot(caches=tuple(other)))
    listed = (
        caches(API, lru("P0", ["a", "b", "c"], digest="more")),
        caches(ENGINE, lru("P1", ["b", "d"])),
    )
    assert list(read(MetricsSnapshot(caches=listed))["mm_cache_one_sided_keys"].values()) == [2, 1]

    busy = [caches(API, lru("P0", digest="")), caches(ENGINE, lru("P1"))]
    assert not has_differing_sides(busy)
    assert "mm_cache_one_sided_keys" not in read(MetricsSnapshot(caches=tuple(busy)))
    # Each of several API servers has items of its own.
    several = (caches(API, lru("P0")), caches(API, lru("P0")), caches(ENGINE, lru("P1")))
    assert "mm_cache_one_sided_keys" not in read(MetricsSnapshot(caches=several))


def test_keys_patches_versions() -> None:
    held = tuple(
        KeyMetadata(
            kid=f"k{n}", status="verify-only", created_at=n, not_after=n + 5, fingerprint="f"
        )
        for n in range(MOST_KEYS + 10)
    )
    keys = ProcessKeys(**API, pid=7, keys=held, loaded_at=100.0, problem="differs")
    verdict = PatchReport(id="some-patch", state=PatchState.FAILED, reason=SECRET)
    patched = ProcessPatches(
        **ENGINE, pid=7, vllm_version="1", patches=[verdict], seconds=1.0, problems=(SECRET,)
    )
    found = read(
        MetricsSnapshot(
            keys=(keys, msgspec.structs.replace(keys, loaded_at=50.0)),
            patches=(patched,),
            known_bad=(KnownBadVersion("nccl", "2.28.9"),),
        )
    )
    assert len(found["key_not_after_timestamp_seconds"]) == MOST_KEYS
    newest = f"kid=k{MOST_KEYS + 9} status=verify-only"
    assert found["key_not_after_timestamp_seconds"][newest] == MOST_KEYS + 14
    assert found["key_processes"][newest] == 2
    assert found["keys_loaded_timestamp_seconds"] == {"role=api node=one": 50}
    assert found["key_problems"] == {"role=api node=one": 2}
    assert found["patch_processes"] == {"patch=some-patch state=failed": 1}
    assert found["agent_problems"] == {"role=engine node=one dp_rank=1": 1}
    assert found["known_bad_versions"] == {"package=nccl version=2.28.9": 1}
    assert SECRET not in str(found)


def test_a_process_that_could_load_no_keys_has_a_problem_with_them() -> None:
    none, broken = ProcessKeys(**API, pid=7), ProcessKeys(**API, pid=8, problem="no JSON")
    assert read(MetricsSnapshot(keys=(none, broken)))["key_problems"] == {"role=api node=one": 1}
    assert "key_problems" not in read(MetricsSnapshot(keys=(none,)))


def test_a_counter_does_not_go_down_where_one_of_several_api_servers_does_not_answer() -> None:
    def make_patches(pid: int) -> ProcessPatches:
        return ProcessPatches(
            **API,
            pid=pid,
            vllm_version="1",
            patches=[],
            seconds=0.0,
            cpu_s=9.0,
            repairs={"cache": 2},
        )

    def make_caches(pid: int) -> ProcessCaches:
        return ProcessCaches(**API, pid=pid, parent=1, caches=[lru("P0")])

    processes = (state(API, 7), state(API, 8), state(API, 9, state="Z"))
    both = MetricsSnapshot(
        processes=processes,
        caches=(make_caches(7), make_caches(8)),
        patches=(make_patches(7), make_patches(8)),
    )
    counters = {name for name in read(both) if name.endswith("_total")}
    assert read(both)["mm_cache_queries_total"] == {"role=api node=one kind=mm-lru side=P0": 10}
    assert read(both)["repairs_total"] == {"role=api node=one what=cache": 4}
    for part in (
        {"caches": both.caches[:1]},
        {"patches": both.patches[:1]},
        {"caches": both.caches[:1], "patches": both.patches[:1]},
    ):
        found = read(msgspec.structs.replace(both, **part))
        assert counters & found.keys() == {"process_cpu_seconds_total"}
        assert found["mm_cache_entries"]


def test_a_gpu_shows_what_its_driver_tells() -> None:
    gpus = (
        Gpu(index=0, utilization=1.0, memory_busy=0.0, watts=210.0, limit_watts=700.0),
        Gpu(index=1),
    )
    found = read(MetricsSnapshot(gpus={"one": gpus}))
    first = "node=one gpu=0"
    assert found["gpu_busy_ratio"] == {first: 1}
    assert found["gpu_memory_busy_ratio"] == {first: 0}
    assert found["gpu_power_watts"] == {first: 210}
    assert found["gpu_power_limit_watts"] == {first: 700}
