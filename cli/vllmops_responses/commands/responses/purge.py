"""``vllmops responses purge``: delete responses by age, status or model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

from vllmops.commands.options import DryRun, Target, Yes
from vllmops.support import output
from vllmops.support.errors import make_usage_error
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, Progress, Result, print_result

from ...store.backend import FINISHED
from .bulk_changes import (
    ResponseSummary,
    accept_if_gone,
    apply_to_all,
    collect_responses,
    make_changes_result,
    make_dry_run_result,
    run_to_end,
)
from .progress import ProgressCounter
from .response_options import Model, OlderThan, Selection, Statuses, Store, parse_selection
from .response_rows import format_age
from .source_options import open_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...store.response_source import ChangeResult


@print_result
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
    selection = parse_selection(status, model, None, older_than)
    if selection.is_unfiltered:
        raise make_usage_error(
            "no filter is given: age, status or model",
            "--older-than 30d, --status failed, or --older-than 1s for all",
        )
    selection = Selection(
        selection.statuses or FINISHED, selection.model, 0.0, selection.created_before
    )
    outcomes: list[ChangeResult] = []
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "deleted")

        async def collect_all() -> tuple[str, list[ResponseSummary]]:
            async with open_source(target, store) as responses:
                looked = ProgressCounter(progress, "read")
                return responses.name, await collect_responses(responses, Selection(), looked)

        async def delete_selected() -> list[str]:
            async with open_source(target, store) as responses:
                await apply_to_all(
                    [response.id for response in chosen], responses.delete, outcomes, counting
                )
            return []

        name, every = asyncio.run(collect_all())
        chosen = [response for response in every if selection.matches(response)]
        counting.total = len(chosen)
        broken = count_broken_chains(every, {response.id for response in chosen})
        progress.stop()
        if dry_run or not chosen:
            return make_dry_run_result(
                [response.id for response in chosen], "delete", summarize_selection(chosen, broken)
            )
        if not yes:
            for line in summarize_selection(chosen, broken):
                output.print_to_stderr(line)
            question = (
                f"Delete {len(chosen):,} of {format_count(len(every), 'response')} of {name}?"
            )
            output.require_confirmation(question, "repeat the command with --yes")
        run_to_end(delete_selected, outcomes, counting)
    return make_changes_result(
        [accept_if_gone(outcome, "gone") for outcome in outcomes],
        "deleted",
        as_json=json_,
        brief=True,
    )


def count_broken_chains(responses: Sequence[ResponseSummary], deleted_ids: set[str]) -> int:
    """How many remaining responses follow one that is deleted."""
    return sum(
        response.previous_id in deleted_ids and response.id not in deleted_ids
        for response in responses
    )


def summarize_selection(responses: Sequence[ResponseSummary], broken_chains: int) -> list[str]:
    """The responses to delete, in a few lines."""
    if not responses:
        return []
    counts = Counter(response.status for response in responses)
    lines = [", ".join(f"{count:,} {status}" for status, count in counts.most_common())]
    dates = [response.created_at for response in responses]
    lines.append(f"newest: {format_age(max(dates))} old, oldest: {format_age(min(dates))} old")
    if broken_chains:
        lines.append(
            f"{broken_chains:,} remaining responses follow one of these, and cannot be continued"
        )
    return lines
