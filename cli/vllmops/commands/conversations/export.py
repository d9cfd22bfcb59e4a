"""``vllmops conversations export``: conversations as lines of JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from ... import output
from ...errors import VllmopsError, usage
from ...numbers import many
from ...output import Json, Progress, Result, command
from ...store import conversation_archive
from ...store.backend import CursorUnknown
from ..options import Target
from ..responses.export import SHOWN, Force, Out, sink
from ..responses.progress import Counting, ended
from . import place
from .place import Store, items, opened, walk


class Exported(msgspec.Struct):
    """Counts of an export.

    Args:
        count: conversations written.
        damaged: ids of those that are damaged or too large, which are left out, and the reasons.
    """

    count: int = 0
    damaged: dict[str, str] = {}


@command
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
        raise usage("--json prints one envelope, so the lines need a file", "--out FILE")
    done = Exported()
    with Progress(time.time(), quiet=json_) as progress, sink(out, force=force) as write:
        counting = Counting(progress, "exported")
        try:
            asyncio.run(exported(target, store, write, done, counting))
        except KeyboardInterrupt as error:
            raise counting.interrupted() from error
    if not json_:
        output.say(
            f"{many(done.count, 'conversation')} exported" + (f" to {out}" if out else ""), "dim"
        )
        for name, why in list(done.damaged.items())[:SHOWN]:
            output.say(f"left out (damaged): {name}: {why}")
    data = {"count": done.count, "path": str(out) if out else None, "damaged": done.damaged}
    failure = None
    if done.damaged:
        failure = VllmopsError(
            "conversations.broken",
            f"left out, as damaged or too large: {many(len(done.damaged), 'conversation')}",
            "vllmops conversations show ID shows what is readable",
        )
    return ended(Result(data), failure, as_json=json_)


async def exported(
    target: str | None,
    store: str | None,
    write: Callable[[list[bytes]], None],
    done: Exported,
    counting: Counting,
) -> None:
    """Write all conversations, the newest first; one that is deleted meanwhile is left out."""
    async with opened(target, store) as (_, kept):
        async for one in walk(kept):
            try:
                entries = await items(kept, one.id)
                line = None if entries is None else conversation_archive.encode(one, entries)
                if line:  # what `import` would not take is left out, and named
                    conversation_archive.decode(line)
                    if len(line) >= place.LONGEST_LINE:
                        raise ValueError(f"it has more than {place.LONGEST_LINE >> 20} MiB")
            except (ValueError, CursorUnknown) as error:
                done.damaged[one.id] = f"{error}"
                continue
            if line:
                write([line])
                done.count += 1
                counting.add()
