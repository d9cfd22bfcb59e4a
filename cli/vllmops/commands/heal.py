"""``vllmops heal``: bring a server that hangs back, without a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import output
from ..errors import Exit, usage
from ..heal import heal as healing
from ..heal.action import Action
from ..heal.beyond import Beyond, beyond
from ..heal.heal import ACTIONS, GONE_S, Healed
from ..instances.servers import resolve
from ..output import Json, Progress, Result, typer_app
from ..protocol.place import who
from .findings import lines
from .options import Target
from .several import per_target

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer_app()
CHOICE = "Which actions"


def names(incomplete: str) -> list[str]:
    """Names of the actions, for completion."""
    return [action.name for action in ACTIONS if action.name.startswith(incomplete)]


Names = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="An action, as --list names it. Repeatable.",
        autocompletion=names,
        rich_help_panel=CHOICE,
    ),
]


@app.command(epilog="Example: vllmops heal -t demo --dry-run")
@per_target
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
    actions = chosen(only, skip)
    if list_:
        return Result({"actions": [row(action) for action in actions]}, lambda: [table(actions)])
    server = resolve(target)
    with Progress(time.time(), quiet=json_) as progress:
        healed = healing.heal(server, actions, dry_run=dry_run, resume=resume, show=progress.update)
        rest = beyond(server, progress.update, GONE_S)
    data = {
        "server": server.label,
        "dry_run": dry_run,
        "actions": healed.outcomes,
        "silent": healed.silent,
        "problems": healed.problems,
        "stuck": rest,
    }
    left = any(not outcome.done for outcome in healed.outcomes)
    failed = rest is not None or left or bool(healed.problems)
    code = Exit.FAILED if failed else Exit.OK
    return Result(data, lambda: list(text(healed, rest, dry_run)), code)


def chosen(only: Sequence[str] | None, skip: Sequence[str] | None) -> list[Action]:
    """The actions that the options mean.

    Raises:
        VllmopsError: ``usage``.
    """
    known = {action.name for action in ACTIONS}
    for name in (*(only or ()), *(skip or ())):
        if name not in known:
            raise usage(f"there is no action {name!r}", "vllmops heal --list")
    meant = (set(only) if only else known) - set(skip or ())
    return [action for action in ACTIONS if action.name in meant]


def row(action: Action) -> dict[str, Any]:
    names = ("name", "state", "does", "risk", "reference", "asks")
    return {name: getattr(action, name) for name in names}


def table(actions: Sequence[Action]) -> RenderableType:
    """A line for each action."""
    made = output.table("action", "heals", "how", "risk")
    for action in actions:
        made.add_row(
            action.name,
            action.state,
            f"{action.does}; only with --resume" if action.asks else action.does,
            action.risk,
        )
    return made


def text(healed: Healed, rest: Beyond | None, dry_run: bool) -> Iterator[RenderableType]:
    """What was done, for a person."""
    for outcome in healed.outcomes:
        verb, style = ("healed", "green") if outcome.done else ("not healed", "yellow")
        if dry_run and not outcome.left:
            verb = "would heal"
        yield output.styled(
            f"{verb}: {outcome.action}, {outcome.process}, {outcome.subject}", style
        )
        yield f"  seen: {outcome.seen}"
        yield f"  action: {outcome.did}"
        if outcome.left:
            yield f"  left: {outcome.left}"
    for silent in healed.silent:
        yield output.styled(f"{who(silent)} did not answer: {silent.why}", "yellow")
    for problem in healed.problems:
        yield output.styled(problem, "yellow")
    if not healed.outcomes:
        yield output.styled("Nothing to heal.", "" if rest else "green")
    if rest:
        yield output.styled("Still stuck:", "bold red")
        yield from lines([rest.finding])
        count = "an unknown number" if rest.in_flight is None else f"{rest.in_flight:,}"
        yield f"  a restart loses requests in flight: {count} ({rest.background:,} in background)"
        yield f"  a restart brings back: {rest.restart}"
