"""Asks a server's agents for what metrics show, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from ..model.agent_state import AgentAnswer, Hello
from ..model.caches import ProcessCaches
from ..model.keys import ProcessKeys
from ..model.package_versions import InstalledPackages
from ..model.patches import ProcessPatches
from ..model.ranks import format_process, make_process_key
from ..model.requests import ProcessRequests
from ..model.roles import ROLES
from ..model.server_metrics import KnownBadVersion, MetricsSnapshot
from ..model.server_snapshot import ProcessState, ServerSample
from ..rules import package_versions, progress
from ..support.errors import VllmopsError

A = TypeVar("A", bound=AgentAnswer)

HISTORY_S = 120.0  # of samples that show whether the server has stalled
ROUTES: dict[str, type[AgentAnswer]] = {
    "caches": ProcessCaches,
    "requests": ProcessRequests,
    "patches": ProcessPatches,
    "keys": ProcessKeys,
}


class AgentClient(Protocol):
    """The agent of a process, as `collect.agents.agent_client.Agent`."""

    def fetch_answer(self, method: str, path: str, kind: type[A]) -> A: ...


class MetricsCollector:
    """One server.

    Args:
        reach: the agent of a process; it and what it returns may raise VllmopsError.
        differ: whether the keys of caches are worth asking for.
    """

    def __init__(
        self,
        reach: Callable[[Any], AgentClient],
        differ: Callable[[list[ProcessCaches]], bool],
    ) -> None:
        self.reach = reach
        self.differ = differ
        self.samples: list[ServerSample] = []
        self.versions: dict[tuple[str, int], dict[str, str]] = {}

    def collect_snapshot(self, sample: ServerSample) -> MetricsSnapshot:
        """Ask all agents whose heartbeat is fresh, one after the other.

        Args:
            sample: at the processes, just now.
        """
        self.samples.append(sample)
        while sample.at_s - self.samples[0].at_s > HISTORY_S:
            del self.samples[0]
        fresh = {
            make_process_key(pulse) for pulse in sample.heartbeats if pulse.age_s < progress.LATE_S
        }
        asked = [p for p in sample.processes if p.role in ROLES and make_process_key(p) in fresh]
        answers: dict[str, list[Any]] = {route: [] for route in ROUTES}
        reached: list[tuple[ProcessState, AgentClient]] = []
        for process in asked:
            try:
                agent = self.reach(process)
                for route, kind in ROUTES.items():
                    answers[route].append(
                        fill_place(agent.fetch_answer("GET", f"/{route}", kind), process)
                    )
                if make_process_key(process) not in self.versions:
                    self.versions[make_process_key(process)] = agent.fetch_answer(
                        "GET", "/packages", InstalledPackages
                    ).versions
                reached.append((process, agent))
            except VllmopsError:
                continue
        if self.differ(answers["caches"]):
            answers["caches"] = list(fetch_caches_with_keys(reached))
        self.versions = {name: self.versions[name] for name in self.versions if name in fresh}
        nodes = len({process.node for process in sample.processes})
        bad = {
            KnownBadVersion(row.package, versions[row.package])
            for versions in map(
                dict, {tuple(installed.items()) for installed in self.versions.values()}
            )
            for row in package_versions.find_bad_versions(versions, nodes=nodes)
        }
        return MetricsSnapshot(
            processes=sample.processes,
            heartbeats=sample.heartbeats,
            caches=tuple(answers["caches"]),
            requests=tuple(answers["requests"]),
            patches=tuple(answers["patches"]),
            keys=tuple(answers["keys"]),
            stall=progress.classify_certainty(self.samples, self.is_answering),
            known_bad=tuple(bad),
        )

    def is_answering(self, name: str) -> bool:
        """Whether the agent of a process answers, although its heartbeat is late."""
        process = next((p for p in self.samples[-1].processes if format_process(p) == name), None)
        try:
            return process is not None and bool(
                self.reach(process).fetch_answer("GET", "/hello", Hello)
            )
        except VllmopsError:
            return False


def fetch_caches_with_keys(
    reachable_agents: Iterable[tuple[ProcessState, AgentClient]],
) -> Iterable[ProcessCaches]:
    """The caches again, with the keys that they hold."""
    for process, agent in reachable_agents:
        try:
            yield fill_place(agent.fetch_answer("GET", "/caches?keys=1", ProcessCaches), process)
        except VllmopsError:
            continue


def fill_place(answer: A, process: ProcessState) -> A:
    """An answer with the place that the other ones about its process have."""
    own = {"role": process.role, "pid": process.pid, **process.placement_fields()}
    fields = type(answer).__struct_fields__
    return msgspec.structs.replace(
        answer, **{name: value for name, value in own.items() if name in fields}
    )
