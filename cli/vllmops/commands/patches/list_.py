"""``vllmops patches list``: the state of each patch in each process."""

from __future__ import annotations

from ...output import Json, Result, command
from ..options import Target
from .states import asked, listing, report


@command
def list_(*, target: Target = None, json_: Json = False) -> Result:
    """Show what became of each patch, process by process.

    Of a running server with --target; of the vLLM in this environment
    without, where no server is started. A patch is `fixed upstream`,
    `applied`, `failed` (and why) or `off`; a process that has not loaded
    the code it is about is left out.
    """
    processes, silent = asked(target, verify=False, quiet=json_)
    return Result(report(processes, silent), lambda: listing(processes, silent))
