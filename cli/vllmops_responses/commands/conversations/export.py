"""``vllmops conversations export``: conversations as lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from vllmops.commands.options import Target
from vllmops.support import output
from vllmops.support.errors import VllmopsError, make_usage_error
from vllmops.support.numbers import format_count
from vllmops.support.output import Json, Progress, Result, print_result

from ...store import conversation_archive
from ...store.backend import CursorUnknown
from ..responses.export import SHOWN, Force, Out, open_line_writer
from ..responses.progress import ProgressCounter, return_or_show_and_raise
from . import store_options
from .store_options import Store, iterate_conversations, load_items, open_conversations


class ExportCounts(msgspec.Struct):
    """Counts of an export.

    Args:
        count: conversations written.
        damage_by_id: ids of those that are damaged or too large, which are left out, and the
            reasons.
    """

    count: int = 0
    damage_by_id: dict[str, str] = msgspec.field(default={}, name="damaged")


@print_result
def export(
    *,
    target: Target = None,
    store: Store = None,
    out: Out = None,
    force: Force = False,
    json_: Json = False,
) -> Result:
    """Write conversations with their items, one line of JSON each.

    `import` reads the file into any store.
    """
    if json_ and out is None:
        raise make_usage_error("--json prints one envelope, so the lines need a file", "--out FILE")
    done = ExportCounts()
    with (
        Progress(time.time(), quiet=json_) as progress,
        open_line_writer(out, force=force) as write,
    ):
        counting = ProgressCounter(progress, "exported")
        try:
            asyncio.run(export_conversations(target, store, write, done, counting))
        except KeyboardInterrupt as error:
            raise counting.make_interrupted_error() from error
    if not json_:
        output.print_to_stderr(
            f"{format_count(done.count, 'conversation')} exported" + (f" to {out}" if out else ""),
            "dim",
        )
        for name, why in list(done.damage_by_id.items())[:SHOWN]:
            output.print_to_stderr(f"left out (damaged): {name}: {why}")
    data = {"count": done.count, "path": str(out) if out else None, "damaged": done.damage_by_id}
    failure = None
    if done.damage_by_id:
        failure = VllmopsError(
            "conversations.broken",
            "left out, as damaged or too large: "
            f"{format_count(len(done.damage_by_id), 'conversation')}",
            "vllmops conversations show ID shows what is readable",
        )
    return return_or_show_and_raise(Result(data), failure, as_json=json_)


async def export_conversations(
    target: str | None,
    store: str | None,
    write: Callable[[list[bytes]], None],
    counts: ExportCounts,
    counting: ProgressCounter,
) -> None:
    """Write all conversations, the newest first; one that is deleted meanwhile is left out."""
    async with open_conversations(target, store) as (_, kept):
        async for one in iterate_conversations(kept):
            try:
                entries = await load_items(kept, one.id)
                line = None if entries is None else conversation_archive.encode_line(one, entries)
                if line:  # what `import` would not take is left out, and named
                    conversation_archive.decode_line(line)
                    if len(line) >= store_options.LONGEST_LINE:
                        raise ValueError(f"it has more than {store_options.LONGEST_LINE >> 20} MiB")
            except (ValueError, CursorUnknown) as error:
                counts.damage_by_id[one.id] = f"{error}"
                continue
            if line:
                write([line])
                counts.count += 1
                counting.add()
