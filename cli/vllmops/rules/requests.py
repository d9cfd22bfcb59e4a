"""Requests that only one side knows, or that wait in vain; pure, from what each process knows."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.caches import ProcessGap
from ..model.findings import Finding, Rule, Severity
from ..model.healing import HealProof
from ..model.ranks import format_process
from ..model.requests import ProcessRequests, RequestState

ZOMBIE = Rule(
    "request.zombie",
    Severity.WARNING,
    "only one side knows a request",
    "vllmops requests abort ID: it ends the request and frees what it holds",
    "https://github.com/vllm-project/vllm/issues/55521",
)
LOST_LOAD = Rule(
    "request.lost-load",
    Severity.WARNING,
    "a request waits in vain for KV blocks from another server",
    "vllmops heal --only transfers: vLLM then computes the request itself, or ends it",
    "https://github.com/vllm-project/vllm/issues/49829",
)
RULES = (ZOMBIE, LOST_LOAD)


def check_zombie_requests(snapshots: Sequence[dict[str, str]]) -> list[Finding]:
    """Requests that one side alone knows in every look.

    Args:
        snapshots: by id who has it; between them, nothing was on its way.
    """
    return [
        ZOMBIE.make_finding(name, f"{why}, in {len(snapshots)} looks")
        for name, why in snapshots[-1].items()
        if all(name in look for look in snapshots)
    ]


def make_lost_load_findings(proofs: Sequence[HealProof]) -> list[Finding]:
    """Requests of which three looks have proven that nobody will report the end of their load."""
    return [LOST_LOAD.make_finding(proof.subject, proof.evidence) for proof in proofs]


def compare_request_sides(
    processes: Sequence[ProcessRequests], gaps: Sequence[ProcessGap]
) -> dict[str, str]:
    """The ids that one side alone knows at this moment, and who it is.

    There is no finding about a side of which a process did not answer or could not be read.
    """
    fronts = [process for process in processes if process.front is not None]
    engines = [process for process in processes if process.engine is not None]
    workers = [process for process in processes if process.worker is not None]
    unread = {process.role for process in processes if process.problems}
    unread |= {process.role for process in gaps}
    # An agent that has not found its engine client knows nothing of the requests there.
    apis = [process for process in processes if process.role == "api"]
    unread |= {process.role for process in apis if process.front is None}
    handed = {request.id for process in fronts for request in process.front or ()}
    scheduled = {request.id for process in engines for request in process.engine or ()}
    leaving = {name for process in engines for name in process.leaving}
    zombies: dict[str, str] = {}
    if fronts and "api" not in unread:
        for process in engines:
            for request in process.engine or ():
                if request.id not in handed and request.state != RequestState.FINISHED:
                    holds = f"{request.kv_blocks or 0} KV blocks, {request.cache_pins} cache pins"
                    zombies[request.id] = (
                        f"{format_process(process)} has it ({request.state}; {holds}), no API "
                        "server does"
                    )
    if engines and "engine" not in unread:
        for process in fronts:
            for front in process.front or ():
                if front.id and front.id not in scheduled:
                    zombies[front.id] = f"{format_process(process)} waits for it, no engine has it"
        for process in workers:
            for name in process.worker or ():
                if name not in scheduled | leaving | handed:
                    zombies[name] = f"{format_process(process)} has it, no scheduler does"
    return zombies
