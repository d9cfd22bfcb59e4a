"""What is asked of the agents for metrics, and how sure a stall is."""

from __future__ import annotations

from typing import Any

import pytest

from vllmops.metrics.metric_values import has_differing_sides
from vllmops.metrics.snapshot_collector import MetricsCollector
from vllmops.model.agent_state import Heartbeat, Hello
from vllmops.model.caches import LruCache, ProcessCaches
from vllmops.model.keys import ProcessKeys
from vllmops.model.package_versions import InstalledPackages
from vllmops.model.patches import ProcessPatches
from vllmops.model.requests import ProcessRequests
from vllmops.model.server_snapshot import ProcessHeartbeat, ProcessState, ServerSample
from vllmops.support.errors import VllmopsError

ENGINE: dict[str, Any] = {"role": "engine", "pid": 7, "node": "one", "dp_rank": 1, "ranks": "DP1"}


class Agent:
    """Answers with what it has."""

    def __init__(self, digest: str = "", *, silent: bool = False) -> None:
        self.digest = digest
        self.silent = silent
        self.asked: list[str] = []

    def fetch_answer(self, method: str, path: str, kind: Any) -> Any:
        self.asked.append(path)
        if self.silent:
            raise VllmopsError("agent.timeout", "it is stopped")
        listed = ["a", "b"] if path.endswith("keys=1") else None
        cache = LruCache(
            kind="mm-lru", side="P1" if self.digest == "one" else "P0", name="C", order=listed,
            digest=self.digest, pinned_keys=[], pinned_only=[], entries=2, bytes=1, sum_bytes=1,
            capacity_bytes=9, hits=0, queries=0,
        )  # fmt: skip
        answers: dict[Any, Any] = {
            ProcessCaches: ProcessCaches(role="?", pid=1, parent=0, caches=[cache]),
            ProcessRequests: ProcessRequests(role="?", pid=1, engine=[]),
            ProcessPatches: ProcessPatches(
                role="?", pid=1, vllm_version="1", patches=[], seconds=0.0
            ),
            ProcessKeys: ProcessKeys(role="?", pid=1),
            InstalledPackages: InstalledPackages(versions={"flashinfer-python": "0.6.0"}),
            Hello: Hello(agent="1", role="?", pid=1),
        }
        return answers[kind]


def make_engine_sample(
    at_s: float, age_s: float, *others: ProcessState, **beat: Any
) -> ServerSample:
    fields = {"still_s": 0.0, "running": 0, "waiting": 0, "current_step": 1} | beat
    given = Heartbeat(monotonic=at_s - age_s, sequence=1, pid=7, role="engine", **fields)
    process = ProcessState(**ENGINE, create_time=0.0, state="S")
    pulses = [ProcessHeartbeat(**ENGINE, age_s=age_s, heartbeat=given)]
    for other in others:
        where = {name: getattr(other, name) for name in ("role", "pid", "node")}
        pulses.append(ProcessHeartbeat(**where, age_s=0.1, heartbeat=given))
    return ServerSample(at_s=at_s, heartbeats=tuple(pulses), processes=(process, *others))


def test_answers_have_the_place_that_the_process_table_knows() -> None:
    agent = Agent()
    viewer = MetricsCollector(lambda _: agent, has_differing_sides)
    view = viewer.collect_snapshot(make_engine_sample(0.0, 0.1))
    answers: list[Any] = [*view.caches, *view.requests, *view.patches, *view.keys]
    for answer in answers:
        assert (answer.role, answer.pid, answer.node, answer.dp_rank) == ("engine", 7, "one", 1)
    assert [(bad.package, bad.version) for bad in view.known_bad] == [
        ("flashinfer-python", "0.6.0")
    ]
    viewer.collect_snapshot(make_engine_sample(5.0, 0.1))
    assert agent.asked.count("/packages") == 1  # they do not change
    assert agent.asked.count("/caches") == 2
    assert not agent.asked.count("/caches?keys=1")


def test_keys_are_asked_for_only_where_the_sides_differ() -> None:
    api = ProcessState(role="api", pid=8, node="one", create_time=0.0, state="S")
    agents = {7: Agent("one"), 8: Agent("other")}
    view = MetricsCollector(
        lambda process: agents[process.pid], has_differing_sides
    ).collect_snapshot(make_engine_sample(0.0, 0.1, api))
    assert [cache.caches[0].order for cache in view.caches] == [["a", "b"]] * 2  # type: ignore[union-attr]


def test_agent_with_a_late_heartbeat_is_not_asked() -> None:
    agent = Agent(silent=True)
    view = MetricsCollector(lambda _: agent, has_differing_sides).collect_snapshot(
        make_engine_sample(0.0, 9.0)
    )
    assert (view.caches, agent.asked) == ((), [])


@pytest.mark.parametrize(
    ("still_s", "age_s", "silent", "expected"),
    [
        (0.0, 0.1, False, ""),
        (9.0, 0.1, False, ""),
        (12.0, 0.1, False, "likely"),
        (61.0, 0.1, False, "sure"),
        (0.0, 20.0, True, "likely"),
        (0.0, 61.0, True, "sure"),
        # It works, and only its heartbeat can't be written.
        (0.0, 61.0, False, "likely"),
    ],
)
def test_how_sure_a_stall_is(still_s: float, age_s: float, silent: bool, expected: str) -> None:
    viewer = MetricsCollector(lambda _: Agent(silent=silent), has_differing_sides)
    view = viewer.collect_snapshot(make_engine_sample(100.0, age_s, still_s=still_s, running=1))
    assert view.stall == expected
