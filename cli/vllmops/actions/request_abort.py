"""Ends requests in flight, at the front end and in the engine, and looks whether they are gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ..collect.agents import agent_client
from ..collect.machine.processes import Process
from ..model.ranks import make_process_key
from ..model.requests import AbortAnswer, AbortRequest, ProcessRequests, RequestState
from ..model.roles import Role
from ..observe.requests.listing import InFlightRequest, collect_process_requests
from ..servers.discovery import Server

LOOP_S = 1.0  # for an API server's event loop
GONE_S, POLL_S = 2.0, 0.1
SLACK_S = 4.0


class AbortOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request.

    Args:
        id, http_id: as in `InFlightRequest`.
        done: whether no process knows it any more.
        reason: who still does, and why; empty if nobody does.
    """

    id: str
    http_id: str
    done: bool
    reason: str = msgspec.field(default="", name="left")


def abort_requests(
    server: Server, rows: Sequence[InFlightRequest], reason: str
) -> list[AbortOutcome]:
    """End requests; each client gets an error.

    The front end is asked first, as its abort reaches the engine, too. The engines are asked for
    what they still have then: a request that no front end knows, or one whose API server's event
    loop is blocked.

    Args:
        server: that has them.
        rows: the requests; those that are being rendered have no id yet, and are left.
        reason: the error message for the clients; empty for a text of the agent's.

    Raises:
        VllmopsError: ``requests.no-agent``, if no process answers.
    """
    ids = [row.id for row in rows if row.id]
    late = (
        send_abort(server, AbortRequest(ids=ids, client_message=reason, timeout_s=LOOP_S), Role.API)
        if ids
        else {}
    )
    left, silent = wait_until_gone(server, ids)
    if in_engines := [name for name, where in left.items() if Role.ENGINE in where]:
        send_abort(server, AbortRequest(ids=in_engines), Role.ENGINE)
        left, silent = wait_until_gone(server, ids)
    return [
        AbortOutcome(
            id=row.id,
            http_id=row.http_id,
            done=not why_left,
            reason=why_left,
        )
        for row in rows
        for why_left in (explain_remaining_request(row, left.get(row.id, {}), silent, late),)
    ]


def send_abort(server: Server, request: AbortRequest, role: Role) -> dict[int, str]:
    """Ask every process of a role to end requests; by pid why some do so only later, if at all."""

    def abort_in_process(process: Process) -> AbortAnswer:
        return agent_client.open_agent(
            process, timeout_s=request.timeout_s + SLACK_S
        ).abort_requests(request)

    answers, silent = agent_client.collect_answers(server.select_processes(role), abort_in_process)
    late = {process.pid: "does not answer" for process in silent}
    return late | {answer.pid: "has a blocked event loop" for answer in answers if answer.pending}


def wait_until_gone(
    server: Server, ids: Sequence[str]
) -> tuple[dict[str, dict[str, int]], list[tuple[str, int]]]:
    """Who still knows a request after a while, and who may: engines that do not answer.

    Returns:
        By the request's id the pids, by role; and the nodes and pids of those engines.
    """
    until = time.monotonic() + GONE_S
    while True:
        processes, silent = collect_process_requests(server)
        left = find_holder_pids(processes, set(ids))
        mute = [make_process_key(process) for process in silent if process.role == Role.ENGINE]
        if not (left or mute) or time.monotonic() >= until:
            return left, mute
        time.sleep(POLL_S)


def find_holder_pids(
    processes: Sequence[ProcessRequests], ids: set[str]
) -> dict[str, dict[str, int]]:
    """Which of some requests are still known: by id the pids, by role.

    A worker forgets a request with the next step of its engine, which may be far away: it does not
    count. Nor does a scheduler that has finished it and holds its blocks until a transfer ends.
    """
    by_request: dict[str, dict[str, int]] = {}
    for process in processes:
        known = {request.id for request in process.front or ()}
        known |= {one.id for one in process.engine or () if one.state != RequestState.FINISHED}
        for name in known & ids:
            by_request.setdefault(name, {})[process.role] = process.pid
    return by_request


def explain_remaining_request(
    row: InFlightRequest,
    pid_by_role: dict[str, int],
    unreachable_engines: Sequence[tuple[str, int]],
    delay_reason_by_pid: dict[int, str],
) -> str:
    """Why a request is not gone; empty if it is.

    Args:
        row: the request.
        pid_by_role: the pids that still know it, by role.
        unreachable_engines: the nodes and pids of the engines that do not answer.
        delay_reason_by_pid: by pid why an API server has not ended it.
    """
    if not row.id:
        return "the engine does not have it yet: try again in a moment"
    if (pid := pid_by_role.get(Role.ENGINE)) is not None:
        return (
            f"engine {pid} received the abort but did not act on it within {GONE_S:g} s: its step "
            "is long, or it is stuck"
        )
    for node, pid in unreachable_engines:
        # Of a request that no engine has reported, any may be the one.
        if row.engine is None or (row.node, row.engine) == (node, pid):
            return f"engine {pid} does not answer, and may still have it"
    for pid, why in delay_reason_by_pid.items():
        # Of a request that only an engine reports, any API server may be the one.
        if row.api in {pid, None}:
            return (
                f"the engine has freed it; API server {pid} {why}, and answers the client as soon "
                "as it can"
            )
    return (
        f"API server {pid_by_role[Role.API]} still waits for it" if Role.API in pid_by_role else ""
    )
