"""``vllmops patches verify``: run the probes again."""

from __future__ import annotations

from ...support.errors import ExitCode
from ...support.output import Json, Result
from ..multi_target import run_per_target
from ..options import Target
from .patch_states import build_patches_data, fetch_patches, render_patches


@run_per_target
def verify(*, target: Target = None, json_: Json = False) -> Result:
    """Run each probe again; the exit code is 1 if a defect is present.

    Probes use their own objects and are safe in production.
    """
    processes, silent = fetch_patches(target, verify=True, quiet=json_)
    bad = any(verdict.present for process in processes for verdict in process.patches)
    return Result(
        build_patches_data(processes, silent),
        lambda: render_patches(processes, silent, verify=True),
        ExitCode.FAILED if bad else ExitCode.OK,
    )
