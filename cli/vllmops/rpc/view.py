"""Asks a server's agents for what metrics show, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import msgspec

from ..diagnose import packages, progress
from ..errors import VllmopsError
from ..host.processes import ROLES
from ..protocol.caches import ProcessCaches
from ..protocol.engine import Answer, Hello
from ..protocol.keys import ProcessKeys
from ..protocol.packages import Packages
from ..protocol.patches import ProcessPatches
from ..protocol.place import key, who
from ..protocol.requests import ProcessRequests
from ..protocol.server import Observation, ProcessState
from ..protocol.view import KnownBad, View

A = TypeVar("A", bound=Answer)

HISTORY_S = 120.0  # of samples that show whether the server has stalled
ROUTES: dict[str, type[Answer]] = {
    "caches": ProcessCaches,
    "requests": ProcessRequests,
    "patches": ProcessPatches,
    "keys": ProcessKeys,
}


class Asks(Protocol):
    """The agent of a process, as `rpc.agent.Agent`."""

    def ask(self, method: str, path: str, kind: type[A]) -> A: ...


class Viewer:
    """One server.

    Args:
        reach: the agent of a process; it and what it returns may raise VllmopsError.
        differ: whether the keys of caches are worth asking for.
    """

    def __init__(
        self,
        reach: Callable[[Any], Asks],
        differ: Callable[[list[ProcessCaches]], bool],
    ) -> None:
        self.reach = reach
        self.differ = differ
        self.looks: list[Observation] = []
        self.versions: dict[tuple[str, int], dict[str, str]] = {}

    def view(self, look: Observation) -> View:
        """Ask all agents whose heartbeat is fresh, one after the other.

        Args:
            look: at the processes, just now.
        """
        self.looks.append(look)
        while look.at_s - self.looks[0].at_s > HISTORY_S:
            del self.looks[0]
        fresh = {key(pulse) for pulse in look.pulses if pulse.age_s < progress.LATE_S}
        asked = [p for p in look.processes if p.role in ROLES and key(p) in fresh]
        answers: dict[str, list[Any]] = {route: [] for route in ROUTES}
        reached: list[tuple[ProcessState, Asks]] = []
        for process in asked:
            try:
                agent = self.reach(process)
                for route, kind in ROUTES.items():
                    answers[route].append(placed(agent.ask("GET", f"/{route}", kind), process))
                if key(process) not in self.versions:
                    self.versions[key(process)] = agent.ask("GET", "/packages", Packages).versions
                reached.append((process, agent))
            except VllmopsError:
                continue
        if self.differ(answers["caches"]):
            answers["caches"] = list(with_keys(reached))
        self.versions = {name: self.versions[name] for name in self.versions if name in fresh}
        nodes = len({process.node for process in look.processes})
        bad = {
            KnownBad(row.package, versions[row.package])
            for versions in map(
                dict, {tuple(installed.items()) for installed in self.versions.values()}
            )
            for row in packages.bad(versions, nodes=nodes)
        }
        return View(
            processes=look.processes,
            pulses=look.pulses,
            caches=tuple(answers["caches"]),
            requests=tuple(answers["requests"]),
            patches=tuple(answers["patches"]),
            keys=tuple(answers["keys"]),
            stall=progress.certainty(self.looks, self.answers),
            known_bad=tuple(bad),
        )

    def answers(self, name: str) -> bool:
        """Whether the agent of a process answers, although its heartbeat is late."""
        process = next((p for p in self.looks[-1].processes if who(p) == name), None)
        try:
            return process is not None and bool(self.reach(process).ask("GET", "/hello", Hello))
        except VllmopsError:
            return False


def with_keys(reached: Iterable[tuple[ProcessState, Asks]]) -> Iterable[ProcessCaches]:
    """The caches again, with the keys that they hold."""
    for process, agent in reached:
        try:
            yield placed(agent.ask("GET", "/caches?keys=1", ProcessCaches), process)
        except VllmopsError:
            continue


def placed(answer: A, process: ProcessState) -> A:
    """An answer with the place that the other ones about its process have."""
    own = {"role": process.role, "pid": process.pid, **process.where()}
    fields = type(answer).__struct_fields__
    return msgspec.structs.replace(
        answer, **{name: value for name, value in own.items() if name in fields}
    )
