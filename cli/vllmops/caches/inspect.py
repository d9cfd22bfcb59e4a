"""Takes a server's cache snapshot: all its agents side by side, again where something is found."""

from __future__ import annotations

import time
from functools import partial

from ..diagnose.caches import findings, undecided
from ..errors import Exit, VllmopsError
from ..host.processes import Process, Role
from ..instances.servers import Server
from ..protocol.caches import CacheSnapshot, ProcessCaches, Sample, Silent
from ..rpc import agent

SAMPLES = 3
APART_S = 0.1
# vLLM loads no plug-in into the others; the launcher of several API servers has no caches.
ROLES = (Role.API, Role.ENGINE, Role.WORKER)


def take(agents: Agents, *, keys: bool = False) -> CacheSnapshot:
    """A snapshot of a server's caches.

    What is broken stays so, what is only half-way through does not: where there are findings, or
    the two sides of a cache differ, `SAMPLES` samples with all keys are taken.

    Args:
        agents: of the server whose caches.
        keys: whether to list every key of LRU caches in any case.

    Raises:
        VllmopsError: ``cache.no-agent`` or ``cache.no-process`` where nobody told anything.
    """
    samples = [agents.sample(keys=keys)]
    if not keys and undecided(samples[0]):
        samples = [agents.sample(keys=True)]
    while len(samples) < SAMPLES and findings(samples[-1]):
        time.sleep(APART_S)
        samples.append(agents.sample(keys=True))
    return CacheSnapshot(server=agents.server.label, samples=samples)


class Agents:
    """The agents of one server, each checked once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.processes = server.of(*ROLES)
        self.reached: dict[Process, agent.Agent] = {}

    def sample(self, *, keys: bool) -> Sample:
        """One sample of all processes."""
        told, silent = agent.side_by_side(self.processes, partial(self.ask, keys=keys))
        if not told:
            raise self.nobody(silent)
        return Sample(
            taken_at=time.time(),
            processes=told,
            silent=silent,
            quiet=not silent and self.quiet(told),
        )

    def ask(self, process: Process, *, keys: bool) -> ProcessCaches:
        """One process's caches."""
        # Kept only where it answers: one that does not is looked for anew.
        reached = self.reached.pop(process, None) or agent.reach(process)
        answer = reached.caches(keys=keys)
        self.reached[process] = reached
        return answer

    def quiet(self, told: list[ProcessCaches]) -> bool:
        """Whether nothing was in flight, and nothing has begun since."""
        if any(process.unfinished for process in told):
            return False
        for process in told:
            if process.role != Role.API:
                continue
            if process.in_flight != 0:
                return False
            known = next(each for each in self.reached if each.pid == process.pid)
            try:
                now = self.reached[known].requests()
            except VllmopsError:
                return False
            if now.in_flight or now.started != process.started:
                return False
        return True

    def nobody(self, silent: list[Silent]) -> VllmopsError:
        """No process told anything: one error, with what each one's trouble is."""
        if not silent:
            return VllmopsError(
                "cache.no-process",
                f"{self.server.label} has no process that could have a cache yet",
                f"vllmops wait {self.server.label} --for ready",
                exit_code=Exit.NOT_FOUND,
            )
        return agent.nobody(
            "cache.no-agent", f"no process of {self.server.label} told its caches", silent
        )
