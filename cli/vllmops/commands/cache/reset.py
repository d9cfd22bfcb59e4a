"""``vllmops cache reset``: empty the multimodal caches of a running server."""

from __future__ import annotations

import time
from typing import Annotated, NamedTuple

import msgspec
import typer

from ...collect.agents import agent_client
from ...collect.machine.processes import Process, format_process_name
from ...model.cache_resets import ResetAnswer, ResetRequest
from ...model.caches import ProcessGap
from ...model.roles import Role
from ...servers.discovery import Server, resolve_server
from ...supervision.shutdown import count_in_flight
from ...support import output
from ...support.durations import validate_seconds
from ...support.error_codes import ErrorCode, parse_error_code
from ...support.errors import ExitCode, VllmopsError
from ...support.numbers import format_count
from ...support.output import Progress, Result
from ..multi_target import run_per_target
from ..options import Target, make_seconds_parser

SLACK_S = 15.0  # beyond the drain: the reset itself, and a slow machine


@run_per_target
def reset(
    *,
    target: Target = None,
    timeout: Annotated[
        float,
        typer.Option(
            parser=make_seconds_parser(0.1), help="Seconds to wait for requests in flight."
        ),
    ] = 60.0,
    now: Annotated[
        bool,
        typer.Option("--now", help="Do not wait. Front end and engine may then disagree."),
    ] = False,
    json_: output.Json = False,
) -> Result:
    """Empty the multimodal caches of a server, on both sides.

    A reset while requests are in flight makes front end and engine
    disagree. So the server drains first: new requests get status 503 until
    those in flight are done and the caches are empty. On an idle server
    that takes some milliseconds. The exit code is 3 if requests are still
    in flight after --timeout. Each API server resets its own caches: if
    one fails, the error says which ones were reset.
    """
    validate_seconds("--timeout", timeout)
    server = resolve_server(target)
    waiting = count_in_flight(server.processes, server.url) or 0
    if waiting:
        output.print_to_stderr(
            f"{format_count(waiting, 'request')} in flight: "
            + (
                "front end and engine may disagree afterwards; check with vllmops cache inspect"
                if now
                else f"new requests get 503 until these are done, {timeout:.0f} s at most"
            ),
            style="yellow",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: resetting")
        outcome = request_resets(server, ResetRequest(drain_s=0 if now else timeout))
    data = {
        "server": server.label,
        "processes": [
            {
                "pid": process.pid,
                **msgspec.to_builtins(answer),
                **agent_client.get_process_fields(process),
            }
            for process, answer in outcome.answers
        ],
        "silent": msgspec.to_builtins(outcome.gaps),
        "refused_s": max((answer.refused_s for _, answer in outcome.answers), default=0.0),
    }
    if error := make_reset_error(server, outcome, timeout):
        error.data = data
        raise error
    when = "at once" if now else f"after a drain of {data['refused_s']:.2f} s"
    return Result(data, lambda: [f"The multimodal caches of {server.label} were reset {when}."])


class ResetAnswers(NamedTuple):
    """How the reset went in each API server.

    Args:
        answers: the API servers that answered, with their answers.
        gaps: those that did not answer; they may still reset their caches later.
    """

    answers: list[tuple[Process, ResetAnswer]]
    gaps: list[ProcessGap]


def request_resets(server: Server, request: ResetRequest) -> ResetAnswers:
    """Ask every API server to reset its caches.

    Raises:
        VllmopsError: ``reset.no-agent``.
    """

    def request_reset(process: Process) -> tuple[Process, ResetAnswer]:
        return process, agent_client.open_agent(
            process, timeout_s=request.drain_s + SLACK_S
        ).reset_caches(request)

    outcome = ResetAnswers(
        *agent_client.collect_answers(server.select_processes(Role.API), request_reset)
    )
    if not outcome.answers and not outcome.gaps:
        raise VllmopsError(
            "reset.no-agent",
            f"{server.label} has no API server",
            f"vllmops wait {server.label} --for ready",
        )
    return outcome


def make_reset_error(
    server: Server, outcome: ResetAnswers, timeout_s: float
) -> VllmopsError | None:
    """The error that says which API servers reset their caches and which did not; None if all."""
    done = [process for process, answer in outcome.answers if answer.done]
    busy = [(process, answer.in_flight) for process, answer in outcome.answers if not answer.done]
    if not busy and not outcome.gaps:
        return None
    why = [
        f"{format_process_name(process)} still had {format_count(left, 'request')} in "
        "flight "
        f"after {timeout_s:g} s"
        for process, left in busy
    ]
    why += [
        silent.reason + (", and may still reset later" if silent.code == "agent.timeout" else "")
        for silent in outcome.gaps
    ]
    if done:
        code: ErrorCode = "reset.partly"
        what = (
            f"only {', '.join(map(format_process_name, done))} reset the caches of {server.label}"
        )
    else:
        code = "reset.busy" if busy else parse_error_code(outcome.gaps[0].code, "agent.broken")
        what = f"the caches of {server.label} were not reset"
    hint = "use a longer --timeout, or --now; if requests hang, vllmops doctor shows why"
    return VllmopsError(
        code,
        f"{what}: {'; '.join(why)}",
        hint if busy else outcome.gaps[0].hint,
        exit_code=ExitCode.TIMED_OUT if busy else ExitCode(outcome.gaps[0].exit_code),
    )
