"""``vllmops wait``: until a server is ready, or has stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from ..collect.http import vllm_client
from ..collect.http.endpoint import Endpoint
from ..collect.machine.processes import is_alive
from ..model.targets import Pod, ServerUrl, access, parse_target
from ..servers.discovery import Server, is_remote_target, open_remote_endpoint, resolve_server
from ..servers.readiness import are_engines_up
from ..servers.record import InstanceFolder, InstanceState
from ..servers.supervisor_client import read_supervised_record
from ..support.errors import VllmopsError
from ..support.output import Json, Progress, Result, format_duration, make_typer_app
from .multi_target import run_per_target
from .options import Target, TargetArgument, make_seconds_parser
from .serve import make_failure_error

app = make_typer_app()

POLL_S = 0.25


class Goal(StrEnum):
    READY = "ready"
    STOPPED = "stopped"


@app.command(epilog="Example: vllmops wait demo --for ready --timeout 300")
@run_per_target
def wait(
    name: TargetArgument = None,
    target: Target = None,
    goal: Annotated[Goal, typer.Option("--for", help="What to wait for.")] = Goal.READY,
    timeout: Annotated[
        float | None,
        typer.Option(parser=make_seconds_parser(), help="Maximum seconds to wait [no limit]."),
    ] = None,
    json_: Json = False,
) -> Result:
    """Wait until a server is ready or has stopped.

    The exit code is 3 if the time is up, and 1 if the server failed.
    A server on another machine is asked for its health alone, so that no
    admin token is needed.
    """
    if place := find_remote_endpoint(name or target):
        wait_until_reached(
            lambda: fetch_health_state(place.url), goal, place.name, timeout, quiet=json_
        )
        return Result(
            {"name": None, "pid": None, "state": goal}, lambda: [f"{place.name} is {goal}"]
        )
    try:
        server = resolve_server(name or target)
    except VllmopsError as error:
        if error.code != "target.over" or goal is not Goal.STOPPED:
            raise
        over = {"name": name or target, "pid": None, "state": goal}
        return Result(over, lambda: [f"{name or target} is {goal}"])
    wait_until_reached(
        lambda: observe_state(server, goal), goal, server.label, timeout, quiet=json_
    )
    data: dict[str, Any] = {"name": server.name, "pid": server.pid, "state": goal}
    return Result(data, lambda: [f"{server.label} is {goal}"])


def wait_until_reached(
    state_now: Callable[[], str], goal: Goal, label: str, timeout: float | None, *, quiet: bool
) -> None:
    """Wait until a server has reached a goal.

    Args:
        state_now: gives its state.
        goal: what to wait for.
        label: how messages name it.
        timeout: in seconds, None for no end.
        quiet: show no progress.

    Raises:
        VllmopsError: ``wait.timeout``.
    """
    began = time.monotonic()
    with Progress(time.time(), quiet=quiet) as progress:
        while (state := state_now()) != goal:
            waited = time.monotonic() - began
            if timeout is not None and waited >= timeout:
                raise VllmopsError(
                    "wait.timeout",
                    f"{label} is not {goal} after {format_duration(waited)}: it is {state}",
                    f"vllmops status {label}",
                )
            progress.update(f"{label}: {state}")
            time.sleep(POLL_S)


def find_remote_endpoint(target: str | None) -> Endpoint | None:
    """The place of a target on another machine; also of a URL here if there is an admin token."""
    asked = parse_target(target) if target else None
    reach = access.get()
    if isinstance(asked, ServerUrl | Pod) and (is_remote_target(asked) or (reach and reach.token)):
        return open_remote_endpoint(asked)
    return None


def fetch_health_state(url: str) -> str:
    """The state of a server as its health shows it."""
    status = vllm_client.fetch_health_status(url)
    if status is None:
        return Goal.STOPPED
    return Goal.READY if status == 200 else f"not healthy ({status or 'no answer'})"


def observe_state(server: Server, goal: Goal) -> str:
    """The state to compare with the goal; while the server starts, its stage.

    Raises:
        VllmopsError: ``serve.failed`` if it failed before it was ready.
    """
    if server.record is None:
        if not any(map(is_alive, server.processes)):
            return Goal.STOPPED
        if server.headless:
            ready = are_engines_up(server.processes)
        else:
            ready = server.url is not None and vllm_client.is_healthy(server.url)
        return Goal.READY if ready else "starting"
    folder = InstanceFolder(server.record.name)
    record = read_supervised_record(folder) or server.record
    if record.state is InstanceState.FAILED:
        if goal is Goal.STOPPED:
            return Goal.STOPPED
        raise make_failure_error(record, folder)
    if record.state is InstanceState.STOPPED and goal is Goal.READY:
        raise VllmopsError(
            "wait.stopped", f"{record.name} has stopped", f"vllmops restart {record.name}"
        )
    return record.stage if record.state is InstanceState.STARTING else record.state
