"""``vllmops responses purge``: delete responses by age, status or model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ... import output
from ...output import Json, Progress, Result, command
from ...store.backend import FINISHED
from ..options import Target
from .changes import DryRun, Found, each_of, finished, gathered, over, told, would
from .entries import age
from .progress import Counting
from .selection import Model, OlderThan, Selection, Statuses, Store, selected
from .sources import source, usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...vllm_api.responses import Outcome


@command
def purge(
    *,
    target: Target = None,
    store: Store = None,
    older_than: OlderThan = None,
    status: Statuses = None,
    model: Model = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    json_: Json = False,
) -> Result:
    """Delete all responses of an age, a status or a model, once it is confirmed.

    What runs is left alone unless its status is named. A server deletes those
    of one API key, which is taken from VLLM_API_KEY; on the store itself it is
    everybody's.
    """
    wanted = selected(status, model, None, older_than)
    if wanted.any:
        raise usage(
            "it is not said which responses are to go",
            "--older-than 30d, --status failed, or --older-than 1s for all",
        )
    wanted = Selection(wanted.statuses or FINISHED, wanted.model, 0.0, wanted.older)
    outcomes: list[Outcome] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "deleted")

        async def look() -> tuple[str, list[Found]]:
            async with source(target, store) as responses:
                looked = Counting(progress, "looked at")
                return responses.name, await gathered(responses, Selection(), looked)

        async def run() -> list[str]:
            async with source(target, store) as responses:
                await each_of([each.id for each in chosen], responses.delete, outcomes, counting)
            return []

        name, every = asyncio.run(look())
        chosen = [each for each in every if wanted.fits(each)]
        counting.total = len(chosen)
        broken = cut(every, {each.id for each in chosen})
        progress.stop()
        if dry_run or not chosen:
            return would([each.id for each in chosen], "delete", summary(chosen, broken))
        if not yes:
            for line in summary(chosen, broken):
                output.say(line)
            question = f"Delete {len(chosen):,} of {len(every):,} responses of {name}?"
            output.confirm(question, "the same with --yes")
        finished(run, outcomes, counting)
    return told([over(each, "gone") for each in outcomes], "deleted", as_json=json_, brief=True)


def cut(every: Sequence[Found], chosen: set[str]) -> int:
    """How many that stay go on from one that is to go."""
    return sum(each.previous_id in chosen and each.id not in chosen for each in every)


def summary(chosen: Sequence[Found], broken: int) -> list[str]:
    """What is to go, in a few lines."""
    if not chosen:
        return []
    counts = Counter(each.status for each in chosen)
    lines = [", ".join(f"{count:,} {status}" for status, count in counts.most_common())]
    dates = [each.created_at for each in chosen]
    lines.append(f"the newest {age(max(dates))} old, the oldest {age(min(dates))}")
    if broken:
        lines.append(f"{broken:,} that stay go on from one of them, and can't be gone on with then")
    return lines
