"""``vllmops responses stats``: counts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllmops.commands.options import Target
from vllmops.support import output
from vllmops.support.output import Json, Progress, Result, format_bytes, print_result

from ...store.backend import StoreStats
from .progress import ProgressCounter
from .response_options import Selection, Store
from .response_rows import OWNER_LETTERS, STYLES, format_age
from .source_options import iterate_pages, open_source

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...store.response_source import ResponseSource

OWNERS = 10  # those with the most responses are shown


@print_result
def stats(*, target: Target = None, store: Store = None, json_: Json = False) -> Result:
    """Count responses by status, model and API key; bytes, age and evictions.

    A server counts the responses of one API key and their size as JSON, without
    events and evictions. With --store, all keys are counted, with stored bytes.
    """
    with Progress(time.time(), quiet=json_) as progress:
        counting = ProgressCounter(progress, "counted")
        name, counts, whole = asyncio.run(collect_stats(target, store, counting))
    data = {"of": name, "count": counts.response_count, **msgspec.structs.asdict(counts)}
    if not whole:
        data["evictions"] = None
    return Result(data, lambda: list(render_stats(data)))


async def collect_stats(
    target: str | None, store: str | None, counting: ProgressCounter
) -> tuple[str, StoreStats, bool]:
    """The source's name, its statistics, and whether all API keys are included.

    Raises:
        VllmopsError: as `open_source` and its methods.
    """
    async with open_source(target, store) as responses:
        if responses.has_all_owners:
            from ...store.store_source import DirectStore  # noqa: PLC0415

            assert isinstance(responses, DirectStore)
            return responses.name, await responses.collect_stats(), True
        return responses.name, await sum_pages(responses, counting), False


async def sum_pages(responses: ResponseSource, counting: ProgressCounter) -> StoreStats:
    """Statistics summed over all pages of a list."""
    statuses, models, total = Counter[str](), Counter[str](), 0
    oldest: float | None = None
    async for page in iterate_pages(responses, Selection().build_query(descending=True)):
        statuses.update(response.status for response in page)
        models.update(response.model for response in page)
        total += sum(len(response.body) for response in page)
        known = [] if oldest is None else [oldest]
        oldest = min([*known, *(response.created_at for response in page)], default=None)
        counting.add(len(page))
    return StoreStats(
        statuses=dict(statuses),
        models=dict(models),
        bytes=total,
        event_bytes=None,
        oldest=oldest,
        evictions=0,
    )


def render_stats(data: dict[str, Any]) -> Iterator[RenderableType]:
    """Human-readable output."""
    yield output.style_text(f"{data['of']}: {data['count']:,} responses", "bold")
    for name, head in (("statuses", "status"), ("models", "model")):
        if data[name]:
            table = output.make_table(head, "", right_columns=[""])
            for word, count in sorted(data[name].items(), key=lambda pair: -pair[1]):
                table.add_row(output.style_text(word, STYLES.get(word, "")), f"{count:,}")
            yield table
    if data["owners"]:
        table = output.make_table("API key (SHA-256)", "", right_columns=[""])
        for owner, count in list(data["owners"].items())[:OWNERS]:
            table.add_row(f"{owner[:OWNER_LETTERS]}…" if owner else "none", f"{count:,}")
        if len(data["owners"]) > OWNERS:
            table.add_row(f"and {len(data['owners']) - OWNERS:,} others", "", style="dim")
        yield table
    yield output.make_facts_table(
        [
            ("bytes", format_bytes(data["bytes"])),
            ("bytes of events", format_or_unavailable(data["event_bytes"], format_bytes)),
            ("oldest", f"{format_age(data['oldest'])} ago" if data["oldest"] is not None else "-"),
            ("evicted in total", format_or_unavailable(data["evictions"], "{:,}".format)),
        ]
    )


def format_or_unavailable(value: Any, form: Any) -> str:
    return "not available from a server; use --store" if value is None else str(form(value))
