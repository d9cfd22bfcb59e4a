"""``vllmops responses cancel``: stop responses that run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from vllmops.commands.options import DryRun, Target
from vllmops.support.errors import make_usage_error
from vllmops.support.output import Json, Progress, Result, print_result

from ...store.backend import RUNNING
from .bulk_changes import (
    accept_if_gone,
    apply_to_all,
    collect_responses,
    make_changes_result,
    make_dry_run_result,
    run_to_end,
)
from .progress import ProgressCounter
from .response_options import OlderThan, Selection, Store, complete_running_id, parse_selection
from .source_options import open_source

if TYPE_CHECKING:
    from ...store.response_source import ChangeResult


@print_result
def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...", help="Responses to stop.", autocompletion=complete_running_id
        ),
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
    selection = parse_selection(None, None, None, older_than)
    picked = all_running or older_than is not None
    if bool(ids) == picked:
        raise make_usage_error(
            "give IDs or --all-running, not both" if ids else "no responses to stop are given",
            "vllmops responses cancel ID, or --all-running",
        )
    outcomes: list[ChangeResult] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "cancelled")

        async def cancel_selected() -> list[str]:
            async with open_source(target, store) as responses:
                chosen = list(dict.fromkeys(ids or ()))
                if picked:
                    looked = ProgressCounter(progress, "read")
                    running = Selection(RUNNING, None, 0.0, selection.created_before)
                    chosen = [
                        response.id
                        for response in await collect_responses(responses, running, looked)
                    ]
                counting.total = len(chosen)
                if not dry_run:
                    await apply_to_all(chosen, responses.cancel, outcomes, counting)
                return chosen

        chosen = run_to_end(cancel_selected, outcomes, counting)
    if dry_run:
        return make_dry_run_result(chosen, "stop")
    if picked:  # a response that ended by itself is a success, too
        outcomes = [accept_if_gone(outcome, "ended by itself") for outcome in outcomes]
    return make_changes_result(outcomes, "cancelled", as_json=json_)
