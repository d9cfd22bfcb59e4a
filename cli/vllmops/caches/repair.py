"""Repairs a server's caches: each process its own, then the two sides of the mirrored one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..diagnose.caches import ahead
from ..host.processes import Process
from ..instances.servers import Server
from ..protocol.caches import CacheSnapshot, Silent
from ..protocol.repairs import ProcessRepair, RepairRequest
from ..rpc import agent
from . import inspect as caches

# A thread that is in the middle of an operation is waited for, some seconds at most.
TIMEOUT_S = 20.0
ROUNDS, APART_S = 5, 0.3


@dataclass(frozen=True)
class Report:
    """What was repaired, and how the caches are now.

    Args:
        repairs: of the processes that had something to repair.
        silent: who did not answer, and why.
        after: the caches, looked at once more.
    """

    repairs: list[ProcessRepair]
    silent: list[Silent]
    after: CacheSnapshot


def repair(server: Server, *, dry_run: bool = False) -> Report:
    """Repair what is provably wrong, and nothing else.

    Args:
        server: whose caches.
        dry_run: find only.

    Raises:
        VllmopsError: ``repair.no-agent``, ``cache.no-agent`` or ``cache.no-process``.
    """
    repairs: list[ProcessRepair] = []
    for _ in range(1 if dry_run else ROUNDS):
        told, silent = agent.side_by_side(
            server.of(*caches.ROLES), lambda process: ask(process, RepairRequest(dry_run=dry_run))
        )
        repairs += told
        if not any(each.caches for each in told):
            break
        # A request that had stuck in the front end goes on, and can stick in the engine next.
        time.sleep(APART_S)
    if silent and not repairs:
        raise agent.nobody(
            "repair.no-agent",
            f"no process of {server.label} can be asked to repair its caches",
            silent,
        )
    agents = caches.Agents(server)
    after = caches.take(agents)
    # Told only of a server with nothing in flight: nobody is about to bring them to the engine.
    if (beyond := ahead(after)) is not None:
        pid, keys = beyond
        front = next(process for process in server.processes if process.pid == pid)
        repairs.append(ask(front, RepairRequest(dry_run=dry_run, front_only=keys)))
        after = caches.take(agents)
    return Report([each for each in repairs if each.caches], silent, after)


def ask(process: Process, request: RepairRequest) -> ProcessRepair:
    return agent.reach(process, timeout_s=TIMEOUT_S).repair(request)
