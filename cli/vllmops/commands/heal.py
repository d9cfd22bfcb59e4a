"""``vllmops heal``: bring a server that hangs back, without a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..actions import healing
from ..actions.action import Action
from ..actions.healing import ACTIONS, GONE_S, HealResult
from ..actions.unhealable_stalls import RemainingStall, find_remaining_stall
from ..model.ranks import format_process
from ..servers.discovery import resolve_server
from ..support import output
from ..support.errors import ExitCode, make_usage_error
from ..support.output import Json, Progress, Result, make_typer_app
from .findings_view import render_findings
from .multi_target import run_per_target
from .options import Target

if TYPE_CHECKING:
    from rich.console import RenderableType

app = make_typer_app()
CHOICE = "Which actions"


def complete_action_name(incomplete: str) -> list[str]:
    """Names of the actions, for completion."""
    return [action.name for action in ACTIONS if action.name.startswith(incomplete)]


Names = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="An action, as --list names it. Repeatable.",
        autocompletion=complete_action_name,
        rich_help_panel=CHOICE,
    ),
]


@app.command(epilog="Example: vllmops heal -t demo --dry-run")
@run_per_target
def heal(
    *,
    target: Target = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be healed; change nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Also wake what is paused or asleep, and continue what a signal has stopped.",
        ),
    ] = False,
    only: Names = None,
    skip: Names = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="List every action, and look at nothing.", rich_help_panel=CHOICE
        ),
    ] = False,
    json_: Json = False,
) -> Result:
    """Bring a server that hangs back, without a restart.

    Each action looks for one state. It acts only on what three looks prove,
    changes as little as possible, and looks again. All other requests go on.
    A healthy server is not changed. The server's log gets a line for each
    change. The exit code is 1 if something is left, or with --dry-run if
    there is something to heal.
    """
    actions = select_actions(only, skip)
    if list_:
        return Result(
            {"actions": [build_action_data(action) for action in actions]},
            lambda: [make_actions_table(actions)],
        )
    server = resolve_server(target)
    with Progress(time.time(), quiet=json_) as progress:
        healed = healing.heal_server(
            server, actions, dry_run=dry_run, resume=resume, show=progress.update
        )
        rest = find_remaining_stall(server, progress.update, GONE_S)
    data = {
        "server": server.label,
        "dry_run": dry_run,
        "actions": healed.outcomes,
        "silent": healed.gaps,
        "problems": healed.problems,
        "stuck": rest,
    }
    left = any(not outcome.done for outcome in healed.outcomes)
    failed = rest is not None or left or bool(healed.problems)
    code = ExitCode.FAILED if failed else ExitCode.OK
    return Result(data, lambda: list(render_outcomes(healed, rest, dry_run)), code)


def select_actions(only_names: Sequence[str] | None, skip: Sequence[str] | None) -> list[Action]:
    """The actions that the options mean.

    Raises:
        VllmopsError: ``usage``.
    """
    known = {action.name for action in ACTIONS}
    for name in (*(only_names or ()), *(skip or ())):
        if name not in known:
            raise make_usage_error(f"there is no action {name!r}", "vllmops heal --list")
    meant = (set(only_names) if only_names else known) - set(skip or ())
    return [action for action in ACTIONS if action.name in meant]


def build_action_data(action: Action) -> dict[str, Any]:
    names = ("name", "state", "does", "risk", "reference", "asks")
    return {name: getattr(action, name) for name in names}


def make_actions_table(actions: Sequence[Action]) -> RenderableType:
    """A line for each action."""
    made = output.make_table("action", "heals", "how", "risk")
    for action in actions:
        made.add_row(
            action.name,
            action.state,
            f"{action.does}; only with --resume" if action.asks else action.does,
            action.risk,
        )
    return made


def render_outcomes(
    heal_result: HealResult, remaining_stall: RemainingStall | None, dry_run: bool
) -> Iterator[RenderableType]:
    """What was done, for a person."""
    for outcome in heal_result.outcomes:
        verb, style = ("healed", "green") if outcome.done else ("not healed", "yellow")
        if dry_run and not outcome.reason:
            verb = "would heal"
        yield output.style_text(
            f"{verb}: {outcome.action}, {outcome.process}, {outcome.subject}", style
        )
        yield f"  seen: {outcome.evidence}"
        yield f"  action: {outcome.did}"
        if outcome.reason:
            yield f"  left: {outcome.reason}"
    for silent in heal_result.gaps:
        yield output.style_text(
            f"{format_process(silent)} did not answer: {silent.reason}", "yellow"
        )
    for problem in heal_result.problems:
        yield output.style_text(problem, "yellow")
    if not heal_result.outcomes:
        yield output.style_text("Nothing to heal.", "" if remaining_stall else "green")
    if remaining_stall:
        yield output.style_text("Still stuck:", "bold red")
        yield from render_findings([remaining_stall.finding])
        count = (
            "an unknown number"
            if remaining_stall.in_flight is None
            else f"{remaining_stall.in_flight:,}"
        )
        yield (
            f"  a restart loses requests in flight: {count} ({remaining_stall.background:,} in "
            "background)"
        )
        yield f"  a restart brings back: {remaining_stall.restart}"
