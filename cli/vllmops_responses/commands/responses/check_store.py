"""``vllmops responses check-store``: check that a store behaves as a server needs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vllmops.support import output
from vllmops.support.errors import ExitCode
from vllmops.support.output import Json, Progress, Result, print_result
from vllmops.support.urls import redact_url

from ...store.conformance import response_checks

if TYPE_CHECKING:
    from rich.console import RenderableType


@print_result
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
        outcomes, caveats = asyncio.run(run_checks(url, progress))
    broken = [outcome for outcome in outcomes if outcome.problem]
    data = {
        "store": redact_url(url),
        "checks": [outcome._asdict() for outcome in outcomes],
        "caveats": caveats,
    }
    return Result(
        data,
        lambda: list(render_checks(outcomes, caveats)),
        ExitCode.FAILED if broken else ExitCode.OK,
    )


async def run_checks(
    url: str, progress: Progress
) -> tuple[list[response_checks.CheckResult], list[str]]:
    """The outcome of every check, and caveats from the server's settings.

    Raises:
        VllmopsError: as `response_checks.run_checks`.
    """
    outcomes = []
    progress.update("connecting")
    caveats = await response_checks.collect_caveats(url)
    async for outcome in response_checks.run_checks(url):
        outcomes.append(outcome)
        progress.update(f"{len(outcomes)} of {len(response_checks.CHECKS)}: {outcome.name}")
    return outcomes, caveats


def render_checks(
    outcomes: list[response_checks.CheckResult], caveats: list[str]
) -> Iterator[RenderableType]:
    """Human-readable output."""
    table = output.make_table("check", "passed", "seconds", right_columns=["seconds"])
    for name, problem, seconds in outcomes:
        table.add_row(name, output.style_text("no", "red") if problem else "yes", f"{seconds:.2f}")
    yield table
    for name, problem, _ in outcomes:
        if problem:
            yield output.VerbatimText(f"{name}: {problem}")
    for caveat in caveats:
        yield output.VerbatimText(f"note: {caveat}")
    broken = sum(bool(outcome.problem) for outcome in outcomes)
    yield output.VerbatimText(
        f"{broken} of {len(outcomes)} checks failed" if broken else "all checks passed"
    )
