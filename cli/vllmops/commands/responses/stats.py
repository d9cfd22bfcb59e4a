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

    from ...store.source import Source

OWNERS = 10  # those with the most responses are shown


@command
def stats(*, target: Target = None, store: Store = None, json_: Json = False) -> Result:
    """Count responses by status, model and API key; bytes, age and evictions.

    A server counts the responses of one API key and their size as JSON, without
    events and evictions. With --store, all keys are counted, with stored bytes.
    """
    with Progress(time.time(), quiet=json_) as progress:
        counting = Counting(progress, "counted")
        name, counts, whole = asyncio.run(counted(target, store, counting))
    data = {"of": name, "count": counts.count, **msgspec.structs.asdict(counts)}
    if not whole:
        data["evictions"] = None
    return Result(data, lambda: list(figures(data)))


async def counted(
    target: str | None, store: str | None, counting: Counting
) -> tuple[str, Stats, bool]:
    """The source's name, its statistics, and whether all API keys are included.

    Raises:
        VllmopsError: as `source` and its methods.
    """
    async with source(target, store) as responses:
        if responses.whole:
            from ...store.direct import Storage  # noqa: PLC0415

            assert isinstance(responses, Storage)
            return responses.name, await responses.stats(), True
        return responses.name, await sum_of_pages(responses, counting), False


async def sum_of_pages(responses: Source, counting: Counting) -> Stats:
    """Statistics summed over all pages of a list."""
    statuses, models, total = Counter[str](), Counter[str](), 0
    oldest: float | None = None
    async for page in walk(responses, Selection().query(descending=True)):
        statuses.update(response.status for response in page)
        models.update(response.model for response in page)
        total += sum(len(response.body) for response in page)
        known = [] if oldest is None else [oldest]
        oldest = min([*known, *(response.created_at for response in page)], default=None)
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
    """Human-readable output."""
    yield output.styled(f"{data['of']}: {data['count']:,} responses", "bold")
    for name, head in (("statuses", "status"), ("models", "model")):
        if data[name]:
            table = output.table(head, "", right=[""])
            for word, count in sorted(data[name].items(), key=lambda pair: -pair[1]):
                table.add_row(output.styled(word, STYLES.get(word, "")), f"{count:,}")
            yield table
    if data["owners"]:
        table = output.table("API key (SHA-256)", "", right=[""])
        for owner, count in list(data["owners"].items())[:OWNERS]:
            table.add_row(f"{owner[:OWNER_LETTERS]}…" if owner else "none", f"{count:,}")
        if len(data["owners"]) > OWNERS:
            table.add_row(f"and {len(data['owners']) - OWNERS:,} others", "", style="dim")
        yield table
    yield output.facts(
        [
            ("bytes", size(data["bytes"])),
            ("bytes of events", or_unavailable(data["event_bytes"], size)),
            ("oldest", f"{age(data['oldest'])} ago" if data["oldest"] is not None else "-"),
            ("evicted in total", or_unavailable(data["evictions"], "{:,}".format)),
        ]
    )


def or_unavailable(value: Any, form: Any) -> str:
    return "not available from a server; use --store" if value is None else str(form(value))
