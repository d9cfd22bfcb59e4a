"""Cancelling and deleting: what the commands share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from vllmops.support import output
from vllmops.support.errors import VllmopsError
from vllmops.support.numbers import format_count
from vllmops.support.output import Result

from .progress import ProgressCounter, return_or_show_and_raise, summarize_failures
from .response_options import Selection
from .source_options import iterate_pages, retry_while_unavailable, run_concurrently

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ...store.response_source import ChangeResult


class ResponseSummary(NamedTuple):
    """The few fields that are kept in memory of many responses."""

    id: str
    status: str
    model: str
    created_at: float
    previous_id: str | None


def accept_if_gone(outcome: ChangeResult, result: str) -> ChangeResult:
    """The outcome for an unnamed response: that it ended or was deleted first is no failure."""
    if outcome.code not in {"responses.refused", "responses.unknown"}:
        return outcome
    return replace(outcome, done=True, result=result, code="", exit_code=0)


async def collect_responses(
    responses: Any, selection: Selection, counting: ProgressCounter
) -> list[ResponseSummary]:
    """All selected responses, the oldest first."""
    matching = []
    # A query takes one status: one query per status reads fewer pages than a query for all.
    for status in sorted(selection.statuses) or [""]:
        part = Selection(frozenset({status} - {""}), selection.model, 0.0, selection.created_before)
        async for page in iterate_pages(responses, part.build_query(descending=False)):
            counting.add(len(page))
            matching += [
                ResponseSummary(
                    response.id,
                    response.status,
                    response.model,
                    response.created_at,
                    response.previous_id,
                )
                for response in page
                if response.id and part.matches(response)
            ]
    return sorted(matching, key=lambda response: response.created_at)


async def apply_to_all(
    ids: Sequence[str],
    action: Callable[[str], Awaitable[ChangeResult]],
    outcomes: list[ChangeResult],
    counting: ProgressCounter,
) -> None:
    """Apply an action to every id, and collect the outcomes.

    Raises:
        VllmopsError: the action is impossible, for example because the server does not answer.
    """

    async def apply_to_one(response_id: str) -> None:
        outcomes.append(await run_with_retries(partial(action, response_id)))
        counting.add()

    await run_concurrently(ids, apply_to_one)
    places = {response_id: place for place, response_id in enumerate(ids)}
    outcomes.sort(key=lambda outcome: places[outcome.id])


async def run_with_retries(action: Callable[[], Awaitable[ChangeResult]]) -> ChangeResult:
    """Run an action, and retry while the store is unavailable.

    Raises:
        StoreUnavailable: it still is.
    """
    tried = 0

    async def try_once() -> ChangeResult:
        nonlocal tried
        tried += 1
        return await action()

    outcome = await retry_while_unavailable(try_once)
    if tried > 1 and outcome.code == "responses.unknown":
        # The first try may have deleted it.
        return replace(outcome, done=True, result="gone", code="", exit_code=0)
    return outcome


def run_to_end(
    run: Callable[[], Any], outcomes: list[ChangeResult], counting: ProgressCounter
) -> Any:
    """Run a coroutine to its end.

    Raises:
        VllmopsError: what ended it, with the outcomes so far.
    """
    try:
        return asyncio.run(run())
    except KeyboardInterrupt as error:
        raise counting.make_interrupted_error({"responses": outcomes}) from error
    except VllmopsError as error:
        if outcomes:
            error.message += f"; {counting.progress_text} {counting.participle} until then"
            error.data = {"responses": outcomes}
        raise


def make_dry_run_result(ids: list[str], verb: str, lines: Sequence[str] = ()) -> Result:
    """The result of a dry run."""
    head = f"would {verb} {format_count(len(ids), 'response')}" if ids else f"nothing to {verb}"
    return Result(
        {"responses": [{"id": response_id} for response_id in ids], "dry_run": bool(ids)},
        lambda: [head, *lines, *([] if lines else map(output.VerbatimText, ids))],
    )


def make_changes_result(
    outcomes: list[ChangeResult], participle: str, *, as_json: bool, brief: bool = False
) -> Result:
    """The result of a command on several responses.

    Args:
        outcomes: one per response.
        participle: the action, as in ``deleted``.
        as_json: whether ``--json`` is selection.
        brief: print the count of successes instead of one line per response.

    Raises:
        VllmopsError: at least one response failed.
    """

    def render_changes() -> list[RenderableType]:
        counts = Counter(outcome.result for outcome in outcomes if outcome.done)
        sums = [f"{count:,} {result}" for result, count in counts.most_common()] if brief else []
        shown = [outcome for outcome in outcomes if not (brief and outcome.done)]
        lines = [", ".join(sums)] if sums else []
        lines += [output.VerbatimText(f"{outcome.id}  {outcome.result}") for outcome in shown]
        return [*(lines or [f"nothing to do: no response was {participle}"])]

    result = Result(
        {"responses": outcomes, "done": sum(outcome.done for outcome in outcomes)}, render_changes
    )
    return return_or_show_and_raise(
        result, summarize_failures(outcomes, participle), as_json=as_json
    )
