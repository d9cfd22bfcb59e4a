"""``vllmops stacks explain``: what is stuck, from stacks that somebody pasted or saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...diagnose.findings import Severity
from ...output import Json, Result, command
from ..findings import FailOn


@command
def explain(
    file: Annotated[
        Path | None,
        typer.Argument(
            readable=False,
            metavar="[FILE | -]",
            help="Stacks in any form, or a bundle; - for standard input.",
            allow_dash=True,
        ),
    ] = None,
    *,
    fact: Annotated[
        list[str] | None,
        typer.Option(
            help="What else is known: running=0, waiting=3, deferred=0, kv_usage=0 (percent), "
            "progress=frozen or moving (tokens), steps=frozen or moving (the scheduler's), "
            "still=12 (seconds without a token).",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    fail_on: FailOn = Severity.ERROR,
    json_: Json = False,
) -> Result:
    """Say what is stuck, why, and the way out, from stacks.

    It reads what py-spy, faulthandler, gdb and `stacks dump` print or save, of one or more
    processes, once or several times, as it comes out of logs, terminals and mail. Three dumps some
    seconds apart in one file tell more than one. What it does not know it says. A bundle is read,
    too, with the figures that are in it.
    """
    from . import explanation  # noqa: PLC0415 - slow to import, and not needed for --help

    return explanation.of_file(file, fact or (), fail_on)
