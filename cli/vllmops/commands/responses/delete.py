"""``vllmops responses delete``: delete responses by id."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...output import Json, Progress, Result, command
from ..options import Target
from .changes import apply, report, run_to_end
from .progress import Counting
from .selection import Store, every_id
from .sources import source

if TYPE_CHECKING:
    from ...store.source import ChangeResult


@command
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Responses to delete.", autocompletion=every_id),
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Delete responses; running ones are stopped.

    A conversation cannot continue from a deleted turn, nor from a later turn.
    """
    outcomes: list[ChangeResult] = []
    chosen = list(dict.fromkeys(ids))
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "deleted", len(chosen))

        async def run() -> list[str]:
            async with source(target, store) as responses:
                await apply(chosen, responses.delete, outcomes, counting)
            return chosen

        run_to_end(run, outcomes, counting)
    return report(outcomes, "deleted", as_json=json_)
