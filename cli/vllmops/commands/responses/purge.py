"""``vllmops responses purge``: delete responses by age, status or model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from ... import output
from ...errors import usage
from ...numbers import many
from ...output import Json, Progress, Result, command
from ...store.backend import FINISHED
from ..options import DryRun, Target, Yes
from .changes import Found, apply, dry_run_result, gathered, over, report, run_to_end
from .entries import age
from .progress import Counting
from .selection import Model, OlderThan, Selection, Statuses, Store, selected
from .sources import source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store.source import ChangeResult


@command
def purge(
    *,
    target: Target = None,
    store: Store = None,
    older_than: OlderThan = None,
    status: Statuses = None,
    model: Model = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json_: Json = False,
) -> Result:
    """Delete all responses of an age, status or model, after confirmation.

    Running responses are kept unless their status is named. A server deletes
    the responses of one API key, taken from VLLM_API_KEY. With --store, the
    responses of all keys are deleted.
    """
    selection = selected(status, model, None, older_than)
    if selection.any:
        raise usage(
            "no filter is given: age, status or model",
            "--older-than 30d, --status failed, or --older-than 1s for all",
        )
    selection = Selection(selection.statuses or FINISHED, selection.model, 0.0, selection.older)
    outcomes: list[ChangeResult] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "deleted")

        async def look() -> tuple[str, list[Found]]:
            async with source(target, store) as responses:
                looked = Counting(progress, "read")
                return responses.name, await gathered(responses, Selection(), looked)

        async def run() -> list[str]:
            async with source(target, store) as responses:
                await apply(
                    [response.id for response in chosen], responses.delete, outcomes, counting
                )
            return []

        name, every = asyncio.run(look())
        chosen = [response for response in every if selection.fits(response)]
        counting.total = len(chosen)
        broken = cut_off(every, {response.id for response in chosen})
        progress.stop()
        if dry_run or not chosen:
            return dry_run_result(
                [response.id for response in chosen], "delete", summary(chosen, broken)
            )
        if not yes:
            for line in summary(chosen, broken):
                output.say(line)
            question = f"Delete {len(chosen):,} of {many(len(every), 'response')} of {name}?"
            output.confirm(question, "repeat the command with --yes")
        run_to_end(run, outcomes, counting)
    return report(
        [over(outcome, "gone") for outcome in outcomes], "deleted", as_json=json_, brief=True
    )


def cut_off(every: Sequence[Found], chosen: set[str]) -> int:
    """How many remaining responses follow one that is deleted."""
    return sum(response.previous_id in chosen and response.id not in chosen for response in every)


def summary(chosen: Sequence[Found], broken: int) -> list[str]:
    """The responses to delete, in a few lines."""
    if not chosen:
        return []
    counts = Counter(response.status for response in chosen)
    lines = [", ".join(f"{count:,} {status}" for status, count in counts.most_common())]
    dates = [response.created_at for response in chosen]
    lines.append(f"newest: {age(max(dates))} old, oldest: {age(min(dates))} old")
    if broken:
        lines.append(f"{broken:,} remaining responses follow one of these, and cannot be continued")
    return lines
