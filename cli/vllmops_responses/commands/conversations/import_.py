"""``vllmops conversations import``: conversations from lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import IO

import msgspec

from vllmops.commands.options import Target
from vllmops.support.errors import VllmopsError
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, Progress, Result, VerbatimText, print_result

from ...store import conversation_archive
from ...store.conversation_backend import ConversationResult
from ..responses.import_ import SHOWN, File, number_lines, open_lines
from ..responses.progress import ProgressCounter, return_or_show_and_raise
from ..responses.source_options import retry_while_unavailable
from . import store_options
from .store_options import Store, open_conversations


class ImportCounts(msgspec.Struct):
    """Counts of an import.

    Args:
        count: new conversations.
        skipped: those that the store has already, which are kept as they are.
        broken: line numbers, from 1, and the reasons.
    """

    count: int = 0
    skipped: int = 0
    broken: dict[int, str] = {}


@print_result
def import_conversations(
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
    done = ImportCounts()
    with Progress(time.time(), quiet=json_) as progress, open_lines(file) as lines:
        counting = ProgressCounter(progress, "conversations imported")
        try:
            name = asyncio.run(import_lines(target, store, lines, done, counting))
        except KeyboardInterrupt as error:
            raise counting.make_interrupted_error(done) from error
    data = {"store": name, "count": done.count, "skipped": done.skipped}
    data["broken"] = [{"line": n, "reason": why} for n, why in done.broken.items()]
    failure = None
    if done.broken:
        failure = VllmopsError(
            "conversations.broken",
            f"{len(done.broken):,} lines are broken",
            "export them again; the other lines are imported",
        )
    return return_or_show_and_raise(
        Result(data, lambda: list(render_summary(name, done))), failure, as_json=json_
    )


def render_summary(name: str, counts: ImportCounts) -> Iterator[str]:
    """Human-readable summary of an import."""
    yield VerbatimText(f"{format_count(counts.count, 'conversation')} imported into {name}")
    if counts.skipped:
        yield f"{counts.skipped:,} skipped: a conversation with that id exists"
    for number, why in list(counts.broken.items())[:SHOWN]:
        yield VerbatimText(f"line {number}: {why}")
    if len(counts.broken) > SHOWN:
        yield f"and {len(counts.broken) - SHOWN:,} others"


async def import_lines(
    target: str | None,
    store: str | None,
    lines: IO[bytes],
    counts: ImportCounts,
    counting: ProgressCounter,
) -> str:
    """Import lines into a store. Gives its name."""
    async with open_conversations(target, store, create=True) as (name, kept):
        for number, text in number_lines(lines, store_options.LONGEST_LINE):
            if text is None:
                counts.broken[number] = f"it is longer than {store_options.LONGEST_LINE >> 20} MiB"
                continue
            if not text.strip():
                continue
            try:
                conversation, entries = conversation_archive.decode_line(text)
            except (ValueError, RecursionError) as error:
                counts.broken[number] = f"{error}"
                continue
            outcome = await retry_while_unavailable(partial(kept.create, conversation, entries))
            if outcome is ConversationResult.DONE:
                counts.count += 1
            elif outcome is ConversationResult.TAKEN:
                counts.skipped += 1
            else:
                counts.broken[number] = f"the store does not take it: {outcome.value}"
            counting.add()
        return name
