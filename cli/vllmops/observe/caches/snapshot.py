"""Takes a snapshot of a server's caches; if something looks wrong, takes several samples."""

from __future__ import annotations

import time
from functools import partial

from ...collect.agents import agent_client
from ...collect.machine.processes import Process
from ...model.caches import CacheSample, CacheSnapshot, ProcessCaches, ProcessGap
from ...model.ranks import make_process_key
from ...model.roles import ROLES, Role
from ...rules.caches import check_sample, needs_all_keys
from ...servers.discovery import Server
from ...support.errors import VllmopsError

SAMPLES = 3
APART_S = 0.1


def observe_caches(agents: CacheAgents, *, keys: bool = False) -> CacheSnapshot:
    """A snapshot of a server's caches.

    A fault persists; an operation that is half done does not. So where there are findings, or the
    two sides of a cache differ, the snapshot has `SAMPLES` samples with all keys.

    Args:
        agents: the server's.
        keys: whether to list every key of LRU caches in any case.

    Raises:
        VllmopsError: ``cache.no-agent`` or ``cache.no-process`` if no process answers.
    """
    samples = [agents.take_sample(keys=keys)]
    if not keys and needs_all_keys(samples[0]):
        samples = [agents.take_sample(keys=True)]
    while len(samples) < SAMPLES and check_sample(samples[-1]):
        time.sleep(APART_S)
        samples.append(agents.take_sample(keys=True))
    return CacheSnapshot(server=agents.server.label, samples=samples)


class CacheAgents:
    """The agents of one server; each is located and checked once."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.processes = server.select_processes(*ROLES)
        self.agents: dict[Process, agent_client.Agent] = {}

    def take_sample(self, *, keys: bool) -> CacheSample:
        """One sample of all processes."""
        caches, silent = agent_client.collect_answers(
            self.processes, partial(self.fetch_caches, keys=keys)
        )
        if not caches:
            raise self.make_no_answer_error(silent)
        return CacheSample(
            taken_at=time.time(),
            processes=caches,
            gaps=silent,
            quiet=not silent and self.is_quiet(caches),
        )

    def fetch_caches(self, process: Process, *, keys: bool) -> ProcessCaches:
        """One process's caches."""
        # An agent that does not answer is not kept: the next sample locates it again.
        asked = self.agents.pop(process, None) or agent_client.open_agent(process)
        answer = asked.fetch_caches(keys=keys)
        self.agents[process] = asked
        return answer

    def is_quiet(self, processes: list[ProcessCaches]) -> bool:
        """Whether no request was in flight at the sample, and none has started since."""
        if any(process.unfinished_requests for process in processes):
            return False
        agents = {make_process_key(process): asked for process, asked in self.agents.items()}
        for process in processes:
            if process.role != Role.API:
                continue
            if process.in_flight != 0:
                return False
            try:
                now = agents[make_process_key(process)].fetch_traffic()
            except VllmopsError:
                return False
            if now.in_flight or now.started_requests != process.started_requests:
                return False
        return True

    def make_no_answer_error(self, gaps: list[ProcessGap]) -> VllmopsError:
        """The error for a server of which no process answered, with each one's reason."""
        if not gaps:
            return VllmopsError(
                "cache.no-process",
                f"{self.server.label} has no process with a cache yet",
                f"vllmops wait {self.server.label} --for ready",
            )
        return agent_client.make_no_answer_error(
            "cache.no-agent", f"no process of {self.server.label} reported its caches", gaps
        )
