"""``vllmops responses cancel``: stop responses that run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import usage
from ...output import Json, Progress, Result, command
from ...store.backend import RUNNING
from ..options import DryRun, Target
from .changes import apply, dry_run_result, gathered, over, report, run_to_end
from .progress import Counting
from .selection import OlderThan, Selection, Store, running_id, selected
from .sources import source

if TYPE_CHECKING:
    from ...store.source import ChangeResult


@command
def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Responses to stop.", autocompletion=running_id),
    ] = None,
    *,
    target: Target = None,
    store: Store = None,
    all_running: Annotated[
        bool, typer.Option("--all-running", help="Stop all running and queued responses.")
    ] = False,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> Result:
    """Stop background responses, on whichever server they run.

    Give IDs, or --all-running; --older-than selects running responses by age.
    With --store, the responses are marked in the store, and the server that runs
    them stops within a second. The command can be repeated. A finished response
    does not change; naming one is an error.
    """
    selection = selected(None, None, None, older_than)
    picked = all_running or older_than is not None
    if bool(ids) == picked:
        raise usage(
            "give IDs or --all-running, not both" if ids else "no responses to stop are given",
            "vllmops responses cancel ID, or --all-running",
        )
    outcomes: list[ChangeResult] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "cancelled")

        async def run() -> list[str]:
            async with source(target, store) as responses:
                chosen = list(dict.fromkeys(ids or ()))
                if picked:
                    looked = Counting(progress, "read")
                    running = Selection(RUNNING, None, 0.0, selection.older)
                    chosen = [
                        response.id for response in await gathered(responses, running, looked)
                    ]
                counting.total = len(chosen)
                if not dry_run:
                    await apply(chosen, responses.cancel, outcomes, counting)
                return chosen

        chosen = run_to_end(run, outcomes, counting)
    if dry_run:
        return dry_run_result(chosen, "stop")
    if picked:  # a response that ended by itself is a success, too
        outcomes = [over(outcome, "ended by itself") for outcome in outcomes]
    return report(outcomes, "cancelled", as_json=json_)
