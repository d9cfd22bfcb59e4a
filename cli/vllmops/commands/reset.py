"""``vllmops cache reset``: empty the multimodal caches of a running server."""

from __future__ import annotations

import time
from typing import Annotated, NamedTuple

import msgspec
import typer

from .. import output
from ..codes import ErrorCode, known
from ..errors import Exit, VllmopsError
from ..host.processes import Process, Role
from ..instances.servers import Server, resolve
from ..instances.takedown import in_flight
from ..keys.ring import in_seconds
from ..output import Progress, Result, command
from ..protocol.caches import Silent
from ..protocol.resets import ResetDone, ResetRequest
from ..rpc import agent
from .options import Target, seconds

SLACK_S = 15.0  # beyond the drain: the reset itself, and a slow machine


@command
def reset(
    *,
    target: Target = None,
    timeout: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds to wait for requests in flight.")
    ] = 60.0,
    now: Annotated[
        bool,
        typer.Option("--now", help="Do not wait: front end and engine may come to differ."),
    ] = False,
    json_: output.Json = False,
) -> Result:
    """Empty the multimodal caches of a server, both sides of them.

    A reset while requests are on their way sets front end and engine
    apart, so it drains first: new requests get 503 until those in flight
    are done and the caches are empty, some milliseconds on an idle server.
    Exit code 3 where they are not done in time. Each API server resets by
    itself: where one can't, it is told which one has been reset.
    """
    in_seconds("--timeout", timeout)
    server = resolve(target)
    waiting = in_flight(server.processes, server.url) or 0
    if waiting:
        output.say(
            f"{waiting} requests in flight: "
            + (
                "front end and engine may come to differ; see vllmops cache inspect"
                if now
                else f"new ones get 503 until they are done, {timeout:.0f} s at most"
            ),
            style="yellow",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: resetting")
        asked = ask(server, ResetRequest(drain_s=0 if now else timeout))
    data = {
        "server": server.label,
        "processes": [
            {"role": process.role.value, "pid": process.pid, **msgspec.to_builtins(each)}
            for process, each in asked.told
        ],
        "silent": msgspec.to_builtins(asked.silent),
        "refused_s": max((each.refused_s for _, each in asked.told), default=0.0),
    }
    if error := trouble(server, asked, timeout):
        error.data = data
        raise error
    told = "at once" if now else f"after a drain of {data['refused_s']:.2f} s"
    return Result(data, lambda: [f"The multimodal caches of {server.label} were reset {told}."])


class Asked(NamedTuple):
    """What became of it in each API server.

    Args:
        told: those that answered, and what.
        silent: those that did not, of which nobody knows whether they do it yet.
    """

    told: list[tuple[Process, ResetDone]]
    silent: list[Silent]


def ask(server: Server, request: ResetRequest) -> Asked:
    """Reset by every API server.

    Raises:
        VllmopsError: ``reset.no-agent``.
    """

    def one(process: Process) -> tuple[Process, ResetDone]:
        return process, agent.reach(process, timeout_s=request.drain_s + SLACK_S).reset(request)

    asked = Asked(*agent.side_by_side(server.of(Role.API), one))
    if not asked.told and not asked.silent:
        raise VllmopsError(
            "reset.no-agent",
            f"{server.label} has no API server that could be asked",
            f"vllmops wait {server.label} --for ready",
            exit_code=Exit.NOT_FOUND,
        )
    return asked


def trouble(server: Server, asked: Asked, timeout_s: float) -> VllmopsError | None:
    """What to say where not every API server has done it: which one has, which one has not."""
    done = [process for process, each in asked.told if each.done]
    busy = [(process, each.in_flight) for process, each in asked.told if not each.done]
    if not busy and not asked.silent:
        return None
    why = [
        f"{agent.name(process)} still had {left} in flight after {timeout_s:g} s"
        for process, left in busy
    ]
    why += [
        each.why + (", and may do it yet" if each.code == "agent.timeout" else "")
        for each in asked.silent
    ]
    if done:
        code: ErrorCode = "reset.partly"
        what = f"reset by {', '.join(map(agent.name, done))} only"
    else:
        code = "reset.busy" if busy else known(asked.silent[0].code, "agent.broken")
        what = "nothing was reset"
    hint = "a longer --timeout, or --now; where it hangs, vllmops cache inspect tells why"
    return VllmopsError(
        code,
        f"the multimodal caches of {server.label}: {what}; {'; '.join(why)}",
        hint if busy else asked.silent[0].hint,
        exit_code=Exit.TIMED_OUT if busy else Exit(asked.silent[0].exit_code),
    )
