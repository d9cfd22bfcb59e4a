"""``vllmops drain`` and ``vllmops resume``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ..errors import VllmopsError
from ..instances.control import STOP_TIMEOUT_S
from ..instances.draining import set_draining
from ..instances.servers import resolve
from ..instances.takedown import ended, in_flight, settled
from ..numbers import many
from ..output import Json, Progress, Result, typer_app
from ..protocol.place import named
from .options import Target, TargetArgument, seconds
from .several import per_target

drain_app = typer_app()
resume_app = typer_app()


@drain_app.command(epilog="Example: vllmops drain demo --wait --timeout 120")
@per_target
def drain(
    name: TargetArgument = None,
    target: Target = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Return once no request is in flight.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(parser=seconds(), help="With --wait: seconds to wait at most.")
    ] = STOP_TIMEOUT_S,
    json_: Json = False,
) -> Result:
    """Refuse new requests, and let those in flight finish.

    New requests and /health get 503 with Retry-After; `vllmops probe --readiness` fails. Stored
    responses can still be read, deleted and cancelled. The server keeps running, until
    `vllmops resume` has it take requests again.
    """
    server = resolve(name or target, strangers=False)
    set_draining(server, on=True)
    if not wait:
        left = in_flight(server.processes, server.url)
    else:
        with Progress(time.time(), quiet=json_) as progress:
            left = settled(
                server.processes,
                server.url,
                timeout,
                lambda text: progress.update(f"{server.label}: draining, {text}"),
            )
    data: dict[str, Any] = {"server": server.label, "draining": True, "in_flight": left}
    known = "an unknown number of requests" if left is None else many(left, "request")
    if wait and left != 0 and (gone := ended(server.processes)):
        names = ", ".join(f"{named(one.role, one.place)} (pid {one.pid})" for one in gone)
        raise VllmopsError(
            "drain.ended",
            f"{server.label} can't finish its requests: {names} has ended",
            "vllmops ps --all",
            data=data,
        )
    if wait and left != 0:
        raise VllmopsError(
            "drain.timeout",
            f"{server.label} still has {known} in flight after {timeout:g} s",
            f"vllmops requests list -t {server.label} shows them",
            data=data,
        )
    return Result(data, lambda: [f"{server.label} is draining; in flight: {known}"])


@resume_app.command(epilog="Example: vllmops resume demo")
@per_target
def resume(name: TargetArgument = None, target: Target = None, json_: Json = False) -> Result:
    """Have a drained server take requests again.

    It ends what `vllmops drain` began. An engine that was paused or put to sleep over HTTP stays
    so; `vllmops heal` says how to wake it.
    """
    server = resolve(name or target, strangers=False)
    draining = any(traffic.draining for traffic in set_draining(server, on=False))
    data = {"server": server.label, "draining": draining}
    why = "is still draining: somebody resets its caches" if draining else "takes requests again"
    return Result(data, lambda: [f"{server.label} {why}"])
