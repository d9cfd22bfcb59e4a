"""``vllmops patches list``: the state of each patch in each process."""

from __future__ import annotations

from ...output import Json, Result
from ..options import Target
from ..several import per_target
from .states import asked, listing, report


@per_target
def list_(*, target: Target = None, json_: Json = False) -> Result:
    """Show the state of each patch in each process.

    With --target it asks a running server. Without it checks the vLLM in
    this environment, and starts no server. A patch is `fixed upstream`,
    `applied`, `failed` (with the reason) or `off`. A process that has not
    loaded the patched code is left out.
    """
    processes, silent = asked(target, verify=False, quiet=json_)
    return Result(report(processes, silent), lambda: listing(processes, silent))
