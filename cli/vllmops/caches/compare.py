"""Has a server's API servers compare both sides of its caches."""

from __future__ import annotations

import time

import msgspec

from ..errors import Exit, VllmopsError
from ..host.processes import Process, Role
from ..instances.servers import Server
from ..protocol.caches import Silent
from ..protocol.compares import CompareRequest, Comparison
from ..rpc import agent

SLACK_S = 5.0  # beyond what the server itself waits: a slow machine, many keys
FEATURE = "compare"


def take(server: Server, request: CompareRequest) -> tuple[list[Comparison], list[Silent]]:
    """A comparison by each API server, and the API servers that made none.

    Raises:
        VllmopsError: ``compare.no-engine``, ``compare.no-agent``, ``compare.timeout``.
    """
    began = time.monotonic()
    engines, fronts = server.of(Role.ENGINE), server.of(Role.API)
    if not engines or not fronts:
        raise VllmopsError(
            "compare.no-engine",
            f"{server.label} has no engine process yet, or none of its own "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0): there are no two sides to compare",
            f"vllmops wait {server.label} --for ready, or vllmops cache inspect -t {server.label}",
            exit_code=Exit.NOT_FOUND,
        )
    # vLLM would log a traceback for each call of a utility that an engine does not have.
    _, silent = agent.side_by_side(engines, able)
    # One that hangs is waited for, as long as was asked for.
    if lacking := [each for each in silent if each.code != "agent.timeout"]:
        raise agent.nobody(
            "compare.no-agent", f"the engine of {server.label} can't be looked at", lacking
        )
    request = msgspec.structs.replace(
        request,
        timeout_s=max(request.timeout_s - (time.monotonic() - began), request.timeout_s / 2),
    )
    told, silent = agent.side_by_side(fronts, lambda process: ask(process, request))
    if not told:
        raise agent.nobody(
            "compare.no-agent", f"no API server of {server.label} made a comparison", silent
        )
    if any(each.after is None for each in told):
        raise VllmopsError(
            "compare.timeout",
            f"the engine of {server.label} did not get to the end of a step in time: it is in a "
            "long one, or stuck",
            f"vllmops stacks dump -t {server.label} tells which; "
            f"vllmops cache inspect -t {server.label} needs no step",
            exit_code=Exit.TIMED_OUT,
        )
    return told, silent


def ask(process: Process, request: CompareRequest) -> Comparison:
    reached = able(process)
    reached.timeout_s = request.timeout_s + SLACK_S
    return reached.compare(request)


def able(process: Process) -> agent.Agent:
    """The agent of a process, if it is new enough to compare.

    Raises:
        VllmopsError: as `agent.reach`, or ``agent.older``.
    """
    reached = agent.reach(process)
    if FEATURE not in reached.hello().features:
        raise VllmopsError(
            "agent.older",
            f"the agent of {agent.name(process)} is older than this vllmops: it can't compare",
            "restart the server, so that it loads this vllmops",
        )
    return reached
