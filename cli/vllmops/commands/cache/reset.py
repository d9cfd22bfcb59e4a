"""``vllmops cache reset``: empty the multimodal caches of a running server."""

from __future__ import annotations

import time
from typing import Annotated, NamedTuple

import msgspec
import typer

from ... import output
from ...codes import ErrorCode, known
from ...errors import Exit, VllmopsError
from ...host.processes import Process
from ...host.roles import Role
from ...instances.servers import Server, resolve
from ...instances.takedown import in_flight
from ...keys.ring import in_seconds
from ...numbers import many
from ...output import Progress, Result
from ...protocol.caches import Silent
from ...protocol.resets import ResetDone, ResetRequest
from ...rpc import agent
from ..options import Target, seconds
from ..several import per_target

SLACK_S = 15.0  # beyond the drain: the reset itself, and a slow machine


@per_target
def reset(
    *,
    target: Target = None,
    timeout: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds to wait for requests in flight.")
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
    in_seconds("--timeout", timeout)
    server = resolve(target)
    waiting = in_flight(server.processes, server.url) or 0
    if waiting:
        output.say(
            f"{many(waiting, 'request')} in flight: "
            + (
                "front end and engine may disagree afterwards; check with vllmops cache inspect"
                if now
                else f"new requests get 503 until these are done, {timeout:.0f} s at most"
            ),
            style="yellow",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: resetting")
        outcome = ask(server, ResetRequest(drain_s=0 if now else timeout))
    data = {
        "server": server.label,
        "processes": [
            {"pid": process.pid, **msgspec.to_builtins(answer), **agent.shown(process)}
            for process, answer in outcome.answers
        ],
        "silent": msgspec.to_builtins(outcome.silent),
        "refused_s": max((answer.refused_s for _, answer in outcome.answers), default=0.0),
    }
    if error := failure(server, outcome, timeout):
        error.data = data
        raise error
    when = "at once" if now else f"after a drain of {data['refused_s']:.2f} s"
    return Result(data, lambda: [f"The multimodal caches of {server.label} were reset {when}."])


class ResetAnswers(NamedTuple):
    """How the reset went in each API server.

    Args:
        answers: the API servers that answered, with their answers.
        silent: those that did not answer; they may still reset their caches later.
    """

    answers: list[tuple[Process, ResetDone]]
    silent: list[Silent]


def ask(server: Server, request: ResetRequest) -> ResetAnswers:
    """Ask every API server to reset its caches.

    Raises:
        VllmopsError: ``reset.no-agent``.
    """

    def one(process: Process) -> tuple[Process, ResetDone]:
        return process, agent.reach(process, timeout_s=request.drain_s + SLACK_S).reset(request)

    outcome = ResetAnswers(*agent.side_by_side(server.of(Role.API), one))
    if not outcome.answers and not outcome.silent:
        raise VllmopsError(
            "reset.no-agent",
            f"{server.label} has no API server",
            f"vllmops wait {server.label} --for ready",
        )
    return outcome


def failure(server: Server, outcome: ResetAnswers, timeout_s: float) -> VllmopsError | None:
    """The error that says which API servers reset their caches and which did not; None if all."""
    done = [process for process, answer in outcome.answers if answer.done]
    busy = [(process, answer.in_flight) for process, answer in outcome.answers if not answer.done]
    if not busy and not outcome.silent:
        return None
    why = [
        f"{agent.name(process)} still had {many(left, 'request')} in flight after {timeout_s:g} s"
        for process, left in busy
    ]
    why += [
        silent.why + (", and may still reset later" if silent.code == "agent.timeout" else "")
        for silent in outcome.silent
    ]
    if done:
        code: ErrorCode = "reset.partly"
        what = f"only {', '.join(map(agent.name, done))} reset the caches of {server.label}"
    else:
        code = "reset.busy" if busy else known(outcome.silent[0].code, "agent.broken")
        what = f"the caches of {server.label} were not reset"
    hint = "use a longer --timeout, or --now; if requests hang, vllmops doctor shows why"
    return VllmopsError(
        code,
        f"{what}: {'; '.join(why)}",
        hint if busy else outcome.silent[0].hint,
        exit_code=Exit.TIMED_OUT if busy else Exit(outcome.silent[0].exit_code),
    )
