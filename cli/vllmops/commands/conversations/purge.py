"""``vllmops conversations purge``: delete conversations by age."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any

import typer

from ... import output
from ...errors import usage
from ...numbers import many
from ...output import Json, Progress, Result, command
from ...store.backend import EVERYBODY
from ..options import DryRun, Target, Yes, duration, time_
from ..responses.entries import age
from ..responses.progress import Counting
from ..responses.sources import retried
from .place import Store, opened, walk

OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        parser=time_,
        metavar="TIME",
        help="Only conversations created longer ago than this: 15m, 36h, 30d.",
    ),
]


@command
def purge(
    *,
    target: Target = None,
    store: Store = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json_: Json = False,
) -> Result:
    """Delete all conversations of an age with their items, after confirmation.

    Conversations of all API keys are deleted, also those in use. Responses stay.
    """
    if older_than is None:
        raise usage("no age is given", "--older-than 30d, or --older-than 1s for all")
    made_before = time.time() - duration(older_than)
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "read")
        try:
            name, total, old = asyncio.run(found(target, store, made_before, counting))
            progress.stop()
            if dry_run or not old:
                head = (
                    f"would delete {many(len(old), 'conversation')}" if old else "nothing to delete"
                )
                return Result(purged(old, dry_run=bool(old)), lambda: [head])
            if not yes:
                newest, oldest = age(max(old.values())), age(min(old.values()))
                output.say(f"newest: {newest} old, oldest: {oldest} old")
                question = f"Delete {len(old):,} of {many(total, 'conversation')} of {name}?"
                output.confirm(question, "repeat the command with --yes")
            counting = Counting(progress, "deleted", len(old))
            asyncio.run(delete(target, store, list(old), counting))
        except KeyboardInterrupt as error:
            raise counting.interrupted() from error
    return Result(purged(old, dry_run=False), lambda: [f"{len(old):,} deleted"])


async def found(
    target: str | None, store: str | None, made_before: float, counting: Counting
) -> tuple[str, int, dict[str, float]]:
    """The store's name, how many conversations it has, and when the old ones were made, by id."""
    old = {}
    async with opened(target, store) as (name, kept):
        async for one in walk(kept):
            counting.add()
            if one.created_at < made_before:
                old[one.id] = one.created_at
    return name, counting.done, old


async def delete(target: str | None, store: str | None, ids: list[str], counting: Counting) -> None:
    """Delete conversations; one that is gone already is fine.

    Raises:
        StoreUnavailable: the store is down.
    """
    async with opened(target, store) as (_, kept):
        for one in ids:
            await retried(partial(kept.delete, EVERYBODY, one))
            counting.add()


def purged(ids: dict[str, float], *, dry_run: bool) -> dict[str, Any]:
    return {"conversations": [{"id": one} for one in ids], "dry_run": dry_run}
