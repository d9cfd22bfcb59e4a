"""Cancelling and deleting: what the commands share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace

from ... import output
from ...errors import VllmopsError
from ...output import Result
from .progress import Counting, ended, judged
from .selection import Selection
from .sources import patiently, spread, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ...vllm_api.responses import Outcome

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which it would be.")]


class Found(NamedTuple):
    """As much of a response as has to be remembered of very many."""

    id: str
    status: str
    model: str
    created_at: float
    previous_id: str | None


def over(outcome: Outcome, told: str) -> Outcome:
    """An outcome that is no failure where nobody named the response: it ended, or went, before."""
    if outcome.code not in {"responses.refused", "responses.unknown"}:
        return outcome
    return replace(outcome, done=True, told=told, code="", exit_code=0)


async def gathered(responses: Any, wanted: Selection, counting: Counting) -> list[Found]:
    """All that are meant, the oldest first."""
    found = []
    # A source that is asked for several at once gives all: each by itself is fewer pages.
    for status in sorted(wanted.statuses) or [""]:
        part = Selection(frozenset({status} - {""}), wanted.model, 0.0, wanted.older)
        async for page in walk(responses, part.query(descending=False)):
            counting.add(len(page))
            found += [
                Found(each.id, each.status, each.model, each.created_at, each.previous_id)
                for each in page
                if each.id and part.fits(each)
            ]
    return sorted(found, key=lambda each: each.created_at)


async def each_of(
    ids: Sequence[str],
    act: Callable[[str], Awaitable[Outcome]],
    outcomes: list[Outcome],
    counting: Counting,
) -> None:
    """Do something to each, and note what becomes of it.

    Raises:
        VllmopsError: it can be done to none: there is no route, say, or nobody answers.
    """

    async def one(response_id: str) -> None:
        outcomes.append(await surely(partial(act, response_id)))
        counting.add()

    await spread(ids, one)
    places = {response_id: place for place, response_id in enumerate(ids)}
    outcomes.sort(key=lambda each: places[each.id])


async def surely(act: Callable[[], Awaitable[Outcome]]) -> Outcome:
    """Do something though the store may be unavailable for a while.

    Raises:
        StoreUnavailable: it still is.
    """
    tried = 0

    async def again() -> Outcome:
        nonlocal tried
        tried += 1
        return await act()

    outcome = await patiently(again)
    if tried > 1 and outcome.code == "responses.unknown":
        # It may have been our doing, the time before.
        return replace(outcome, done=True, told="gone", code="", exit_code=0)
    return outcome


def finished(run: Callable[[], Any], outcomes: list[Outcome], counting: Counting) -> Any:
    """Run it to its end.

    Raises:
        VllmopsError: what ended it, with what was done until then.
    """
    try:
        return asyncio.run(run())
    except KeyboardInterrupt as error:
        raise counting.interrupted({"responses": outcomes}) from error
    except VllmopsError as error:
        if outcomes:
            error.message += f"; {counting.far} {counting.what} until then"
            error.data = {"responses": outcomes}
        raise


def would(ids: list[str], act: str, lines: Sequence[str] = ()) -> Result:
    """What a dry run has found."""
    head = f"would {act} {len(ids):,} responses" if ids else f"nothing to {act}"
    return Result(
        {"responses": [{"id": each} for each in ids], "dry_run": bool(ids)},
        lambda: [head, *lines, *([] if lines else map(output.Verbatim, ids))],
    )


def told(outcomes: list[Outcome], what: str, *, as_json: bool, brief: bool = False) -> Result:
    """What became of each.

    Args:
        outcomes: of each.
        what: was to be done to them.
        as_json: whether ``--json`` is wanted.
        brief: count what is as was wished, rather than tell a person of each.

    Raises:
        VllmopsError: it was not done to all.
    """

    def text() -> list[RenderableType]:
        counts = Counter(each.told for each in outcomes if each.done)
        sums = [f"{count:,} {told}" for told, count in counts.most_common()] if brief else []
        shown = [each for each in outcomes if not (brief and each.done)]
        lines = [", ".join(sums)] if sums else []
        lines += [output.Verbatim(f"{each.id}  {each.told}") for each in shown]
        return [*(lines or [f"nothing had to be {what}"])]

    result = Result({"responses": outcomes, "done": sum(each.done for each in outcomes)}, text)
    return ended(result, judged(outcomes, what), as_json=as_json)
