"""``vllmops cache reset``: empty the multimodal caches of a running server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from .. import output
from ..client import agent
from ..errors import Exit, VllmopsError
from ..instances.processes import Role
from ..instances.servers import Server, resolve
from ..instances.takedown import in_flight
from ..output import Progress, Result, command
from ..snapshots.resets import ResetDone, ResetWish
from .options import Target, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    Exit code 3 where they are not done in time; nothing is reset then.
    """
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
        done = ask(server, ResetWish(drain_s=0 if now else timeout))
    left = sum(each.in_flight for each in done)
    if not all(each.done for each in done):
        raise VllmopsError(
            "reset.busy",
            f"{left} requests of {server.label} were not done within {timeout:g} s: nothing was "
            "reset, and it takes requests again",
            "a longer --timeout, or --now; where it hangs, vllmops cache inspect tells why",
            exit_code=Exit.TIMED_OUT,
        )
    refused_s = max(each.refused_s for each in done)
    data = {"server": server.label, "processes": msgspec.to_builtins(done), "refused_s": refused_s}
    told = "at once" if now else f"after a drain of {refused_s:.2f} s"
    return Result(data, lambda: [f"The multimodal caches of {server.label} were reset {told}."])


def ask(server: Server, wish: ResetWish) -> Sequence[ResetDone]:
    """Reset by every API server.

    Raises:
        VllmopsError: of the first that could not.
    """
    done, silent = agent.side_by_side(
        server.of(Role.API),
        lambda process: agent.reach(process, timeout_s=wish.drain_s + SLACK_S).reset(wish),
    )
    if silent:
        raise agent.nobody(
            silent[0].code, f"the multimodal caches of {server.label} were not reset", silent
        )
    if not done:
        raise VllmopsError(
            "reset.no-agent",
            f"{server.label} has no API server that could be asked",
            f"vllmops wait {server.label} --for ready",
            exit_code=Exit.NOT_FOUND,
        )
    return done
