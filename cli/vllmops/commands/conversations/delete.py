"""``vllmops conversations delete``: delete conversations by id."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import typer

from ...output import Json, Result, Verbatim, command
from ...store.backend import EVERYBODY
from ..options import Target
from ..responses.progress import ended
from ..responses.sources import retried
from .place import Store, every_id, opened, unknown


@command
def delete(
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID...", help="Conversations to delete.", autocompletion=every_id),
    ],
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Delete conversations with their items. Their responses stay."""
    name, done = asyncio.run(deleted(target, store, list(dict.fromkeys(ids))))
    data = {"conversations": [{"id": one, "deleted": there} for one, there in done.items()]}
    lines = [Verbatim(f"{one}  deleted") for one, there in done.items() if there]
    missing = [one for one, there in done.items() if not there]
    failure = unknown(name, *missing) if missing else None
    return ended(Result(data, lambda: list(lines)), failure, as_json=json_)


async def deleted(
    target: str | None, store: str | None, ids: list[str]
) -> tuple[str, dict[str, bool]]:
    """The name of the store, and of each conversation whether it was there."""
    async with opened(target, store) as (name, kept):
        return name, {one: await retried(partial(kept.delete, EVERYBODY, one)) for one in ids}
