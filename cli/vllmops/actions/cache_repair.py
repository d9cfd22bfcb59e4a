"""Repairs a server's caches: those of each process, then the two sides of the mirrored one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..collect.agents import agent_client
from ..collect.machine.processes import Process
from ..model.cache_repairs import ProcessRepair, RepairRequest
from ..model.caches import CacheSnapshot, ProcessGap
from ..model.roles import ROLES
from ..observe.caches import snapshot
from ..rules.caches import find_front_only_keys
from ..servers.discovery import Server

# The agent waits some seconds at most for a thread in the middle of an operation. One that does
# not even say who it is repairs nothing either.
TIMEOUT_S, REACH_S = 20.0, 5.0
ROUNDS, APART_S = 5, 0.3


@dataclass(frozen=True)
class RepairReport:
    """What was repaired, and the state of the caches afterwards.

    Args:
        repairs: those of the processes that had a fault.
        gaps: the processes that did not answer, and why.
        snapshot_after: a snapshot of the caches, taken after the repair.
    """

    repairs: list[ProcessRepair]
    gaps: list[ProcessGap]
    snapshot_after: CacheSnapshot


def repair_caches(server: Server, *, dry_run: bool = False) -> RepairReport:
    """Repair what is provably wrong, and nothing else.

    Args:
        server: the server whose caches to repair.
        dry_run: find faults; change nothing.

    Raises:
        VllmopsError: ``repair.no-agent``, ``cache.no-agent`` or ``cache.no-process``.
    """
    repairs: list[ProcessRepair] = []
    for _ in range(1 if dry_run else ROUNDS):
        answers, silent = agent_client.collect_answers(
            server.select_processes(*ROLES),
            lambda process: request_repair(process, RepairRequest(dry_run=dry_run)),
        )
        repairs += answers
        if not any(answer.caches for answer in answers):
            break
        # A request that was stuck in the front end continues, and may get stuck in the engine next.
        time.sleep(APART_S)
    if silent and not repairs:
        raise agent_client.make_no_answer_error(
            "repair.no-agent",
            f"no process of {server.label} can repair its caches",
            silent,
        )
    agents = snapshot.CacheAgents(server)
    after = snapshot.observe_caches(agents)
    # Found only while no request is in flight, so none is about to bring these keys to the engine.
    if (front_only := find_front_only_keys(after)) is not None:
        pid, keys = front_only
        front = next(process for process in server.processes if process.pid == pid)
        repairs.append(request_repair(front, RepairRequest(dry_run=dry_run, front_only=keys)))
        after = snapshot.observe_caches(agents)
    return RepairReport([done for done in repairs if done.caches], silent, after)


def request_repair(process: Process, request: RepairRequest) -> ProcessRepair:
    peer = agent_client.open_agent(process, timeout_s=REACH_S)
    peer.timeout_s = TIMEOUT_S
    return peer.repair_caches(request)
