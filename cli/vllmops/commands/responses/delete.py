"""``vllmops responses delete``: delete responses by id."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ...output import Json, Progress, Result, command
from ..options import Target
from .changes import each_of, finished, told
from .progress import Counting
from .selection import Store, every_id
from .sources import source

if TYPE_CHECKING:
    from ...vllm_api.responses import Outcome


@command
def delete(
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="What to delete.", autocompletion=every_id)
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Delete responses; what runs is stopped.

    Conversations can't be gone on with from a turn that is deleted, nor from
    one after it.
    """
    outcomes: list[Outcome] = []
    chosen = list(dict.fromkeys(ids))
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "deleted", len(chosen))

        async def run() -> list[str]:
            async with source(target, store) as responses:
                await each_of(chosen, responses.delete, outcomes, counting)
            return chosen

        finished(run, outcomes, counting)
    return told(outcomes, "deleted", as_json=json_)
