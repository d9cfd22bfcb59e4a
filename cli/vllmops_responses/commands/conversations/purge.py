"""``vllmops conversations purge``: delete conversations by age."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Annotated, Any

import typer

from vllmops.commands.options import DryRun, Target, Yes, parse_duration, validate_duration
from vllmops.support import output
from vllmops.support.errors import make_usage_error
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, Progress, Result, print_result

from ...store.backend import EVERYBODY
from ..responses.progress import ProgressCounter
from ..responses.response_rows import format_age
from ..responses.source_options import retry_while_unavailable
from .store_options import Store, iterate_conversations, open_conversations

OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        parser=validate_duration,
        metavar="TIME",
        help="Only conversations created longer ago than this: 15m, 36h, 30d.",
    ),
]


@print_result
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
        raise make_usage_error("no age is given", "--older-than 30d, or --older-than 1s for all")
    made_before = time.time() - parse_duration(older_than)
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "read")
        try:
            name, total, old = asyncio.run(
                find_old_conversations(target, store, made_before, counting)
            )
            progress.stop()
            if dry_run or not old:
                head = (
                    f"would delete {format_count(len(old), 'conversation')}"
                    if old
                    else "nothing to delete"
                )
                return Result(build_purge_data(old, dry_run=bool(old)), lambda: [head])
            if not yes:
                newest, oldest = format_age(max(old.values())), format_age(min(old.values()))
                output.print_to_stderr(f"newest: {newest} old, oldest: {oldest} old")
                question = (
                    f"Delete {len(old):,} of {format_count(total, 'conversation')} of {name}?"
                )
                output.require_confirmation(question, "repeat the command with --yes")
            counting = ProgressCounter(progress, "deleted", len(old))
            asyncio.run(delete_conversations(target, store, list(old), counting))
        except KeyboardInterrupt as error:
            raise counting.make_interrupted_error() from error
    return Result(build_purge_data(old, dry_run=False), lambda: [f"{len(old):,} deleted"])


async def find_old_conversations(
    target: str | None, store: str | None, made_before: float, counting: ProgressCounter
) -> tuple[str, int, dict[str, float]]:
    """The store's name, how many conversations it has, and when the old ones were made, by id."""
    old = {}
    async with open_conversations(target, store) as (name, kept):
        async for one in iterate_conversations(kept):
            counting.add()
            if one.created_at < made_before:
                old[one.id] = one.created_at
    return name, counting.done, old


async def delete_conversations(
    target: str | None, store: str | None, ids: list[str], counting: ProgressCounter
) -> None:
    """Delete conversations; one that is gone already is fine.

    Raises:
        StoreUnavailable: the store is down.
    """
    async with open_conversations(target, store) as (_, kept):
        for one in ids:
            await retry_while_unavailable(partial(kept.delete, EVERYBODY, one))
            counting.add()


def build_purge_data(ids: dict[str, float], *, dry_run: bool) -> dict[str, Any]:
    return {"conversations": [{"id": one} for one in ids], "dry_run": dry_run}
