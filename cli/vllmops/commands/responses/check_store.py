"""``vllmops responses check-store``: whether a store keeps what a server relies on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ... import output
from ...errors import Exit
from ...output import Json, Progress, Result, command
from ...store import conformance
from ...store.urls import shown

if TYPE_CHECKING:
    from rich.console import RenderableType


@command
def check_store(
    url: Annotated[
        str,
        typer.Argument(help="memory://, sqlite:///FILE, postgresql://, redis:// or valkey://."),
    ],
    *,
    json_: Json = False,
) -> Result:
    """Check that a store keeps what a server relies on.

    Every promise is tried out, in a store of its own beside the responses
    that are there, and leaves nothing behind. With a class of your own, named
    by VLLM_RESPONSES_STORE_BACKEND, the store has to be empty.
    """
    with Progress(time.time(), quiet=json_) as progress:
        outcomes, caveats = asyncio.run(checked(url, progress))
    broken = [each for each in outcomes if each.problem]
    data = {
        "store": shown(url),
        "checks": [each._asdict() for each in outcomes],
        "caveats": caveats,
    }
    return Result(data, lambda: list(told(outcomes, caveats)), Exit.FAILED if broken else Exit.OK)


async def checked(url: str, progress: Progress) -> tuple[list[conformance.Outcome], list[str]]:
    """The outcome of every check, and what the server's settings make of it all.

    Raises:
        VllmopsError: as `conformance.run`.
    """
    outcomes = []
    progress.update("is it there")
    caveats = await conformance.probe(url)
    async for each in conformance.run(url):
        outcomes.append(each)
        progress.update(f"{len(outcomes)} of {len(conformance.CHECKS)}: {each.name}")
    return outcomes, caveats


def told(outcomes: list[conformance.Outcome], caveats: list[str]) -> Iterator[RenderableType]:
    """The same for a person."""
    from rich.text import Text  # noqa: PLC0415

    table = output.table("a store …", "", "seconds", right=["seconds"])
    for name, problem, seconds in outcomes:
        table.add_row(name, Text("no", "red") if problem else "yes", f"{seconds:.2f}")
    yield table
    for name, problem, _ in outcomes:
        if problem:
            yield output.Verbatim(f"{name}: {problem}")
    for each in caveats:
        yield output.Verbatim(f"note: {each}")
    broken = sum(bool(each.problem) for each in outcomes)
    yield output.Verbatim(
        f"{broken} of {len(outcomes)} promises are broken" if broken else "it keeps every promise"
    )
