"""``vllmops conversations import``: conversations from lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import IO

import msgspec

from ...errors import VllmopsError
from ...numbers import many
from ...output import Json, Progress, Result, Verbatim, command
from ...store import conversation_archive
from ...store.conversations import Outcome
from ..options import Target
from ..responses.import_ import SHOWN, File, lines_of, numbered
from ..responses.progress import Counting, ended
from ..responses.sources import retried
from . import place
from .place import Store, opened


class Imported(msgspec.Struct):
    """Counts of an import.

    Args:
        count: new conversations.
        skipped: those that the store has already, which are kept as they are.
        broken: line numbers, from 1, and the reasons.
    """

    count: int = 0
    skipped: int = 0
    broken: dict[int, str] = {}


@command
def import_(
    file: File,
    *,
    target: Target = None,
    store: Store = None,
    json_: Json = False,
) -> Result:
    """Import conversations into a store: a new one, an existing one, or a server's.

    Existing conversations are kept, so the command can be repeated. Broken lines
    are reported, and all other lines are imported.
    """
    done = Imported()
    with Progress(time.time(), quiet=json_) as progress, lines_of(file) as lines:
        counting = Counting(progress, "conversations imported")
        try:
            name = asyncio.run(imported(target, store, lines, done, counting))
        except KeyboardInterrupt as error:
            raise counting.interrupted(done) from error
    data = {"store": name, "count": done.count, "skipped": done.skipped}
    data["broken"] = [{"line": n, "reason": why} for n, why in done.broken.items()]
    failure = None
    if done.broken:
        failure = VllmopsError(
            "conversations.broken",
            f"{len(done.broken):,} lines are broken",
            "export them again; the other lines are imported",
        )
    return ended(Result(data, lambda: list(summary(name, done))), failure, as_json=json_)


def summary(name: str, done: Imported) -> Iterator[str]:
    """Human-readable summary of an import."""
    yield Verbatim(f"{many(done.count, 'conversation')} imported into {name}")
    if done.skipped:
        yield f"{done.skipped:,} skipped: a conversation with that id exists"
    for number, why in list(done.broken.items())[:SHOWN]:
        yield Verbatim(f"line {number}: {why}")
    if len(done.broken) > SHOWN:
        yield f"and {len(done.broken) - SHOWN:,} others"


async def imported(
    target: str | None, store: str | None, lines: IO[bytes], done: Imported, counting: Counting
) -> str:
    """Import lines into a store. Gives its name."""
    async with opened(target, store, create=True) as (name, kept):
        for number, text in numbered(lines, place.LONGEST_LINE):
            if text is None:
                done.broken[number] = f"it is longer than {place.LONGEST_LINE >> 20} MiB"
                continue
            if not text.strip():
                continue
            try:
                conversation, entries = conversation_archive.decode(text)
            except (ValueError, RecursionError) as error:
                done.broken[number] = f"{error}"
                continue
            outcome = await retried(partial(kept.create, conversation, entries))
            if outcome is Outcome.DONE:
                done.count += 1
            elif outcome is Outcome.TAKEN:
                done.skipped += 1
            else:
                done.broken[number] = f"the store does not take it: {outcome.value}"
            counting.add()
        return name
