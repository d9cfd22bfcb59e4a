"""``vllmops stacks explain``: what is stuck, from pasted or saved stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...model.findings import Severity
from ...support.output import Json, Result, print_result
from ..findings_view import FailOn


@print_result
def explain(
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            metavar="[FILE | -]",
            help="Stacks in any format, or a bundle; - for standard input.",
            allow_dash=True,
        ),
    ] = None,
    *,
    fact: Annotated[
        list[str] | None,
        typer.Option(
            help="What else you know: running=0, waiting=3, deferred=0, kv_usage=0 (percent), "
            "progress=frozen or moving (tokens), steps=frozen or moving (the scheduler's), "
            "still=12 (seconds without a token).",
            metavar="NAME=VALUE",
        ),
    ] = None,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """Show what is stuck, why, and what to do next, from pasted or saved stacks.

    It reads the output of py-spy, faulthandler, gdb and `stacks dump`, also when it comes from a
    log, a terminal or a mail. One file may hold several processes and several dumps; three dumps
    some seconds apart say more than one. If no known signature matches, it says so. It also reads
    a bundle, with the figures in it.
    """
    from . import explanation_view  # noqa: PLC0415 - slow to import, and not needed for --help

    return explanation_view.explain_file(file, fact or (), fail_on)
