"""``vllmops patches list``: the state of each patch in each process."""

from __future__ import annotations

from typing import Annotated

import typer

from ...errors import usage
from ...output import Json, Result
from ..options import Target
from ..several import per_target
from . import versions as tested
from .states import asked, listing, report

Versions = Annotated[
    bool, typer.Option("--versions", help="Show what works with which version of vLLM, as tested.")
]


@per_target
def list_(*, target: Target = None, versions: Versions = False, json_: Json = False) -> Result:
    """Show the state of each patch in each process.

    With --target it asks a running server. Without it checks the vLLM in
    this environment, and starts no server. A patch is `fixed upstream`,
    `applied`, `failed` (with the reason) or `off`. A process that has not
    loaded the patched code is left out. What else does not fit this vLLM
    is listed below the table.
    """
    if versions:
        if target is not None:
            raise usage(
                "--versions shows what was tested, not a server", "vllmops patches list --versions"
            )
        return Result(tested.report(), tested.listing)
    processes, silent = asked(target, verify=False, quiet=json_)
    return Result(report(processes, silent), lambda: listing(processes, silent))
