"""Puts together what a server's processes know of each request."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...collect.agents import agent_client
from ...collect.agents.proven_states import is_running_python
from ...collect.machine.processes import Process
from ...model.caches import ProcessGap
from ...model.findings import Finding
from ...model.ranks import format_role_and_ranks, make_process_key
from ...model.requests import EngineRequest, FrontRequest, ProcessRequests, RequestState
from ...model.roles import Role
from ...rules.requests import check_zombie_requests, make_lost_load_findings
from ...servers.discovery import Server
from ...support.errors import VllmopsError
from . import stalled_transfers
from .one_sided_requests import find_one_sided_requests

LOOKS, APART_S = 3, 0.4
TIMEOUT_S = 5.0
HARDLY_S = 1.0  # of one that seems to run no Python
WITH_REQUESTS = (Role.API, Role.ENGINE, Role.WORKER)
# What vLLM puts before the ids of those routes that always put the number of a prompt after it.
NUMBERED = "(?:classify|cmpl|decision|embd|generative-scoring|pool|pooling|rerank|score)-"


class InFlightRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight.

    Args:
        id: vLLM's own; empty before the engine has it.
        http_id: the one that the client sees; empty if no API server knows the request.
        state: one of `RequestState`.
        waiting_reason: why it waits; empty if it does not, or if nothing is known.
        age_s: seconds since it arrived.
        still_s: seconds since the engine last computed a token of it; None if unknown.
        prompt_tokens, output_tokens: None if unknown.
        kv_blocks, cache_pins: what it holds of the KV cache and of the encoder cache.
        preemptions, priority: as the scheduler has them.
        owner: a hash of the API key that it came with; empty without one, None if unknown.
        route: of its HTTP request.
        lora: the adapter's name.
        api, engine: the pids that know it, None if none does.
        node, ranks: of that engine.
        stuck: why it counts as stuck; empty if it does not.
    """

    id: str
    http_id: str = ""
    state: str
    waiting_reason: str = ""
    age_s: float | None = None
    still_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    kv_blocks: int | None = None
    cache_pins: int | None = None
    preemptions: int | None = None
    priority: int | None = None
    owner: str | None = None
    route: str | None = None
    lora: str | None = None
    api: int | None = None
    engine: int | None = None
    node: str = ""
    ranks: str = ""
    stuck: str = ""


class RequestListing(NamedTuple):
    """All requests of a server at one moment.

    Args:
        rows: the oldest first.
        findings: requests that only one side knows, or that wait for KV blocks in vain.
        gaps: the processes that did not answer.
        problems: what could not be read.
    """

    rows: list[InFlightRequest]
    findings: list[Finding]
    gaps: list[ProcessGap]
    problems: list[str]


def list_requests(server: Server, stuck_s: float) -> RequestListing:
    """The requests of a server; looks again where one side alone seems to know one.

    Args:
        server: to ask.
        stuck_s: seconds without progress after which a request counts as stuck.

    Raises:
        VllmopsError: ``requests.no-agent``, ``requests.no-process``.
    """
    seen: list[dict[str, str]] = []
    while True:
        processes, silent = collect_process_requests(server)
        seen.append(find_one_sided_requests(server, processes, silent))
        if not seen[-1] or len(seen) == LOOKS:
            break
        time.sleep(APART_S)
    found = check_zombie_requests(seen)
    if any(
        one.state == RequestState.WAITING_FOR_KV for each in processes for one in each.engine or ()
    ):
        found += make_lost_load_findings(stalled_transfers.prove_lost_loads(server))
    return RequestListing(
        rows=merge_requests(
            processes, stuck_s, {finding.subject: finding.evidence for finding in found}
        ),
        findings=found,
        gaps=silent,
        problems=[
            f"{format_role_and_ranks(p.role, p)} {p.pid}: {why}"
            for p in processes
            for why in p.problems
        ],
    )


def collect_process_requests(server: Server) -> tuple[list[ProcessRequests], list[ProcessGap]]:
    """What each process knows now.

    Raises:
        VllmopsError: ``requests.no-agent``, ``requests.no-process``.
    """
    asked = server.select_processes(*WITH_REQUESTS)
    if not asked:
        raise VllmopsError(
            "requests.no-process",
            f"{server.label} has no API server and no engine yet",
            f"vllmops wait {server.label} --for ready",
        )

    def fetch_requests(process: Process) -> ProcessRequests:
        timeout_s = TIMEOUT_S if is_running_python(process) else HARDLY_S
        return agent_client.open_agent(process, timeout_s=timeout_s).fetch_requests()

    processes, silent = agent_client.collect_answers(asked, fetch_requests)
    if not processes:
        raise agent_client.make_no_answer_error(
            "requests.no-agent", f"no process of {server.label} reported its requests", silent
        )
    return processes, silent


def merge_requests(
    processes: Sequence[ProcessRequests], stuck_s: float, evidence_by_id: dict[str, str]
) -> list[InFlightRequest]:
    """A row for each request, the oldest first.

    Args:
        processes: of one server.
        stuck_s: as in `list_requests`.
        evidence_by_id: evidence by the id of each request that one side alone knows, or that waits
            in vain.
    """
    fronts: dict[str, tuple[ProcessRequests, FrontRequest]] = {}
    engines: dict[str, tuple[ProcessRequests, EngineRequest]] = {}
    rows: list[InFlightRequest] = []
    for process in processes:
        for front in process.front or ():
            if front.id:
                fronts[front.id] = process, front
            else:
                rows.append(from_front_request(process, front, RequestState.RENDERING))
        engines |= {request.id: (process, request) for request in process.engine or ()}
    for name, (process, front) in fronts.items():
        row = from_front_request(process, front, RequestState.SENT)
        rows.append(add_engine_state(row, *engines[name]) if name in engines else row)
    rows += [
        add_engine_state(InFlightRequest(id=name, state=""), *known)
        for name, known in engines.items()
        if name not in fronts
    ]
    still = {
        make_process_key(process): process for process in processes if process.engine is not None
    }
    rows = [
        msgspec.structs.replace(
            row, stuck=evidence_by_id.get(row.id) or explain_stuck_request(row, still, stuck_s)
        )
        for row in rows
    ]
    return sorted(rows, key=lambda row: -(row.age_s or 0.0))


def from_front_request(
    process: ProcessRequests, request: FrontRequest, state: RequestState
) -> InFlightRequest:
    return InFlightRequest(
        id=request.id,
        http_id=request.http_id,
        state=state,
        age_s=request.age_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        owner=request.owner,
        route=request.route,
        lora=request.lora,
        api=process.pid,
    )


def add_engine_state(
    row: InFlightRequest, process: ProcessRequests, request: EngineRequest
) -> InFlightRequest:
    """A row with what the scheduler knows: it is nearer to the truth than the front end."""
    return msgspec.structs.replace(
        row,
        state=request.state,
        waiting_reason=request.reason,
        age_s=request.age_s if row.age_s is None else row.age_s,
        still_s=request.still_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        kv_blocks=request.kv_blocks,
        cache_pins=request.cache_pins,
        preemptions=request.preemptions,
        priority=request.priority,
        lora=request.lora or row.lora,
        engine=process.pid,
        node=process.node,
        ranks=process.ranks,
    )


def explain_stuck_request(
    row: InFlightRequest, engines: dict[tuple[str, int], ProcessRequests], stuck_s: float
) -> str:
    """Why a request counts as stuck; empty if it does not.

    A request that waits while others get tokens is not stuck: the server is full.
    """
    engine = engines.get((row.node, row.engine or 0))
    if engine is None or engine.resting:
        return ""
    if row.still_s is not None and row.still_s >= stuck_s:
        return f"no token computed for {row.still_s:.0f} s"
    if (engine.still_s or 0.0) >= stuck_s and row.state != RequestState.FINISHED:
        return f"its engine makes no progress for {engine.still_s:.0f} s"
    return ""


def select_by_id(rows: Sequence[InFlightRequest], request_id: str) -> list[InFlightRequest]:
    """The requests that an id means: vLLM's own, the client's, or its ``X-Request-Id``.

    vLLM puts ``chatcmpl-`` and the like before that, and after it, on some routes, the number of a
    prompt. On others, such a number is a part of another client's id.
    """
    if not request_id:  # as one is called that no API server knows, or no engine
        return []
    name = re.escape(request_id)
    same = re.compile(rf"(?={NUMBERED})(?:{NUMBERED})?{name}-\d+|(?!{NUMBERED})(?:[a-z]+-)?{name}")
    exact = [row for row in rows if request_id in {row.id, row.http_id}]
    return exact or [row for row in rows if same.fullmatch(row.http_id)]
