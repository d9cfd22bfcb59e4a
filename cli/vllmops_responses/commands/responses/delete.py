"""``vllmops responses delete``: delete responses by id."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from vllmops.commands.options import Target
from vllmops.support.output import Json, Progress, Result, print_result

from .bulk_changes import apply_to_all, make_changes_result, run_to_end
from .progress import ProgressCounter
from .response_options import Store, complete_response_id
from .source_options import open_source

if TYPE_CHECKING:
    from ...store.response_source import ChangeResult


@print_result
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...", help="Responses to delete.", autocompletion=complete_response_id
        ),
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
        counting = ProgressCounter(progress, "deleted", len(chosen))

        async def delete_selected() -> list[str]:
            async with open_source(target, store) as responses:
                await apply_to_all(chosen, responses.delete, outcomes, counting)
            return chosen

        run_to_end(delete_selected, outcomes, counting)
    return make_changes_result(outcomes, "deleted", as_json=json_)
