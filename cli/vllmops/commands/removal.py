"""``vllmops responses cancel``, ``delete`` and ``purge``: what stops runs and what deletes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace

from .. import output
from ..errors import VllmopsError
from ..output import Json, Progress, Result, command
from ..store.backend import FINISHED, RUNNING
from .options import Target
from .sources import (
    Counting,
    Model,
    OlderThan,
    Selection,
    Statuses,
    Store,
    age,
    ended,
    every_id,
    judged,
    patiently,
    running_id,
    selected,
    source,
    spread,
    usage,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ..store.source import Outcome

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say which it would be.")]


class Found(NamedTuple):
    """As much of a response as has to be remembered of very many."""

    id: str
    status: str
    model: str
    created_at: float
    previous_id: str | None


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


def over(outcome: Outcome, told: str) -> Outcome:
    """An outcome that is no failure where nobody named the response: it ended, or went, before."""
    if outcome.code not in {"responses.refused", "responses.unknown"}:
        return outcome
    return replace(outcome, done=True, told=told, code="", exit_code=0)


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
