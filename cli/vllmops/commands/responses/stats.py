"""``vllmops responses stats``: counts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ... import output
from ...output import Json, Progress, Result, command, size
from ...store.backend import Stats
from ..options import Target
from .entries import OWNER_LETTERS, STYLES, age
from .progress import Counting
from .selection import Selection, Store
from .sources import source, walk

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...vllm_api.responses import Source

OWNERS = 10  # shown, those who have most


@command
def stats(*, target: Target = None, store: Store = None, json_: Json = False) -> Result:
    """Count responses by status, model and API key; bytes, age and evictions.

    A server tells of those of one API key, each as JSON, and not of events
    and evictions; the store itself of all, and of bytes as they are kept.
    """
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "counted")
        name, found, whole = asyncio.run(counted(target, store, counting))
    data = {"of": name, "count": found.count, **msgspec.structs.asdict(found)}
    if not whole:
        data["evictions"] = None
    return Result(data, lambda: list(figures(data)))


async def counted(
    target: str | None, store: str | None, counting: Counting
) -> tuple[str, Stats, bool]:
    """What there is, whose word that is, and whether it is everybody's.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    async with source(target, store) as responses:
        if responses.whole:
            from ...store.direct import Storage  # noqa: PLC0415

            assert isinstance(responses, Storage)
            return responses.name, await responses.stats(), True
        return responses.name, await added_up(responses, counting), False


async def added_up(responses: Source, counting: Counting) -> Stats:
    """The same from a list of all."""
    statuses, models, total = Counter[str](), Counter[str](), 0
    oldest: float | None = None
    async for page in walk(responses, Selection().query(descending=True)):
        statuses.update(each.status for each in page)
        models.update(each.model for each in page)
        total += sum(len(each.body) for each in page)
        oldest = min([*([] if oldest is None else [oldest]), *(each.created_at for each in page)])
        counting.add(len(page))
    return Stats(
        statuses=dict(statuses),
        models=dict(models),
        bytes=total,
        event_bytes=None,
        oldest=oldest,
        evictions=0,
    )


def figures(data: dict[str, Any]) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    yield Text(f"{data['of']}: {data['count']:,} responses", style="bold")
    for name, head in (("statuses", "status"), ("models", "model")):
        if data[name]:
            table = output.table(head, "", right=[""])
            for word, count in sorted(data[name].items(), key=lambda each: -each[1]):
                table.add_row(Text(word, STYLES.get(word, "")), f"{count:,}")
            yield table
    if data["owners"]:
        table = output.table("API key, by its SHA-256", "", right=[""])
        for owner, count in list(data["owners"].items())[:OWNERS]:
            table.add_row(Text(f"{owner[:OWNER_LETTERS]}…" if owner else "none"), f"{count:,}")
        if len(data["owners"]) > OWNERS:
            table.add_row(f"and {len(data['owners']) - OWNERS:,} others", "", style="dim")
        yield table
    rest = output.table("", "")
    rest.show_header = False
    rest.add_row("bytes", size(data["bytes"]))
    rest.add_row("of events", told_or(data["event_bytes"], size))
    rest.add_row("oldest", f"{age(data['oldest'])} ago" if data["oldest"] is not None else "-")
    rest.add_row("evicted, ever", told_or(data["evictions"], "{:,}".format))
    yield rest


def told_or(value: Any, told: Any) -> str:
    return "not known to a server; --store tells" if value is None else str(told(value))
