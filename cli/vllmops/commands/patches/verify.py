"""``vllmops patches verify``: run the probes again."""

from __future__ import annotations

from ...errors import Exit
from ...output import Json, Result
from ..options import Target
from ..several import per_target
from .states import asked, listing, report


@per_target
def verify(*, target: Target = None, json_: Json = False) -> Result:
    """Run each probe again; the exit code is 1 if a defect is present.

    Probes use their own objects and are safe in production.
    """
    processes, silent = asked(target, verify=True, quiet=json_)
    bad = any(verdict.present for process in processes for verdict in process.patches)
    return Result(
        report(processes, silent),
        lambda: listing(processes, silent, verify=True),
        Exit.FAILED if bad else Exit.OK,
    )
