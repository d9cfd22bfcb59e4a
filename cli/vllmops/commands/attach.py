"""``vllmops attach``: load the agent into a server that runs without it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..actions.attach import agent_loader
from ..actions.attach.agent_loader import AttachPlan, AttachResult
from ..collect.agents import agent_client
from ..collect.machine.processes import format_process_name
from ..model.caches import ProcessGap
from ..model.ranks import format_process
from ..model.roles import ROLES
from ..servers.discovery import Server, resolve_server
from ..support import output
from ..support.errors import ExitCode, VllmopsError
from ..support.numbers import format_count
from ..support.output import Progress, Result, print_result
from .options import Target, make_seconds_parser

if TYPE_CHECKING:
    from rich.console import RenderableType

app = output.make_typer_app()


@app.command(epilog="Example: vllmops attach -t 4711 --patch")
@print_result
def attach_agent(
    *,
    target: Target = None,
    patch: Annotated[
        bool, typer.Option("--patch", help="Apply the patches that are safe on a running server.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[
        float,
        typer.Option(parser=make_seconds_parser(0.1), help="Seconds until the agents must answer."),
    ] = 15.0,
    json_: output.Json = False,
) -> Result:
    """Load the agent into a server that runs without it.

    For a stock `vllm serve` that hangs now: nothing restarts, no request
    is lost, and afterwards every command works on it. In each process one
    idle thread stops for some milliseconds and starts the agent; no
    debugger is needed. You need the server's own user or root, and the
    permission to trace its processes.
    """
    server = resolve_server(target)
    with ThreadPoolExecutor() as pool:
        processes = server.select_processes(*ROLES)
        lacks = zip(processes, pool.map(agent_loader.needs_agent, processes), strict=True)
        new = [process for process, lacking in lacks if lacking]
        if not new:
            raise make_not_attachable_error(server)
        plans = list(pool.map(agent_loader.plan_attach, new))
    if dry_run:
        data: dict[str, Any] = {"server": server.label, "dry_run": True, "patch": patch}
        rows = [
            {"role": plan.process.role, "pid": plan.process.pid, "threads": plan.tids}
            for plan in plans
        ]
        return Result({**data, "processes": rows}, lambda: render_plan(plans))
    if not yes:
        names = ", ".join(format_process_name(process) for process in new)
        output.require_confirmation(
            f"Load the agent{' and its patches' if patch else ''} into {names}?",
            f"vllmops attach -t {server.label} --yes",
        )
    with Progress(time.time(), quiet=json_) as progress:
        progress.update(
            f"{server.label}: attaching to {format_count(len(new), 'process', 'processes')}"
        )
        by = dict(zip(new, plans, strict=True))
        done, silent = agent_client.collect_answers(
            new,
            lambda process: agent_loader.attach_agent(by[process], patch=patch, timeout_s=timeout),
        )
    data = {
        "server": server.label,
        "dry_run": False,
        "patch": patch,
        "processes": [
            {
                "role": attached.process.role,
                "pid": attached.process.pid,
                "stopped_s": attached.stopped_s,
                "seconds": attached.seconds,
            }
            for attached in done
        ],
        "silent": silent,
    }
    return Result(
        data,
        lambda: render_attach_report(server, done, silent),
        ExitCode.FAILED if silent else ExitCode.OK,
    )


def make_not_attachable_error(server: Server) -> VllmopsError:
    """There is no process to attach to."""
    if not server.select_processes(*ROLES):
        return VllmopsError(
            "attach.no-process",
            f"{server.label} has no process yet to load the agent into",
            f"vllmops wait {server.label} --for ready",
        )
    return VllmopsError(
        "attach.already",
        f"the agent already runs in every process of {server.label}",
        f"vllmops patches list -t {server.label}",
    )


def render_plan(plans: Sequence[AttachPlan]) -> list[RenderableType]:
    """What would be done, for a person."""
    table = output.make_table("ROLE", "PID", "HOW", right_columns=("PID",))
    for plan in plans:
        how = (
            f"by thread {plan.tids[0]} (idle threads: {len(plan.tids)})"
            if plan.tids
            else "by sys.remote_exec, which needs Python 3.14"
        )
        table.add_row(plan.process.role, str(plan.process.pid), how)
    return ["Would attach to:", table]


def render_attach_report(
    server: Server, results: Sequence[AttachResult], gaps: Sequence[ProcessGap]
) -> list[RenderableType]:
    """What was done, for a person."""
    table = output.make_table(
        "ROLE", "PID", "STOPPED", "READY AFTER", right_columns=("PID", "STOPPED")
    )
    for attached in results:
        stopped = "-" if attached.stopped_s is None else f"{1000 * attached.stopped_s:.1f} ms"
        process = attached.process
        row = (process.role, str(process.pid), stopped, f"{attached.seconds:.2f} s")
        table.add_row(*row)
    parts: list[RenderableType] = [table] if results else []
    for missing in gaps:
        parts.append(output.style_text(f"{format_process(missing)}: {missing.reason}", "bold red"))
        parts.append(f"  hint: {missing.hint}")
    if results:
        parts.append(f"Next: vllmops cache inspect -t {server.label}")
    return parts
