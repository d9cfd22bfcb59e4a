"""``vllmops responses check-store``: check that a store behaves as a server needs it."""

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
    """Check that a store behaves as a server needs it.

    Every check runs in a temporary namespace beside the stored responses, and
    cleans up after itself; a SQLite file that was not there stays, without responses.
    With your own backend class, named by VLLM_RESPONSES_STORE_BACKEND, the store must
    be empty.
    """
    with Progress(time.time(), quiet=json_) as progress:
        outcomes, caveats = asyncio.run(checked(url, progress))
    broken = [outcome for outcome in outcomes if outcome.problem]
    data = {
        "store": shown(url),
        "checks": [outcome._asdict() for outcome in outcomes],
        "caveats": caveats,
    }
    return Result(data, lambda: list(render(outcomes, caveats)), Exit.FAILED if broken else Exit.OK)


async def checked(url: str, progress: Progress) -> tuple[list[conformance.CheckResult], list[str]]:
    """The outcome of every check, and caveats from the server's settings.

    Raises:
        VllmopsError: as `conformance.run`.
    """
    outcomes = []
    progress.update("connecting")
    caveats = await conformance.probe(url)
    async for outcome in conformance.run(url):
        outcomes.append(outcome)
        progress.update(f"{len(outcomes)} of {len(conformance.CHECKS)}: {outcome.name}")
    return outcomes, caveats


def render(outcomes: list[conformance.CheckResult], caveats: list[str]) -> Iterator[RenderableType]:
    """Human-readable output."""
    table = output.table("check", "passed", "seconds", right=["seconds"])
    for name, problem, seconds in outcomes:
        table.add_row(name, output.styled("no", "red") if problem else "yes", f"{seconds:.2f}")
    yield table
    for name, problem, _ in outcomes:
        if problem:
            yield output.Verbatim(f"{name}: {problem}")
    for caveat in caveats:
        yield output.Verbatim(f"note: {caveat}")
    broken = sum(bool(outcome.problem) for outcome in outcomes)
    yield output.Verbatim(
        f"{broken} of {len(outcomes)} checks failed" if broken else "all checks passed"
    )
