"""``vllmops drain`` and ``vllmops resume``."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ..model.ranks import format_role_and_ranks
from ..servers.discovery import resolve_server
from ..servers.drain import set_draining
from ..servers.supervisor_client import STOP_TIMEOUT_S
from ..supervision.shutdown import count_in_flight, find_dead_processes, wait_for_requests
from ..support.errors import VllmopsError
from ..support.numbers import format_count
from ..support.output import Json, Progress, Result, make_typer_app
from .multi_target import run_per_target
from .options import Target, TargetArgument, make_seconds_parser

drain_app = make_typer_app()
resume_app = make_typer_app()


@drain_app.command(epilog="Example: vllmops drain demo --wait --timeout 120")
@run_per_target
def drain(
    name: TargetArgument = None,
    target: Target = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Return once no request is in flight.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(parser=make_seconds_parser(), help="With --wait: seconds to wait at most."),
    ] = STOP_TIMEOUT_S,
    json_: Json = False,
) -> Result:
    """Refuse new requests, and let those in flight finish.

    New requests and /health get 503 with Retry-After; `vllmops probe --readiness` fails. Stored
    responses can still be read, deleted and cancelled. The server keeps running, until
    `vllmops resume` has it take requests again.
    """
    server = resolve_server(name or target, allow_foreign=False)
    set_draining(server, draining=True)
    if not wait:
        left = count_in_flight(server.processes, server.url)
    else:
        with Progress(time.time(), quiet=json_) as progress:
            left = wait_for_requests(
                server.processes,
                server.url,
                timeout,
                lambda text: progress.update(f"{server.label}: draining, {text}"),
            )
    data: dict[str, Any] = {"server": server.label, "draining": True, "in_flight": left}
    known = "an unknown number of requests" if left is None else format_count(left, "request")
    if wait and left != 0 and (gone := find_dead_processes(server.processes)):
        names = ", ".join(
            f"{format_role_and_ranks(one.role, one.place)} (pid {one.pid})" for one in gone
        )
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
@run_per_target
def resume(name: TargetArgument = None, target: Target = None, json_: Json = False) -> Result:
    """Have a drained server take requests again.

    It ends what `vllmops drain` began. An engine that was paused or put to sleep over HTTP stays
    so; `vllmops heal` says how to wake it.
    """
    server = resolve_server(name or target, allow_foreign=False)
    draining = any(traffic.draining for traffic in set_draining(server, draining=False))
    data = {"server": server.label, "draining": draining}
    why = "is still draining: somebody resets its caches" if draining else "takes requests again"
    return Result(data, lambda: [f"{server.label} {why}"])
