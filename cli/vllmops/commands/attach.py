"""``vllmops attach``: load the agent into a server that runs without it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import output
from ..attach import attach
from ..attach.attach import Attached, Plan
from ..caches.inspect import ROLES
from ..errors import Exit, VllmopsError
from ..instances.servers import Server, resolve
from ..output import Progress, Result, command
from ..protocol.caches import Silent
from ..rpc import agent
from .options import Target, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

app = output.typer_app()


@app.command(epilog="Example: vllmops attach -t 4711 --patch")
@command
def attach_(
    *,
    target: Target = None,
    patch: Annotated[
        bool, typer.Option("--patch", help="Apply the patches that are safe on a running server.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[
        float, typer.Option(parser=seconds(0.1), help="Seconds until the agents must answer.")
    ] = 15.0,
    json_: output.Json = False,
) -> Result:
    """Load the agent into a server that was started without it.

    For a stock `vllm serve` that hangs right now: nothing is restarted,
    no request is lost, and from then on every command works on it. In
    each process one idle thread is stopped for some milliseconds, and
    starts the agent; no debugger is needed. It takes the server's own user,
    and the right to trace its processes.
    """
    server = resolve(target)
    with ThreadPoolExecutor() as pool:
        processes = server.of(*ROLES)
        lacks = zip(processes, pool.map(attach.lacking, processes), strict=True)
        new = [process for process, lacking in lacks if lacking]
        if not new:
            raise nothing(server)
        plans = list(pool.map(attach.plan, new))
    if dry_run:
        data: dict[str, Any] = {"server": server.label, "dry_run": True, "patch": patch}
        rows = [
            {"role": plan.process.role, "pid": plan.process.pid, "threads": plan.tids}
            for plan in plans
        ]
        return Result({**data, "processes": rows}, lambda: planned(plans))
    if not yes:
        names = ", ".join(agent.name(each) for each in new)
        output.confirm(
            f"Load the agent{' and its patches' if patch else ''} into {names}?",
            f"vllmops attach -t {server.label} --yes",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(f"{server.label}: attaching to {len(new)} processes")
        by = dict(zip(new, plans, strict=True))
        done, silent = agent.side_by_side(
            new, lambda each: attach.attach(by[each], patch=patch, timeout_s=timeout)
        )
    data = {
        "server": server.label,
        "dry_run": False,
        "patch": patch,
        "processes": [
            {
                "role": each.process.role,
                "pid": each.process.pid,
                "stopped_s": each.stopped_s,
                "seconds": each.seconds,
            }
            for each in done
        ],
        "silent": silent,
    }
    return Result(data, lambda: told(server, done, silent), Exit.FAILED if silent else Exit.OK)


def nothing(server: Server) -> VllmopsError:
    """There is no process to attach to."""
    if not server.of(*ROLES):
        return VllmopsError(
            "attach.no-process",
            f"{server.label} has no process yet that the agent could be loaded into",
            f"vllmops wait {server.label} --for ready",
            exit_code=Exit.NOT_FOUND,
        )
    return VllmopsError(
        "attach.already",
        f"the agent runs in every process of {server.label} already",
        f"vllmops patches list -t {server.label}",
    )


def planned(plans: Sequence[Plan]) -> list[RenderableType]:
    """What would be done, for a person."""
    table = output.table("ROLE", "PID", "HOW", right=("PID",))
    for each in plans:
        how = (
            f"by thread {each.tids[0]}, which is idle ({len(each.tids)} are)"
            if each.tids
            else "by sys.remote_exec, which takes Python 3.14"
        )
        table.add_row(each.process.role, str(each.process.pid), how)
    return ["It could be attached to:", table]


def told(
    server: Server, done: Sequence[Attached], silent: Sequence[Silent]
) -> list[RenderableType]:
    """What was done, for a person."""
    from rich.text import Text  # noqa: PLC0415

    table = output.table("ROLE", "PID", "STOPPED", "READY AFTER", right=("PID", "STOPPED"))
    for each in done:
        stopped = "-" if each.stopped_s is None else f"{1000 * each.stopped_s:.1f} ms"
        row = (each.process.role, str(each.process.pid), stopped, f"{each.seconds:.2f} s")
        table.add_row(*row)
    parts: list[RenderableType] = [table] if done else []
    for missing in silent:
        parts.append(Text(f"{missing.role} {missing.pid}: {missing.why}", "bold red"))
        parts.append(Text(f"  hint: {missing.hint}"))
    if done:
        parts.append(Text(f"Now, say: vllmops cache inspect -t {server.label}"))
    return parts
