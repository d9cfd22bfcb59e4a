"""Asks a server's API servers to compare both sides of its caches."""

from __future__ import annotations

import time

import msgspec

from ...collect.agents import agent_client
from ...collect.machine.processes import Process, format_process_name
from ...model.cache_comparison import CacheComparison, CompareRequest
from ...model.caches import ProcessCaches, ProcessGap
from ...model.roles import Role
from ...servers.discovery import Server
from ...support.errors import VllmopsError

SLACK_S = 5.0  # on top of the server's own time limit: a slow machine, many keys
FEATURE = "compare"


def compare_caches(
    server: Server, request: CompareRequest
) -> tuple[list[CacheComparison], list[ProcessGap]]:
    """Ask every API server for a comparison.

    Returns:
        The comparisons, and the API servers that made none.

    Raises:
        VllmopsError: ``compare.no-engine``, ``compare.no-agent``, ``compare.timeout``.
    """
    began = time.monotonic()
    engines, fronts = server.select_processes(Role.ENGINE), server.select_processes(Role.API)
    if not engines or not fronts:
        raise VllmopsError(
            "compare.no-engine",
            f"{server.label} has no engine process to compare with: it still starts, or the engine "
            "runs in the API server (VLLM_ENABLE_V1_MULTIPROCESSING=0)",
            f"vllmops wait {server.label} --for ready, or vllmops cache inspect -t {server.label}",
        )
    # Ask first: vLLM logs a traceback for each call of a utility that an engine does not have.
    _, silent = agent_client.collect_answers(engines, require_comparing_agent)
    # An engine that hangs may still answer within the time limit, so it does not count as lacking.
    if lacking := [engine for engine in silent if engine.code != "agent.timeout"]:
        raise agent_client.make_no_answer_error(
            "compare.no-agent", f"can't compare the caches of {server.label}", lacking
        )
    request = msgspec.structs.replace(
        request,
        timeout_s=max(request.timeout_s - (time.monotonic() - began), request.timeout_s / 2),
    )
    comparisons, silent = agent_client.collect_answers(
        fronts, lambda process: request_comparison(process, request)
    )
    if not comparisons:
        raise agent_client.make_no_answer_error(
            "compare.no-agent", f"no API server of {server.label} made a comparison", silent
        )
    if any(comparison.front_after is None or not comparison.samples for comparison in comparisons):
        raise VllmopsError(
            "compare.timeout",
            f"the engine of {server.label} did not finish a step in time: the step is long, or the "
            "engine is stuck",
            f"vllmops stacks dump -t {server.label} --explain shows which; "
            f"vllmops cache inspect -t {server.label} works without a step",
        )
    return [set_process_ranks(comparison, server) for comparison in comparisons], silent


def set_process_ranks(comparison: CacheComparison, server: Server) -> CacheComparison:
    """A comparison whose processes have the places that the whole server shows.

    An engine tells its workers' caches by its own view: that of a model without experts knows of
    no other data parallel rank.
    """
    known = {(p.place.node, p.pid): agent_client.get_process_fields(p) for p in server.processes}

    def set_ranks(process: ProcessCaches) -> ProcessCaches:
        return msgspec.structs.replace(process, **known.get((process.node, process.pid), {}))

    looks = [
        msgspec.structs.replace(
            look,
            front=set_ranks(look.front),
            engines=[set_ranks(engine) for engine in look.engines],
        )
        for look in comparison.samples
    ]
    return msgspec.structs.replace(comparison, samples=looks)


def request_comparison(process: Process, request: CompareRequest) -> CacheComparison:
    peer = require_comparing_agent(process)
    peer.timeout_s = request.timeout_s + SLACK_S
    return peer.compare_caches(request)


def require_comparing_agent(process: Process) -> agent_client.Agent:
    """The agent of a process, if it is new enough to compare caches.

    Raises:
        VllmopsError: as `agent_client.open_agent`, or ``agent.older``.
    """
    peer = agent_client.open_agent(process)
    if FEATURE not in peer.fetch_hello().features:
        raise VllmopsError(
            "agent.older",
            f"the agent of {format_process_name(process)} is older than this vllmops "
            "and "
            "can't compare",
            "restart the server, so that it loads this vllmops",
        )
    return peer
