"""``vllmops responses cancel``: stop responses that run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...output import Json, Progress, Result, command
from ...store.backend import RUNNING
from ..options import Target
from .changes import DryRun, each_of, finished, gathered, over, told, would
from .progress import Counting
from .selection import OlderThan, Selection, Store, running_id, selected
from .sources import source, usage

if TYPE_CHECKING:
    from ...vllm_api.responses import Outcome


@command
def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="What to stop.", autocompletion=running_id),
    ] = None,
    *,
    target: Target = None,
    store: Store = None,
    all_running: Annotated[
        bool, typer.Option("--all-running", help="All that run, or are queued.")
    ] = False,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> Result:
    """Stop responses in the background, wherever they run.

    Those named, or all that run; with --older-than those that were made before
    that. On the store itself they are marked, and whoever runs them stops
    within a second. Once more does no harm; what has finished stays as it is,
    which is a failure where it was named.
    """
    wanted = selected(None, None, None, older_than)
    picked = all_running or older_than is not None
    if bool(ids) == picked:
        raise usage(
            "name what to stop, or ask for all that runs; not both"
            if ids
            else "it is not said what to stop",
            "vllmops responses cancel ID, or --all-running",
        )
    outcomes: list[Outcome] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "cancelled")

        async def run() -> list[str]:
            async with source(target, store) as responses:
                chosen = list(dict.fromkeys(ids or ()))
                if picked:
                    looked = Counting(progress, "looked at")
                    running = Selection(RUNNING, None, 0.0, wanted.older)
                    chosen = [each.id for each in await gathered(responses, running, looked)]
                counting.total = len(chosen)
                if not dry_run:
                    await each_of(chosen, responses.cancel, outcomes, counting)
                return chosen

        chosen = finished(run, outcomes, counting)
    if dry_run:
        return would(chosen, "stop")
    if picked:  # what has ended by itself meanwhile is as was wished
        outcomes = [over(each, "ended by itself") for each in outcomes]
    return told(outcomes, "cancelled", as_json=json_)
